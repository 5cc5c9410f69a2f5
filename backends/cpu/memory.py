"""Plain host memory, which on this backend is device memory too, and memory that other processes can map."""

from __future__ import annotations

import json
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halma.backends.cpu.memory_limits import memory_info
from halma.hal.errors import CollectiveError

_owned: weakref.WeakValueDictionary[str, CpuSharedMemory] = weakref.WeakValueDictionary()
"""What this process has exported, by the identity in the handle."""


class CpuSharedMemory:
    """One mapping of a memory file.

    The file has no name, so nothing is left behind whenever its last user ends, however it ends; a peer reaches it
    through the owner's entry under ``/proc``. A tensor that outlives :meth:`close` keeps the mapping, not the file.
    """

    def __init__(self, mapping: Any, nbytes: int, fd: int = -1) -> None:
        self._mapping = mapping
        self._fd = fd
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
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

    @property
    def mapping(self) -> Any:
        """What a second view of it in this process is made of."""
        return self._mapping

    def close(self) -> None:
        """Give up this mapping; twice is once."""
        self._tensor = self._mapping = None  # unmapped with the last view of it
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


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
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return f"{sys.platform} has no memory files (memfd_create)"
        if not Path("/proc/self/fd").is_dir():
            return "/proc is not mounted, and peers open memory through it"
        return None

    def exportable(self, nbytes: int) -> tuple[CpuSharedMemory, bytes]:
        """Zero-filled memory of its own file, every page of it reserved, and its handle.

        Raises:
            MemoryError: there is not enough; said now, where a missing page would kill the process later.
            CollectiveError: see :meth:`not_exportable`.
        """
        reason = self.not_exportable()
        if reason is not None:
            raise CollectiveError("memory of this process cannot be given to peers", found=reason)
        free = memory_info().free
        if nbytes > free:
            raise MemoryError(f"{nbytes:,} bytes of shared memory were asked for, {free:,} are free")
        fd = os.memfd_create("halma-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            mapping = mmap.mmap(fd, max(nbytes, 1))
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"{nbytes:,} bytes of shared memory cannot be reserved: {error.strerror}") from error
        stat = os.fstat(fd)
        handle = {"pid": os.getpid(), "born": _born("self"), "fd": fd, "inode": stat.st_ino, "bytes": nbytes}
        text = json.dumps(handle, sort_keys=True)
        memory = _owned[text] = CpuSharedMemory(mapping, nbytes, fd)
        return memory, text.encode()

    def open(self, handle: bytes) -> CpuSharedMemory:
        """Map a peer's memory, or view what this very process exported.

        Raises:
            CollectiveError: no handle of this backend, or its owner ended or closed it.
        """
        text = handle.decode(errors="replace")
        try:
            facts = json.loads(text)
            pid, fd, nbytes = int(facts["pid"]), int(facts["fd"]), int(facts["bytes"])
        except (ValueError, KeyError, TypeError):
            raise CollectiveError(
                "a handle of shared memory does not fit the cpu backend",
                found=f"{len(handle)} bytes that begin with {handle[:16]!r}",
                do="every rank of a group must use the same backend",
            ) from None
        if pid == os.getpid():
            mine = _owned.get(text)
            if mine is None or mine.mapping is None:
                raise _gone(facts, "this process closed it")
            return CpuSharedMemory(mine.mapping, nbytes)
        try:
            other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(facts, str(error)) from error
        try:
            # Numbers are used again: another process, or another file behind the same number, is not what was meant.
            if os.fstat(other).st_ino != facts["inode"] or _born(str(pid)) != facts["born"]:
                raise _gone(facts, "its owner ended, and the number belongs to another process or file now")
            return CpuSharedMemory(mmap.mmap(other, max(nbytes, 1)), nbytes)
        finally:
            os.close(other)


def _gone(facts: dict[str, Any], why: str) -> CollectiveError:
    return CollectiveError(
        "a peer's shared memory cannot be opened",
        asked=f"{facts['bytes']:,} bytes of process {facts['pid']}",
        found=why,
        do="ranks must run on one machine, in one process namespace, as one user, and close their arenas together",
    )


def _born(pid: str) -> str:
    """When a process started, in the kernel's ticks; its name may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
