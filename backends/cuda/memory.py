"""Memory of a CUDA device: torch's for programs, pinned for the host's side, the driver's for what peers map.

What peers map is allocated by the driver itself and not by torch: torch's allocator hands out pieces of larger
blocks, and with expandable segments blocks that cannot be exported at all.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np
import torch

from halma.backends.cuda import driver
from halma.hal.errors import CollectiveError
from halma.hal.shared_file import SharedFile

_HANDLE: Final = struct.Struct("<4sI16sQQ64s")  # magic, pid, token, address, bytes, the driver's handle
_MAGIC: Final = b"hcu1"
_GRANULE: Final = 2 << 20
"""The driver shares out pieces smaller than this of one block, and a handle opens the whole block to the peer."""
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_CANNOT_OPEN_OWN: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: the handle is of this very process

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_DEVICEMAP: Final = 2  # CU_MEMHOSTREGISTER_DEVICEMAP

_token: tuple[int, bytes] = (0, b"")


def _process() -> tuple[int, bytes]:
    """This process: its pid, and a random token, since a pid is unique in its own container only."""
    global _token
    if _token[0] != os.getpid():  # the first use, or a fork
        _token = (os.getpid(), secrets.token_bytes(16))
    return _token


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


class CudaShared:
    """See :class:`halma.hal.backend.SharedMemory`."""

    def __init__(self, address: int, nbytes: int, index: int, close: str | None) -> None:
        self._address = address
        self._index = index
        self._close = close
        self._tensor: torch.Tensor | None = torch.as_tensor(
            DeviceBytes(address, nbytes), device=torch.device("cuda", index)
        )

    @property
    def address(self) -> int:
        """Where it starts on the device."""
        return self._address

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as uint8 [nbytes].

        Raises:
            CollectiveError: it was closed.
        """
        if self._tensor is None:
            raise CollectiveError("shared memory is used after close()", found=f"it lay at {self._address:#x}")
        return self._tensor

    def close(self) -> None:
        """Wait for the device, then free what is ours, or unmap what is a peer's; twice is once."""
        if self._tensor is None:
            return
        self._tensor = None
        _own.pop(self._address, None)
        if self._close is not None:
            driver.ensure_context(self._index)
            torch.cuda.synchronize(self._index)
            driver.call(self._close, driver.bindings().CUdeviceptr(self._address))


class MappedFile:
    """Host memory that processes share, page-locked, as kernels of this device reach it at :attr:`address`.

    The driver locks a range once a process, so ranks that are streams of one process share the lock.
    """

    def __init__(self, file: SharedFile, index: int) -> None:
        view: Any = np.frombuffer(file.mapping, np.uint8)
        host = int(view.ctypes.data)
        driver.ensure_context(index)
        if not _locked[host]:
            driver.call("cuMemHostRegister", host, view.size, _PORTABLE | _DEVICEMAP)
        _locked[host] += 1
        self._release = weakref.finalize(self, _unlock, host, index, view)  # keeps it mapped until then
        self._release.atexit = False
        self.address = int(driver.call("cuMemHostGetDevicePointer", host, 0))

    def close(self) -> None:
        """Unlock it, once no kernel of this process writes there any more; twice is once."""
        self._release()


_locked: Counter[int] = Counter()
"""Address -> how many of this process's mappings hold it page-locked."""


def _unlock(host: int, index: int, view: Any) -> None:
    driver.ensure_context(index)
    torch.cuda.synchronize(index)
    _locked[host] -= 1
    if not _locked[host]:
        driver.call("cuMemHostUnregister", host)
        del _locked[host]


_own: dict[int, int] = {}
"""Address -> bytes of what this process exported and has not closed."""


class CudaMemory:
    """See :class:`halma.hal.backend.MemoryPart`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the device, contents undefined; freed with its last reference."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory, contents undefined."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def on_device(self, pinned: torch.Tensor) -> torch.Tensor:
        """The page-locked memory as a tensor of the device: kernels reach it over the bus, at its own address.

        Raises:
            ValueError: it is not page-locked, or not contiguous.
        """
        if not (pinned.is_pinned() and pinned.is_contiguous()):
            raise ValueError("on_device() takes contiguous memory of pinned()")
        if not pinned.numel():
            return torch.empty(pinned.shape, dtype=pinned.dtype, device=self._device)
        flat = torch.as_tensor(DeviceBytes(pinned.data_ptr(), pinned.nbytes, pinned), device=self._device)
        return flat.view(pinned.dtype).view(pinned.shape)

    def mapped(self, file: SharedFile) -> MappedFile:
        """Shared host memory, whole pages of it, for kernels of this device.

        Raises:
            CollectiveError: the driver cannot lock its pages.
        """
        try:
            return MappedFile(file, self._index)
        except driver.DriverError as error:
            raise CollectiveError(
                "host memory of another process cannot be reached by this device",
                asked=f"{file.nbytes:,} bytes, page-locked",
                found=str(error),
                do="allow the process to lock memory (ulimit -l)",
            ) from error

    def not_exportable(self) -> str | None:
        """What is missing to give memory to peers; torch's allocator settings do not matter, see the module."""
        missing = driver.why_missing()
        return f"peers map memory that the driver allocates, and {missing}" if missing else None

    def exportable(self, nbytes: int) -> tuple[CudaShared, bytes]:
        """Zero-filled device memory and its handle for :meth:`open`.

        Raises:
            MemoryError: there is not enough; :class:`CollectiveError` where nothing can be exported at all.
        """
        reason = self.not_exportable()
        if reason is not None:
            raise CollectiveError("device memory cannot be exported", found=reason)
        driver.ensure_context(self._index)
        size = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        try:
            address = int(driver.call("cuMemAlloc", size))
        except driver.DriverError as error:
            free, total = torch.cuda.mem_get_info(self._index)
            raise MemoryError(
                f"{size:,} bytes of device memory cannot be had: {error}; {free:,} of {total:,} bytes are free, "
                f"torch keeps {torch.cuda.memory_reserved(self._index):,} (torch.cuda.empty_cache() gives some back)"
            ) from error
        pointer = driver.bindings().CUdeviceptr(address)
        try:
            driver.call("cuMemsetD8", pointer, 0, size)
            torch.cuda.synchronize(self._index)
            raw = bytes(driver.call("cuIpcGetMemHandle", pointer).reserved)
            shared = CudaShared(address, nbytes, self._index, "cuMemFree")
        except BaseException:
            driver.call("cuMemFree", pointer)
            raise
        _own[address] = nbytes
        return shared, _HANDLE.pack(_MAGIC, *_process(), address, nbytes, raw)

    def open(self, handle: bytes) -> CudaShared:
        """Map a peer's memory; a handle of this process gives a view of the same memory.

        Raises:
            CollectiveError: not a handle of this backend, or its owner is gone.
        """
        if len(handle) != _HANDLE.size or handle[:4] != _MAGIC:
            raise CollectiveError("not a handle of the cuda backend", found=f"{len(handle)} bytes")
        _, pid, token, address, nbytes, raw = _HANDLE.unpack(handle)
        if (pid, token) == _process():
            if address not in _own:
                _refuse_open(pid, "this process closed that memory")
            return CudaShared(address, nbytes, self._index, None)
        reason = self.not_exportable()
        if reason is not None:
            _refuse_open(pid, reason)
        driver.ensure_context(self._index)
        given: Any = driver.bindings().CUipcMemHandle()
        given.reserved = raw
        try:
            mapped = int(driver.call("cuIpcOpenMemHandle", given, _LAZY_PEER_ACCESS))
        except driver.DriverError as error:
            own = " (a fork of the owner cannot map it)" if error.code == _CANNOT_OPEN_OWN else ""
            _refuse_open(pid, f"{error}{own}")
        return CudaShared(mapped, nbytes, self._index, "cuIpcCloseMemHandle")


def _refuse_open(pid: int, why: str) -> NoReturn:
    raise CollectiveError(
        f"memory of process {pid} cannot be mapped",
        found=why,
        do="keep the owner alive and its memory open until every peer has closed; give both processes the same GPUs",
    )
