"""What captured calls took from an arena, in order, and where two ranks differ.

A rank that recorded one call more than the others is found here, before the first replay, and not by memory that is
out of step later (vllm-project/vllm#39791).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halma.hal.collectives.contract import Algorithm, Kind
from halma.hal.graph.descriptor import Descriptor


@dataclass(frozen=True)
class LedgerEntry:
    """One captured call.

    Attributes:
        ordinal: its place among the calls of its descriptor, from 0.
        offset: of its slot; -1 where it uses the channel's own buffers.
    """

    descriptor: Descriptor
    ordinal: int
    channel: str
    kind: Kind
    nbytes: int
    dtype: str
    algorithm: Algorithm
    offset: int = -1

    def __str__(self) -> str:
        place = "the channel's buffers" if self.offset < 0 else f"the slot at {self.offset}"
        return (
            f"{self.descriptor}, call {self.ordinal + 1}: {self.kind.name.lower()} of {self.nbytes} bytes of "
            f"{self.dtype} on {self.channel}, {self.algorithm.name.lower()}, in {place}"
        )


class Ledger:
    """Entries of one session on one rank, in order of capture."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self.entries: list[LedgerEntry] = []
        self._counts: dict[Descriptor, int] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: LedgerEntry) -> None:
        """File a call."""
        self.entries.append(entry)
        self._counts[entry.descriptor] = self.count(entry.descriptor) + 1

    def forget(self, descriptor: Descriptor) -> None:
        """Drop all calls of a descriptor: its graph does not exist."""
        if self._counts.pop(descriptor, 0):
            self.entries = [one for one in self.entries if one.descriptor != descriptor]

    def clear(self) -> None:
        """Drop everything."""
        self.entries.clear()
        self._counts.clear()

    def count(self, descriptor: Descriptor) -> int:
        """Calls of a descriptor."""
        return self._counts.get(descriptor, 0)

    def counts(self) -> dict[Descriptor, int]:
        """Calls by descriptor, in order of capture."""
        return dict(self._counts)

    def lines(self) -> tuple[str, ...]:
        """What must be equal on all ranks: the number of calls by descriptor, then every call."""
        counts = [f"{one}: {count} calls" for one, count in self._counts.items()]
        return (*counts, *map(str, self.entries))


def first_difference(lines: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[str, str] | None:
    """Where a rank first differs from rank 0, as what each of the two has; None where all are equal.

    Args:
        lines: by rank; a rank with none takes part like any other (A12).
        names: of the ranks, for the message.
    """
    for rank in range(1, len(lines)):
        mine, other = lines[0], lines[rank]
        for position in range(max(len(mine), len(other))):
            pair = [one[position] if position < len(one) else "nothing" for one in (mine, other)]
            if pair[0] != pair[1]:
                return f"{names[0]}: {pair[0]}", f"{names[rank]}: {pair[1]}"
    return None
