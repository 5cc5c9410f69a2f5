"""What a fault of a ring says: who did not do its part, of what, and to whom."""

from __future__ import annotations

from collections.abc import Sequence

from halma.hal.collectives.contract import ErrorRecord, Fault
from halma.hal.collectives.ring_contract import RingWait
from halma.hal.collectives.ring_plan import RingGeometry
from halma.hal.errors import RankError

WAITS = {
    RingWait.CREDIT: "room for another item, which it gives when it has taken the one before",
    RingWait.ITEM: "an item's payload, whose header is there",
    RingWait.REPLY: "its reply",
    RingWait.ROOM: "room for another reply, which it gives when it submits the next item",
}
HEADLINES = {
    Fault.OVERRUN: "is ahead",
    Fault.LEFT: "was interrupted",
    Fault.MISMATCH: "sent a header that cannot be",
}


def titles(geometry: RingGeometry, names: Sequence[str]) -> list[str]:
    """How ranks are called in messages: rank, role, number within the role, and where it runs."""
    a = geometry.attention
    return [
        f"rank {rank} ({f'attention {rank}' if rank < a else f'FFN {rank - a}'}, {name})"
        for rank, name in enumerate(names)
    ]


def fault_of(record: ErrorRecord, names: Sequence[str], own: int) -> RankError:
    """The error of a record.

    Args:
        names: titles of all ranks; ``own``: this one.
    """
    what = WAITS.get(RingWait(record.algorithm), "") if record.algorithm else ""
    waited = f"did not do its part within {record.waited_ns / 1e9:.3f} s"
    return RankError(
        f"{names[record.peer]} {HEADLINES.get(record.fault, waited)}",
        asked=f"{what}: item {record.call} expected, seen {record.seen} where {record.expected} was to be",
        found=f"this is {names[own]}",
        do="look at that rank's own output first; HALMA_COLLECTIVE_BOUND is how long a wait may take",
    )
