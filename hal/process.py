"""What belongs to the process that made it: ranks, and memory and channels that are shared with other ranks.

A forked child has copies of the objects, and one and the same store, shared memory and device state behind them. What
it did would be taken for its parent's part. Processes are told apart by their ids, so that a fork by foreign code, of
which Python's own hooks hear nothing, counts too; 0.1 us a look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import getpid
from pathlib import Path

from halma.hal.errors import HalmaError


class Home:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._pid = getpid()

    def refuse_other(self, what: str, asked: str | Callable[[], str], error: type[HalmaError]) -> None:
        """Refuse to do anything in another process.

        Raises:
            HalmaError: of the type ``error``: this is a fork of the process that ``what`` was made in.
        """
        if getpid() != self._pid:
            raise error(
                f"{what} belongs to the process that made it, and this is a fork of it",
                asked=asked() if callable(asked) else asked,
                found=f"made in process {self._pid}, used in process {getpid()}",
                do="make groups, arenas and communicators in the process that uses them, or start that one by spawn",
            )


@dataclass(frozen=True)
class ProcessName:
    """A process among those of this machine: ids are used again, so its start belongs to its name (Linux)."""

    pid: int
    born: str

    @staticmethod
    def own() -> ProcessName:
        """This process's."""
        return ProcessName(getpid(), born("self"))

    def seen(self) -> bool:
        """Whether it is there: it started, did not end, and is in this process's process namespace."""
        return bool(self.born) and born(str(self.pid)) == self.born and _stat(str(self.pid))[0] not in ("Z", "X")


def born(pid: str) -> str:
    """When a process started, in the kernel's ticks; empty where there is none."""
    return _stat(pid)[19]


def _stat(pid: str) -> list[str]:
    """The fields of a process behind its name, which may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""] * 20
