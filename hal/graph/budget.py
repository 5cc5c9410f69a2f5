"""Whether one more graph may be captured: a budget for what a session holds, a reserve for everybody else (G20)."""

from __future__ import annotations

from dataclasses import dataclass

from halma.hal.backend import MemoryInfo
from halma.hal.errors import CaptureError

FIRST_GUESS = 1 << 20
"""Bytes that a graph is taken to cost where the driver's memory is measured and none was captured yet."""


@dataclass(frozen=True)
class MemoryBudget:
    """Limits of a session.

    Args:
        limit: most bytes that the session may hold, its workspace included; None: no limit.
        reserve: bytes of free device memory that captures must leave.

    Raises:
        CaptureError: a budget that holds nothing, a negative reserve.
    """

    limit: int | None = None
    reserve: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit <= 0:
            raise CaptureError(
                f"a capture budget of {self.limit:,} bytes holds nothing",
                asked=f"budget={self.limit}",
                found="a session holds at least its workspace",
                do="give a positive number of bytes, leave the budget out, or switch capture off (HALMA_GRAPH=0)",
            )
        if self.reserve < 0:
            raise CaptureError("a reserve cannot be negative", asked=f"reserve={self.reserve}", do="0 reserves nothing")

    def refusal(self, *, held: int, predicted: int, memory: MemoryInfo) -> str | None:
        """Why a graph of ``predicted`` bytes may not be captured while the session holds ``held``, or None."""
        if self.limit is not None and held + predicted > self.limit:
            return (
                f"the budget is {self.limit:,} bytes; {held:,} are held and the next graph is taken to need "
                f"{predicted:,}"
            )
        if memory.free - predicted < self.reserve:
            return (
                f"{self.reserve:,} bytes are reserved; {memory.free:,} are free and the next graph is taken to need "
                f"{predicted:,}"
            )
        return None


class Meter:
    """What captures cost, read from the driver's free memory.

    A graph is predicted to cost as much as the dearest so far: graphs of a ladder differ little in nodes, and a
    guess that is too low is found only when the memory is gone.

    Args:
        exact: free memory falls by exactly what this process takes (capability ``memory_info_exact``). Where it
            does not, graphs are charged nothing and the session's memory is its workspace.
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self._dearest: int | None = None

    def predicted(self) -> int:
        """Bytes that the next graph is taken to cost."""
        if not self.exact:
            return 0
        return FIRST_GUESS if self._dearest is None else self._dearest

    def charge(self, before: MemoryInfo, after: MemoryInfo) -> int:
        """The bytes of a capture."""
        if not self.exact:
            return 0
        cost = max(0, before.free - after.free)
        self._dearest = max(cost, self._dearest or 0)
        return cost
