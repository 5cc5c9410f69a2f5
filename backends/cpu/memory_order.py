"""How stores of one process become visible to another one, by machine: what the channel protocol may rely on (C13).

Two things are wanted of a machine. *Whole*: an aligned store of 8 bytes is never seen in part, so that a flag may lie
beside its data. Copies go through numpy's typed loops, which store elements, never through a byte copy. *Order*: a
flag that is stored after data is seen after it. The interpreter runs hundreds of instructions between two statements
and no compiler moves one numpy call past another, so only the processor's own order is in question.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from halma.hal.capabilities import UNKNOWN, Unknown

_lock = threading.Lock()


def nothing() -> None:
    """Where the processor keeps the order itself."""


def two_locks() -> None:
    """A full fence: the release of the first round is ordered before the acquire of the second, and each orders what
    is on its own side."""
    for _ in range(2):
        _lock.acquire()
        _lock.release()


@dataclass(frozen=True)
class MemoryOrder:
    """One row.

    Attributes:
        whole: bytes of the largest store that is never seen in part.
        fence: stands between data and its flag, and between a flag and the data read behind it.
        why: the architecture's promise.
    """

    whole: int
    fence: Callable[[], None]
    why: str


TABLE: Final[dict[str, MemoryOrder]] = {
    "x86_64": MemoryOrder(8, nothing, "aligned quadwords are whole; stores and loads keep their order (TSO)"),
    "aarch64": MemoryOrder(8, two_locks, "aligned doublewords are whole; order needs a fence, made of two lock rounds"),
}


def memory_order(machine: str | None = None) -> MemoryOrder | None:
    """The row of this machine, or None where nobody has written one."""
    return TABLE.get(machine or platform.machine())


def store_atomicity(machine: str | None = None) -> int | Unknown:
    """The capability ``remote_store_atomicity``."""
    row = memory_order(machine)
    return UNKNOWN if row is None else row.whole


def why_unordered(machine: str | None = None) -> str | None:
    """Why no channel can be used on this machine, or None."""
    if memory_order(machine) is not None:
        return None
    return f"nobody has written down how {machine or platform.machine()} orders stores (backends/cpu/memory_order.py)"
