"""What a dispatch hands out, and whose turn it is: dispatch and combine alternate, eagerly and in every graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halma.hal.backend import Backend
from halma.hal.collectives.exchange_contract import ExchangeCall, Layout
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_sizes import Sizes
from halma.hal.collectives.expert_rows import ExpertRows
from halma.hal.collectives.streams import OneStream
from halma.hal.device_value import DeviceValue
from halma.hal.errors import CollectiveError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.current import current_scope

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Dispatched(ExpertRows):
    """What :meth:`Exchange.dispatch` hands out; valid until its :meth:`Exchange.combine`.

    Attributes:
        count: tokens of this rank in the call.
        layout: what the driver wrote.
        sizes: of host-synced mode: numbers on the host.
    """

    count: int
    call: ExchangeCall
    layout: Layout
    sizes: Sizes | None = None


def handed_out(
    geometry: Geometry,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    call: ExchangeCall,
    count: int,
    layout: Layout,
    sizes: Sizes | None = None,
) -> Dispatched:
    """What a dispatch hands out: the landing area and its layout; with ``sizes``, slots up to the last expert's end."""
    slots = layout.index.shape[0]
    used = slots if sizes is None else max(sizes.offsets[-1], geometry.alignment)
    most = geometry.ranks * call.bound * geometry.top_k
    return Dispatched(
        rows=rows,
        scales=scales,
        index=layout.index[:used],
        weights=layout.weights[:used],
        counts=DeviceValue(layout.counts, bound=most + 1, name="slots of an expert"),
        offsets=DeviceValue(layout.offsets, bound=slots + 1, name="first slots"),
        total=DeviceValue(layout.total, bound=most + 1, name="slots in use"),
        slots=layout.slots,
        alignment=geometry.alignment,
        count=count,
        call=call,
        layout=layout,
        sizes=sizes,
    )


class Turns(OneStream):
    """One stream, on which dispatch and combine alternate: eagerly, and in every graph by itself.

    One buffer a direction is enough only so: a second dispatch would overwrite rows that a peer's experts still read.
    """

    def __init__(self, name: str, backend: Backend, refuse_closed: Callable[[str], None]) -> None:
        super().__init__(name, backend.device, self._replaying)
        self._refuse_closed = refuse_closed
        self._pending: Dispatched | None = None
        self._capture: tuple[weakref.ref[BreakableGraph], Dispatched | None] | None = None

    def opened(self, capturing: bool) -> Dispatched | None:
        """What was dispatched and not combined yet, in the capture that is open or else eagerly."""
        if not capturing:
            return self._pending
        scope = current_scope()
        if scope is None or self._capture is None or self._capture[0]() is not scope.graph:
            return None
        return self._capture[1]

    def turn(self, capturing: bool, handed: Dispatched | None) -> None:
        """A dispatch handed it out, or its combine took it (None)."""
        scope = current_scope()
        if not capturing:
            self._pending = handed
        elif scope is not None:
            self._capture = (weakref.ref(scope.graph), handed)

    def forget(self) -> None:
        """Nothing is open any more, after a fault."""
        self._pending = None

    def captured(self, graph: BreakableGraph) -> None:
        """As :meth:`OneStream.captured`.

        Raises:
            CollectiveError: a dispatch of the graph has no combine.
        """
        super().captured(graph)
        if self._capture is not None and self._capture[0]() is graph and self._capture[1] is not None:
            raise CollectiveError(
                "a captured dispatch has no combine",
                asked=self._capture[1].call.describe(),
                found=f"the capture of {graph} ended before it",
                do="combine() what dispatch() handed out, in the same graph",
            )

    def _replaying(self) -> None:
        self._refuse_closed("a replay of a graph with calls of the exchange")
        if self._pending is not None:
            raise not_combined(self._pending, "a replay")


def not_combined(handed: Dispatched, asked: str) -> CollectiveError:
    """Of a call that comes too early."""
    return CollectiveError(
        "a dispatch has no combine yet",
        asked=asked,
        found=f"before it: {handed.call.describe()}, whose rows may still be read",
        do="combine() what it handed out first; after an error in between, rearm() on every rank",
    )
