"""Host memory that processes of this machine share: a file without a name, mapped by all of them.

Nothing is left behind whenever its last user ends, however it ends: a peer reaches the file through the owner's entry
under ``/proc``.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from halma.hal.errors import CollectiveError
from halma.hal.process import born

_owned: weakref.WeakValueDictionary[str, SharedFile] = weakref.WeakValueDictionary()
"""What this process has made, by the identity in the handle."""


def why_none() -> str | None:
    """Why this system has no such memory, or None."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memory files (memfd_create)"
    if not Path("/proc/self/fd").is_dir():
        return "/proc is not mounted, and peers open memory through it"
    return None


class SharedFile:
    """One mapping. It stays mapped as long as anything is made of it; the file lives until its owner closes it.

    Attributes:
        nbytes: as asked.
        handle: what a peer opens it with; empty where this is a peer's.
    """

    def __init__(self, mapping: Any, nbytes: int, fd: int = -1, handle: bytes = b"") -> None:
        self._mapping = mapping
        self._fd = fd
        self.nbytes = nbytes
        self.handle = handle

    @staticmethod
    def make(nbytes: int) -> SharedFile:
        """Zero-filled, every page of it reserved: a missing page would kill the process later.

        Raises:
            MemoryError: there is not enough.
            CollectiveError: see :func:`why_none`.
        """
        reason = why_none()
        if reason is not None:
            raise CollectiveError("memory of this process cannot be given to peers", found=reason)
        fd = os.memfd_create("halma-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            mapping = mmap.mmap(fd, max(nbytes, 1))
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"{nbytes:,} bytes of shared memory cannot be reserved: {error.strerror}") from error
        stat = os.fstat(fd)
        facts = {"pid": os.getpid(), "born": born("self"), "fd": fd, "inode": stat.st_ino, "bytes": nbytes}
        text = json.dumps(facts, sort_keys=True)
        made = _owned[text] = SharedFile(mapping, nbytes, fd, text.encode())
        return made

    @staticmethod
    def open(handle: bytes, who: str) -> SharedFile:
        """Map a peer's, or view what this very process made.

        Args:
            who: whose handles they are, for messages.

        Raises:
            CollectiveError: no such handle, or its owner ended or closed it.
        """
        text = handle.decode(errors="replace")
        try:
            facts = json.loads(text)
            pid, fd, nbytes = int(facts["pid"]), int(facts["fd"]), int(facts["bytes"])
        except (ValueError, KeyError, TypeError):
            raise CollectiveError(
                f"a handle of shared memory does not fit {who}",
                found=f"{len(handle)} bytes that begin with {handle[:16]!r}",
                do="every rank of a group must use the same backend",
            ) from None
        if pid == os.getpid():
            mine = _owned.get(text)
            if mine is None or mine._mapping is None:
                raise _gone(facts, "this process closed it")
            return SharedFile(mine._mapping, nbytes)
        try:
            other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(facts, str(error)) from error
        try:
            # Numbers are used again: another process, or another file behind the same number, is not what was meant.
            if os.fstat(other).st_ino != facts["inode"] or born(str(pid)) != facts["born"]:
                raise _gone(facts, "its owner ended, and the number belongs to another process or file now")
            return SharedFile(mmap.mmap(other, max(nbytes, 1)), nbytes)
        finally:
            os.close(other)

    @property
    def mapping(self) -> Any:
        """What views are made of; None once it is closed."""
        return self._mapping

    def close(self) -> None:
        """Give up this mapping; it is unmapped with the last view of it. Twice is once."""
        self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def _gone(facts: dict[str, Any], why: str) -> CollectiveError:
    return CollectiveError(
        "a peer's shared memory cannot be opened",
        asked=f"{facts['bytes']:,} bytes of process {facts['pid']}",
        found=why,
        do="ranks must run on one machine, in one process namespace, as one user, and close their arenas together",
    )
