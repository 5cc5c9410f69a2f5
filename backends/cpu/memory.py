"""Plain host memory, which on this backend is device memory too, and memory that other processes can map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halma.backends.cpu.memory_limits import memory_info
from halma.hal.errors import CollectiveError
from halma.hal.shared_file import SharedFile, why_none


class CpuSharedMemory:
    """One mapping of a memory file. A tensor that outlives :meth:`close` keeps the mapping, not the file."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._tensor: torch.Tensor | None = torch.frombuffer(file.mapping, dtype=torch.uint8, count=file.nbytes)
        self.address = self._tensor.data_ptr()

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as uint8 [nbytes].

        Raises:
            CollectiveError: it is closed.
        """
        if self._tensor is None:
            raise CollectiveError("shared memory was used after it was closed", do="close the arena last")
        return self._tensor

    def close(self) -> None:
        """Give up this mapping; twice is once."""
        self._tensor = None  # unmapped with the last view of it
        self._file.close()


class CpuMemory:
    """Uninitialised tensors on the CPU. Pinning means nothing here: nothing copies asynchronously."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of ``shape``, contents undefined; freed with its last reference."""
        return torch.empty(tuple(shape), dtype=dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`empty`."""
        return self.empty(shape, dtype)

    def on_device(self, pinned: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return pinned

    def not_exportable(self) -> str | None:
        """Why this system has no memory that peers can map, or None."""
        return why_none()

    def exportable(self, nbytes: int) -> tuple[CpuSharedMemory, bytes]:
        """Zero-filled memory of its own file, every page of it reserved, and its handle.

        Raises:
            MemoryError: there is not enough; said now, where a missing page would kill the process later.
            CollectiveError: see :meth:`not_exportable`.
        """
        free = memory_info().free
        if self.not_exportable() is None and nbytes > free:
            raise MemoryError(f"{nbytes:,} bytes of shared memory were asked for, {free:,} are free")
        file = SharedFile.make(nbytes)
        return CpuSharedMemory(file), file.handle

    def open(self, handle: bytes) -> CpuSharedMemory:
        """Map a peer's memory, or view what this very process exported.

        Raises:
            CollectiveError: no handle of this backend, or its owner ended or closed it.
        """
        return CpuSharedMemory(SharedFile.open(handle, "the cpu backend"))
