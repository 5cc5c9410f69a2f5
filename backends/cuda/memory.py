"""The CUDA driver's side of memory that peers map, and of host memory that the device reaches."""

from __future__ import annotations

from typing import Any, Final

import torch

from halma.backends.cuda import driver

_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_CANNOT_OPEN_OWN: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: the handle is of this very process

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_DEVICEMAP: Final = 2  # CU_MEMHOSTREGISTER_DEVICEMAP


class DeviceBytes:
    """Bytes at an address, as what torch can alias."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class DriverMemory:
    """See :class:`halma.backends.torch_device.memory.MemoryCalls`."""

    magic = b"hcu1"
    handle_bytes = 64

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def why_missing(self) -> str | None:
        """What is not installed."""
        return driver.why_missing()

    def allocate(self, nbytes: int) -> int:
        """New device memory, at the driver's own granularity."""
        return int(driver.call("cuMemAlloc", nbytes))

    def clear(self, address: int, nbytes: int) -> None:
        """On the default stream."""
        driver.call("cuMemsetD8", _pointer(address), 0, nbytes)

    def export(self, address: int) -> bytes:
        """The driver's handle."""
        return bytes(driver.call("cuIpcGetMemHandle", _pointer(address)).reserved)

    def free(self, address: int) -> None:
        """Give it back."""
        driver.call("cuMemFree", _pointer(address))

    def open(self, handle: bytes) -> int:
        """Map a peer's."""
        given: Any = driver.bindings().CUipcMemHandle()
        given.reserved = handle
        return int(driver.call("cuIpcOpenMemHandle", given, _LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """Unmap it."""
        driver.call("cuIpcCloseMemHandle", _pointer(address))

    def lock(self, host: int, nbytes: int) -> None:
        """For every context, mapped."""
        driver.call("cuMemHostRegister", host, nbytes, _PORTABLE | _DEVICEMAP)

    def unlock(self, host: int) -> None:
        """Give the lock back."""
        driver.call("cuMemHostUnregister", host)

    def on_device(self, host: int) -> int:
        """The driver's address for it."""
        return int(driver.call("cuMemHostGetDevicePointer", host, 0))

    def pinned_on_device(self, host: int) -> int:
        """The same address: one address space."""
        return host

    def explain_open(self, error: RuntimeError) -> str:
        """The one failure that does not explain itself."""
        own = isinstance(error, driver.DriverError) and error.code == _CANNOT_OPEN_OWN
        return " (a fork of the owner cannot map it)" if own else ""

    def tensor_at(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """By the array interface that torch.cuda reads."""
        return torch.as_tensor(DeviceBytes(address, nbytes, owner), device=self._device)


def _pointer(address: int) -> Any:
    return driver.bindings().CUdeviceptr(address)
