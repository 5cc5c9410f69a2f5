"""The MUSA runtime's side of memory that peers map, and of host memory that the device reaches."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any, Final

import torch

from halma.backends.musa import runtime
from halma.backends.musa.device import ensure_context
from halma.backends.musa.runtime import HANDLE_BYTES, IpcHandle, LibraryError
from halma.backends.musa.seam import toolchain

_LAZY_PEER_ACCESS: Final = 1  # musaIpcMemLazyEnablePeerAccess
_PORTABLE: Final = 1  # musaHostRegisterPortable
_MAPPED: Final = 2  # musaHostRegisterMapped
_LEGACY_IPC_CAPABLE: Final = 10  # MU_POINTER_ATTRIBUTE_IS_LEGACY_..._IPC_CAPABLE, by the rule of names
VIRTUAL: Final = -1
TOO_LARGE: Final = -2
"""Codes of our own, for what the runtime does not count as an error."""
_SPARE: Final = 128
"""Bytes behind a handle that must stay as they are."""


class RuntimeMemory:
    """See :class:`halma.backends.torch_device.memory.MemoryCalls`.

    Only memory of ``musaMalloc`` is exported. Virtual memory (torch's expandable segments) cannot be opened by a legacy
    handle, and a peer that tries may hang (ROCm/aiter#2075), so memory that says it is not fit is refused.
    """

    magic = b"hmu1"
    handle_bytes = HANDLE_BYTES

    def __init__(self, index: int, device: torch.device) -> None:
        self._index = index
        self._device = device

    def why_missing(self) -> str | None:
        """What cannot be loaded, or why memory of this device cannot be exported; known before a plan is kept (A8)."""
        return runtime.why_missing("musart") or self._why_unfit

    @cached_property
    def _why_unfit(self) -> str | None:
        try:
            ensure_context(self._index)
            self.free(self.allocate(1))
        except LibraryError as error:
            return str(error) if error.code == VIRTUAL else None  # want of memory is not for ever
        return None

    def allocate(self, nbytes: int) -> int:
        """New device memory.

        Raises:
            LibraryError: there is not enough, or the driver made virtual memory.
        """
        address = runtime.value("musaMalloc", nbytes)
        if _is_virtual(address):
            runtime.call("musaFree", address)
            raise LibraryError(
                "musaMalloc", VIRTUAL, "it makes virtual memory here, which peers cannot open by a handle of this kind"
            )
        return address

    def clear(self, address: int, nbytes: int) -> None:
        """On the default stream."""
        runtime.call("musaMemset", address, 0, nbytes)

    def export(self, address: int) -> bytes:
        """The runtime's handle, in the room that the layer has for one.

        Raises:
            LibraryError: the runtime's handles are larger.
        """
        first, second = (_exported(address, fill) for fill in (0x00, 0xFF))
        written = [at for at, pair in enumerate(zip(first, second, strict=True)) if pair != (0x00, 0xFF)]
        if written and written[-1] >= HANDLE_BYTES:
            raise LibraryError(
                "musaIpcGetMemHandle",
                TOO_LARGE,
                f"its handle has {written[-1] + 1} bytes, and {HANDLE_BYTES} are known of",
            )
        return first[:HANDLE_BYTES]

    def free(self, address: int) -> None:
        """Give it back."""
        runtime.call("musaFree", address)

    def open(self, handle: bytes) -> int:
        """Map a peer's."""
        given = IpcHandle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        return runtime.value("musaIpcOpenMemHandle", given, _LAZY_PEER_ACCESS)

    def close(self, address: int) -> None:
        """Unmap it."""
        runtime.call("musaIpcCloseMemHandle", address)

    def lock(self, host: int, nbytes: int) -> None:
        """For every context, mapped."""
        runtime.call("musaHostRegister", host, nbytes, _PORTABLE | _MAPPED)

    def unlock(self, host: int) -> None:
        """Give the lock back."""
        runtime.call("musaHostUnregister", host)

    def on_device(self, host: int) -> int:
        """The runtime's address for it; nobody says that it is the host's own."""
        return runtime.value("musaHostGetDevicePointer", host, 0)

    def pinned_on_device(self, host: int) -> int:
        """As :meth:`on_device`: torch_musa page-locks by the same runtime."""
        return self.on_device(host)

    def explain_open(self, error: RuntimeError) -> str:
        """What is likely: a context opens a handle once."""
        return " (a process opens each handle once, and never one of its own)"

    def tensor_at(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """By the toolchain's way."""
        return toolchain().tensor_at(address, nbytes, self._device, owner)


def _exported(address: int, fill: int) -> bytes:
    room = (ctypes.c_ubyte * (HANDLE_BYTES + _SPARE))(*[fill] * (HANDLE_BYTES + _SPARE))
    runtime.call("musaIpcGetMemHandle", ctypes.cast(room, ctypes.POINTER(IpcHandle)), address)
    return bytes(room)


def _is_virtual(address: int) -> bool:
    """Whether the driver says that a legacy handle cannot be made; False where it does not say."""
    answer: Any = ctypes.c_int(1)  # a bool of one byte may be written
    try:
        runtime.call("muPointerGetAttribute", ctypes.addressof(answer), _LEGACY_IPC_CAPABLE, address)
    except (LibraryError, runtime.Missing):
        return False
    return answer.value & 0xFF == 0
