"""What the layer and a backend's rings say to each other: items, replies, and the driver of one rank's ends.

Sequence numbers of an attention rank are device state, and advance in the call that uses them, so a captured
submission and an eager one are the same work. FFN ranks learn an item's number from its header, on
the host, and what they enqueue for it is eager; or on the device, and then what serves one item serves all and may be
captured. The payload never comes to a host.

    attention    submit: wait for the slot's credit · header to the host of each FFN rank · payload · flags
                 collect: wait for the flags of all replies · their sum, in order of FFN ranks
    FFN          take: wait for the payload's flags · copy it to the staging
                 reply: wait for the reply slot's credit · rows · flags · the item slot's credit
         or:     take_next, reply_next: the same for whichever item comes, which the device finds in its slot's header

A reply slot's credit goes back with the next submission: whoever then gets an item finds room for its reply.

This module imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from halma.hal.collectives.contract import ErrorRecord
from halma.hal.collectives.ring_plan import RingPlan

if TYPE_CHECKING:
    import torch

    from halma.hal.backend import SharedMemory, Stream
    from halma.hal.shared_file import SharedFile


class RingWait(IntEnum):
    """What was waited for; ``algorithm`` of a ring's error record. Device code has the numbers."""

    CREDIT = 1
    """A peer's credit for an item slot."""
    ITEM = 2
    """An item's payload, behind its header."""
    REPLY = 3
    """A peer's reply."""
    ROOM = 4
    """A peer's credit for a reply slot."""


class RingItem(NamedTuple):
    """An item's header, as its receiver's host read it. A tuple, since one is made between a header's arrival and the
    launch that it asks for: 0.3 us, a frozen dataclass of seven fields 1.4.

    Attributes:
        attention: number of the rank that sent it.
        rows: tokens that have a choice here or go to the shared expert here; pairs: of them with experts here.
        shared_first, shared: the rows that go to the shared expert.
    """

    attention: int
    sequence: int
    layer: int
    rows: int
    pairs: int
    shared_first: int
    shared: int


@dataclass(frozen=True, eq=False)
class RingStaging:
    """Where an item's payload goes, at an address that is the same for all items. Behind an item's rows: anything.

    Attributes:
        rows: [max_tokens, D] payload dtype.
        ids: int64 [max_tokens, k]: expert among this rank's, -1 for a choice that is another rank's.
        weights: [max_tokens, k] weights' dtype; 0 where ids is -1.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


COUNTED: Final = ("looks", "items", "empty", "rows", "pairs", "shared")
"""What a device counts that takes items by itself: looks for one that ended, with an item or without; then as
``ServedCounters``."""


@dataclass(frozen=True, eq=False)
class RingNext:
    """Where a device that takes items by itself puts what it knows of one, at addresses that are the same for all.

    Attributes:
        layer, shared: int32 [1]: of the item; 0 where there is none.
        index: int32 [S]: the rows that go to the shared expert, from the item's ``shared_first`` on; None where every
            row does.
        counted: int64 [len(COUNTED)], pinned memory as the device reaches it.
    """

    layer: torch.Tensor
    shared: torch.Tensor
    index: torch.Tensor | None
    counted: torch.Tensor


@dataclass(frozen=True)
class RingSite:
    """Where this rank's ends live, fixed for the rings' life.

    Attributes:
        rank: of the group; attention ranks come first.
        own, peers: memory as planned, zero; ``peers[rank]`` is ``own``.
        boards: every rank's host memory, mapped here; headers begin at ``headers``, [attention, depth] of
            ``HEADER_BYTES``.
        bound_ns: how long a wait may take before it is an error.
    """

    rank: int
    plan: RingPlan
    own: SharedMemory
    peers: Sequence[SharedMemory]
    boards: Sequence[SharedFile]
    headers: int
    bound_ns: int


class RingDriver(Protocol):
    """Launches the work of one rank's ends. Not thread-safe; one stream at a time.

    Waits are bounded. After a fault, which is sticky, nothing is sent or waited for, and what is collected is NaN.
    """

    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stream: Stream) -> None:
        """Queue the sending of an item to every FFN rank; captured where the stream captures.

        Args:
            x: [M, D] payload dtype; ids int64 [M, k], -1 for no choice; weights [M, k].
        """
        ...

    def collect(self, out: torch.Tensor, stream: Stream) -> None:
        """Queue the sum of the replies to the oldest item that was not collected, into ``out`` [M, D]."""
        ...

    def take(self, item: RingItem, staging: RingStaging, stream: Stream) -> None:
        """Queue the wait for an item's payload, and its way to the staging; ids of rows behind it become -1."""
        ...

    def reply(self, item: RingItem, out: torch.Tensor, before: int, stream: Stream) -> None:
        """Queue the sending of ``out`` [rows, D] of the reply's dtype; the item's slot is given back.

        Args:
            before: number of the item that was replied to last in this slot; 0 for none.
        """
        ...

    def take_next(self, staging: RingStaging, seen: RingNext, patience_ns: int, stream: Stream) -> None:
        """Queue the wait for an item of any attention rank, by turns, and its way to the staging; captured where the
        stream captures. The item is the device's to find, so a host uses this or :meth:`take`, not both.

        Where none comes within ``patience_ns``, which is no fault, there is an item of no rows that nobody sent.
        """
        ...

    def reply_next(self, out: torch.Tensor, beside: torch.Tensor | None, stream: Stream) -> None:
        """Queue the sending of what the item of the last :meth:`take_next` has in ``out`` [max_tokens, D] of the
        reply's dtype; captured where the stream captures.

        Args:
            beside: float [S, D] of the reply's dtype, added to the rows from the item's ``shared_first`` on.
        """
        ...

    def error(self) -> ErrorRecord | None:
        """The sticky fault: ``peer`` is a rank of the group, ``call`` the item, ``digest`` its layer where it is
        known; reads memory without waiting for the device."""
        ...

    def set_bound(self, bound_ns: int) -> None:
        """Change the bound of all waits, captured ones included."""
        ...

    def close(self) -> None:
        """Forget device handles; who opened the rings frees the memory."""
        ...


@runtime_checkable
class GivesRings(Protocol):
    """A backend's collectives that have rings."""

    def rings(self, site: RingSite) -> RingDriver:
        """The driver of this rank's ends of all rings."""
        ...
