"""Sizes of a dispatch as the host reads them in host-synced mode: one source of truth, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halma.hal.errors import CollectiveError


@dataclass(frozen=True)
class Sizes:
    """Numbers of one dispatch, on the host.

    Attributes:
        counts: slots of each expert here.
        offsets: the first slot of each, and the end of the last.
        total: slots in use.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int

    @staticmethod
    def checked(counts: Sequence[int], offsets: Sequence[int], total: int, alignment: int, capacity: int) -> Sizes:
        """Sizes that belong together.

        Raises:
            CollectiveError: counts that do not sum to the total, or offsets that do not follow from them.
        """
        found: list[str] = []
        if any(count < 0 for count in counts):
            found.append(f"counts below 0: {list(counts)}")
        if sum(counts) != total:
            found.append(f"counts sum to {sum(counts)}, the total is {total}")
        wanted = [0]
        for count in counts:
            wanted.append(wanted[-1] + -(-count // alignment) * alignment)
        if list(offsets) != wanted:
            found.append(f"offsets {list(offsets)}, from the counts {wanted}")
        if wanted[-1] > capacity:
            found.append(f"the last expert ends at slot {wanted[-1]} of {capacity}")
        if found:
            raise CollectiveError(
                "counts of a dispatch do not belong together",
                asked=f"{len(counts)} experts, aligned to {alignment}",
                found=found,
                do="something wrote to the exchange's memory, or the layout kernel is at fault",
            )
        return Sizes(tuple(counts), tuple(offsets), total)
