"""Memory of a device: torch's for programs, pinned for the host's side, the driver's for what peers map.

What peers map is allocated by the driver itself and not by torch: torch's allocator hands out pieces of larger
blocks, and with expandable segments blocks that cannot be exported at all.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import torch

from halma.backends.torch_device.family import Family
from halma.hal.errors import CollectiveError
from halma.hal.shared_file import SharedFile

_HEAD: Final = struct.Struct("<4sI16sQQ")  # magic, pid, token, address, bytes; the driver's handle follows
_GRANULE: Final = 2 << 20
"""The driver shares out pieces smaller than this of one block, and a handle opens the whole block to the peer."""

_token: tuple[int, bytes] = (0, b"")


def _process() -> tuple[int, bytes]:
    """This process: its pid, and a random token, since a pid is unique in its own container only."""
    global _token
    if _token[0] != os.getpid():  # the first use, or a fork
        _token = (os.getpid(), secrets.token_bytes(16))
    return _token


class MemoryCalls(Protocol):
    """What a family's driver does for shared memory. Each call works on one device, in its context, and raises a
    RuntimeError where the driver refuses."""

    magic: bytes
    """Four bytes that mark a handle as the family's."""
    handle_bytes: int
    """Of the driver's own handle."""

    def why_missing(self) -> str | None:
        """Why the calls cannot be made, or None."""
        ...

    def allocate(self, nbytes: int) -> int:
        """The address of new memory."""
        ...

    def clear(self, address: int, nbytes: int) -> None:
        """Fill it with zeros."""
        ...

    def export(self, address: int) -> bytes:
        """The driver's handle of memory of :meth:`allocate`."""
        ...

    def free(self, address: int) -> None:
        """Of :meth:`allocate`."""
        ...

    def open(self, handle: bytes) -> int:
        """The address of a peer's memory."""
        ...

    def close(self, address: int) -> None:
        """Of :meth:`open`."""
        ...

    def lock(self, host: int, nbytes: int) -> None:
        """Page-lock host memory for every device."""
        ...

    def unlock(self, host: int) -> None:
        """Of :meth:`lock`."""
        ...

    def on_device(self, host: int) -> int:
        """Where the device reaches page-locked host memory."""
        ...

    def pinned_on_device(self, host: int) -> int:
        """Where the device reaches host memory that torch page-locked."""
        ...

    def explain_open(self, error: RuntimeError) -> str:
        """What to add to the text of an error of :meth:`open`; may be empty."""
        ...

    def tensor_at(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """uint8 [nbytes] over memory that the device reaches at the address; keeps ``owner`` alive."""
        ...


class DeviceMemory:
    """See :class:`halma.hal.backend.SharedMemory`."""

    def __init__(
        self,
        family: Family,
        calls: MemoryCalls,
        index: int,
        address: int,
        nbytes: int,
        close: Callable[[int], None] | None,
    ) -> None:
        self._family = family
        self._address = address
        self._index = index
        self._close = close
        self._tensor: torch.Tensor | None = calls.tensor_at(address, nbytes)

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
        if self._close is not None:
            _own.pop(self._address, None)  # a view of our own memory closes nothing: its owner does
            self._family.ensure_context(self._index)
            self._family.module.synchronize(self._index)
            self._close(self._address)


class MappedFile:
    """Host memory that processes share, page-locked, as kernels of this device reach it at :attr:`address`.

    The driver locks a range once a process, so ranks that are streams of one process share the lock.
    """

    def __init__(self, file: SharedFile, family: Family, calls: MemoryCalls, index: int) -> None:
        view: Any = np.frombuffer(file.mapping, np.uint8)
        host = int(view.ctypes.data)
        family.ensure_context(index)
        with _locking:
            if not _locked[host]:
                calls.lock(host, view.size)
            _locked[host] += 1
        self._release = weakref.finalize(self, _unlock, family, calls, host, index, view)  # keeps it mapped until then
        self._release.atexit = False
        self.address = calls.on_device(host)

    def close(self) -> None:
        """Unlock it, once no kernel of this process writes there any more; twice is once."""
        self._release()


_locking: Final = threading.RLock()
"""Held over what :data:`_locked` says and the driver's call of it, or two threads that map one file both lock it. The
same thread may come twice: a mapping that nobody holds any more is unlocked wherever the collector runs."""
_locked: Counter[int] = Counter()
"""Address -> how many of this process's mappings hold it page-locked."""


def _unlock(family: Family, calls: MemoryCalls, host: int, index: int, view: Any) -> None:
    family.ensure_context(index)
    family.module.synchronize(index)
    with _locking:
        _locked[host] -= 1
        if not _locked[host]:
            del _locked[host]
            calls.unlock(host)


_own: dict[int, int] = {}
"""Address -> bytes of what this process exported and has not closed."""


class TorchMemory:
    """See :class:`halma.hal.backend.MemoryPart`.

    Args:
        family: names and calls.
        index: torch's number of the device.
        calls: the driver's side.
    """

    def __init__(self, family: Family, index: int, calls: MemoryCalls) -> None:
        self._family = family
        self._calls = calls
        self._index = index
        self._device = family.torch_device(index)

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
        flat = self._calls.tensor_at(self._calls.pinned_on_device(pinned.data_ptr()), pinned.nbytes, pinned)
        return flat.view(pinned.dtype).view(pinned.shape)

    def mapped(self, file: SharedFile) -> MappedFile:
        """Shared host memory, whole pages of it, for kernels of this device.

        Raises:
            CollectiveError: the driver cannot lock its pages.
        """
        try:
            return MappedFile(file, self._family, self._calls, self._index)
        except RuntimeError as error:
            raise CollectiveError(
                "host memory of another process cannot be reached by this device",
                asked=f"{file.nbytes:,} bytes, page-locked",
                found=str(error),
                do="allow the process to lock memory (ulimit -l)",
            ) from error

    def not_exportable(self) -> str | None:
        """What is missing to give memory to peers; torch's allocator settings do not matter, see the module."""
        missing = self._calls.why_missing()
        return f"peers map memory that the driver allocates, and {missing}" if missing else None

    def exportable(self, nbytes: int) -> tuple[DeviceMemory, bytes]:
        """Zero-filled device memory and its handle for :meth:`open`.

        Raises:
            MemoryError: there is not enough; :class:`CollectiveError` where nothing can be exported at all.
        """
        reason = self.not_exportable()
        if reason is not None:
            raise CollectiveError("device memory cannot be exported", found=reason)
        self._family.ensure_context(self._index)
        size = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        try:
            address = self._calls.allocate(size)
        except RuntimeError as error:
            raise self._no_room(size, error) from error
        try:
            self._calls.clear(address, size)
            self._family.module.synchronize(self._index)
            raw = self._calls.export(address)
            shared = DeviceMemory(self._family, self._calls, self._index, address, nbytes, self._calls.free)
        except BaseException:
            self._calls.free(address)
            raise
        _own[address] = nbytes
        return shared, _HEAD.pack(self._calls.magic, *_process(), address, nbytes) + raw

    def _no_room(self, size: int, error: RuntimeError) -> MemoryError:
        module = self._family.module
        free, total = module.mem_get_info(self._index)
        return MemoryError(
            f"{size:,} bytes of device memory cannot be had: {error}; {free:,} of {total:,} bytes are free, "
            f"torch keeps {module.memory_reserved(self._index):,} ({module.__name__}.empty_cache() gives some back)"
        )

    def open(self, handle: bytes) -> DeviceMemory:
        """Map a peer's memory; a handle of this process gives a view of the same memory.

        Raises:
            CollectiveError: not a handle of this backend, or its owner is gone.
        """
        calls = self._calls
        if len(handle) != _HEAD.size + calls.handle_bytes or handle[:4] != calls.magic:
            raise CollectiveError(f"not a handle of the {self._family.name} backend", found=f"{len(handle)} bytes")
        _, pid, token, address, nbytes = _HEAD.unpack_from(handle)
        if (pid, token) == _process():
            if address not in _own:
                _refuse_open(pid, "this process closed that memory")
            return DeviceMemory(self._family, calls, self._index, address, nbytes, None)
        reason = self.not_exportable()
        if reason is not None:
            _refuse_open(pid, reason)
        self._family.ensure_context(self._index)
        try:
            mapped = calls.open(handle[_HEAD.size :])
        except RuntimeError as error:
            _refuse_open(pid, f"{error}{calls.explain_open(error)}")
        return DeviceMemory(self._family, calls, self._index, mapped, nbytes, calls.close)


def _refuse_open(pid: int, why: str) -> NoReturn:
    raise CollectiveError(
        f"memory of process {pid} cannot be mapped",
        found=why,
        do="keep the owner alive and its memory open until every peer has closed; give both processes the same GPUs",
    )
