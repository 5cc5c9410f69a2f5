"""What an exchange and its driver say to each other.

Dispatch and combine are calls of one channel (:mod:`halma.hal.collectives.contract`): one device epoch, a header word
from every rank to every rank in every call, bounded waits, a sticky fault. They alternate.

This module imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable
from zlib import crc32

from halma.hal.collectives.contract import ChannelSite, ErrorRecord, FlightEntry
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_tuning import Tuning

if TYPE_CHECKING:
    import torch

    from halma.hal.backend import Stream


class Step(IntEnum):
    """The two calls; beside the numbers of :class:`halma.hal.collectives.contract.Kind`."""

    DISPATCH = 32
    COMBINE = 33


class Stage(IntEnum):
    """Which flag a wait of an exchange was for; in fault records, beside the numbers of ``Algorithm``."""

    CHOICES = 16
    """The words with a token's experts and weights."""
    ROWS = 17
    """The flags behind rows on their way out."""
    BACK = 18
    """Rows on their way back, which have no flag: what is seen is data."""


NOT_HERE: Final = 0xFFFFFFFF
"""What each word of a sum holds until it has come; so ``seen`` of a wait of :attr:`Stage.BACK`, on every backend."""
STAGE_NAMES = {
    Stage.CHOICES: "its choices of experts",
    Stage.ROWS: "the flag of a token's row",
    Stage.BACK: "a token's sum on its way back",
}


@dataclass(frozen=True)
class ExchangeCall:
    """One call, as all ranks must make it. How many tokens a rank sends is its own matter: it travels in the header.

    Attributes:
        bound: most tokens of any rank in this call.
        host: that sizes are read by the host.
        kept: the number of the kept layout that a dispatch uses; 0: it sorts. All ranks use the same.
    """

    step: Step
    bound: int
    host: bool = False
    kept: int = 0

    @property
    def digest(self) -> int:
        """32 bits that tell calls apart, never 0."""
        return crc32(f"exchange|{int(self.step)}|{self.bound}|{int(self.host)}|{self.kept}".encode()) or 1

    @property
    def kind(self) -> Step:
        """For the flight recorder."""
        return self.step

    def describe(self) -> str:
        """``dispatch of at most 128 tokens a rank``."""
        how = ", sizes read by the host" if self.host else f", by kept layout {self.kept}" if self.kept else ""
        return f"{self.step.name.lower()} of at most {self.bound} tokens a rank{how}"


@dataclass(frozen=True, eq=False)
class Layout:
    """What dispatch writes beside rows; all on the device, at fixed addresses.

    Attributes:
        index: int32 [C], slot -> row; -1 in gaps and in the tail.
        weights: acc [C].
        counts, offsets, total: int32 [E], [E + 1], [1].
        slots: int32 [R, k]; rows beyond a rank's tokens are left as they were.
        tokens: int32 [ranks]: how many each sent.
        sources: int32 [max_tokens]: of each own token, a bit for every rank that has one of its experts.
    """

    index: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    total: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    sources: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def cut(self, slots: int) -> Layout:
        """Views of it with the first ``slots`` slots."""
        return replace(self, index=self.index[:slots], weights=self.weights[:slots])


@dataclass(frozen=True, eq=False)
class Outgoing:
    """Operands of a dispatch: x [M, D] given dtype, ids int64 [M, k] with -1 for no expert, weights acc [M, k].

    Without ``ids`` and ``weights`` the layout is read, not written: it is of the same routing.
    """

    x: torch.Tensor
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    layout: Layout


@dataclass(frozen=True, eq=False)
class Returning:
    """Operands of a combine: parts [C, D], carrier or acc, and where the sums go: out [M, D], carrier or acc."""

    parts: torch.Tensor
    out: torch.Tensor
    layout: Layout


@dataclass(frozen=True)
class ExchangeSite:
    """Where an exchange lives on this rank.

    Attributes:
        channel: control block, headers, peers' memory, bound, recorder. ``channel.layout`` has no lanes.
        rows, scales: views of this rank's memory: [R, D], and [R, groups] or None.
    """

    channel: ChannelSite
    geometry: Geometry
    tuning: Tuning
    rows: torch.Tensor
    scales: torch.Tensor | None


class ExchangeDriver(Protocol):
    """Launches the calls of one exchange. Not thread-safe; one stream at a time."""

    def dispatch(self, call: ExchangeCall, operands: Outgoing, stream: Stream) -> None:
        """Queue one dispatch: captured where the stream captures, run where it does not. Never waits.

        After a fault it sends nothing and hands out no slot; of a layout that is only read the slots stay.
        """
        ...

    def combine(self, call: ExchangeCall, operands: Returning, stream: Stream) -> None:
        """Queue one combine; after a fault it writes NaN."""
        ...

    def error(self) -> ErrorRecord | None:
        """The sticky fault, if there is one; reads memory without waiting for the device."""
        ...

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first."""
        ...

    def set_bound(self, bound_ns: int) -> None:
        """Of all waits, captured ones included."""
        ...

    def rearm(self, epoch: int) -> None:
        """Forget the fault and go on from ``epoch``; every rank does so, idle, between two barriers."""
        ...

    def epoch(self) -> int:
        """The epoch now; the device must be idle."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@runtime_checkable
class GivesExchange(Protocol):
    """A backend's collectives that have a driver of exchanges over shared memory."""

    def exchange_blocks(self, size: int) -> int:
        """Most blocks of a grid of which two fit the device."""
        ...

    def no_exchange(self, geometry: Geometry) -> str | None:
        """Why there is no driver for this geometry, or None."""
        ...

    def exchange(self, site: ExchangeSite) -> Any:
        """The driver (:class:`ExchangeDriver`)."""
        ...
