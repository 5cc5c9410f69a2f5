"""Exchanges by their driver alone: all ranks as streams of one GPU, or this process's own, one a GPU.

Where ranks are streams, their peers' memory is plain pointers, as in :mod:`benchmarks.virtual_ranks`: the kernels
cannot tell; what is missing is the link between two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import gather
from benchmarks.virtual_ranks import SECOND, Region
from halma.backends.simt.exchange import SimtExchange, exchange_blocks
from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES
from halma.hal.backend import Backend
from halma.hal.collectives.contract import FLIGHT_BYTES, ChannelSite
from halma.hal.collectives.exchange_contract import ExchangeCall, ExchangeSite, Layout, Outgoing, Returning, Step
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_tuning import Tuning, computed


@dataclass
class VirtualRank:
    """One rank: its driver, what it hands out, and its stream."""

    rank: int
    driver: SimtExchange
    layout: Layout
    rows: torch.Tensor
    scales: torch.Tensor | None
    stream: Any

    def capture(self, program: Callable[[], None]) -> Any:
        """A graph of ``program`` on this rank's stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream.torch, capture_error_mode="thread_local"):
            program()
        return graph


class VirtualExchange:
    """Ranks of one exchange.

    Args:
        processes: this process's rank alone; torch.distributed is up, and the others map its memory.

    Attributes:
        ranks: all of them where they are virtual, else the one.
    """

    def __init__(
        self,
        backend: Backend,
        geometry: Geometry,
        *,
        tuning: Tuning | None = None,
        bound_ns: int = 20 * SECOND,
        first_epoch: int = 0,
        entries: int = 64,
        dependent: bool = True,
        processes: bool = False,
    ) -> None:
        self.backend, self.geometry, self.virtual = backend, geometry, not processes
        self.device = backend.device.torch_device
        blocks = exchange_blocks(geometry.ranks, backend.capabilities) // (1 if processes else geometry.ranks)
        self.tuning = tuning or computed(geometry.ranks, max(2, blocks))
        here = [dist.get_rank()] if processes else list(range(geometry.ranks))
        self.regions: list[Any] = self._mapped(here[0]) if processes else [self._region() for _ in here]
        self.recorders = {rank: self._aligned(entries * FLIGHT_BYTES, pinned=True) for rank in here}
        backend.device.synchronize()
        self.ranks = [self._rank(rank, bound_ns, first_epoch, dependent) for rank in here]
        self.meet = dist.barrier if processes else lambda: None
        self.gather: Callable[[Any], list[Any]] = gather if processes else lambda value: [value]
        self.meet()
        self._calls: dict[tuple[Step, int, bool], ExchangeCall] = {}

    def _aligned(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Zeros at a multiple of 256 bytes."""
        if pinned:
            whole = self.backend.memory.pinned((nbytes + 256,), torch.uint8)
        else:
            whole = torch.empty(nbytes + 256, dtype=torch.uint8, device=self.device)
        return whole.zero_()[-whole.data_ptr() % 256 :][:nbytes]

    def _region(self) -> Region:
        return Region(self._prepared(self._aligned(self.geometry.places.end)))

    def _mapped(self, rank: int) -> list[Any]:
        own, handle = self.backend.memory.exportable(self.geometry.places.end)
        self._prepared(own.tensor)
        self.backend.device.synchronize()
        handles = gather(handle)
        return [own if at == rank else self.backend.memory.open(other) for at, other in enumerate(handles)]

    def _prepared(self, memory: torch.Tensor) -> torch.Tensor:
        places = self.geometry.places
        for region in places.regions.values():
            memory[region.offset : region.offset + region.nbytes].fill_(region.fill)
        for guard in places.channel.guards:
            memory[guard : guard + GUARD_BYTES].fill_(GUARD_BYTE)
        return memory

    def _rank(self, rank: int, bound_ns: int, first_epoch: int, dependent: bool) -> VirtualRank:
        geometry, places, own = self.geometry, self.geometry.places, self.regions[rank].tensor
        rows = own[places.rows.offset :][: places.rows.nbytes].view(getattr(torch, geometry.sent))
        rows = rows.view(geometry.landing, geometry.hidden)
        scales = None
        if geometry.groups:
            scales = own[places.scales.offset :][: places.scales.nbytes].view(torch.float32)
            scales = scales.view(geometry.landing, geometry.groups)
        site = ChannelSite(
            rank=rank,
            size=geometry.ranks,
            layout=places.channel,
            own=self.regions[rank],
            peers=self.regions,
            bound_ns=bound_ns,
            dependent=dependent,
            recorder=self.recorders[rank],
            first_epoch=first_epoch,
        )
        driver = SimtExchange(ExchangeSite(site, geometry, self.tuning, rows, scales), self.backend)
        stream = self.backend.device.new_stream(f"rank {rank}")
        return VirtualRank(rank, driver, self._layout(rank), rows, scales, stream)

    def _layout(self, rank: int) -> Layout:
        geometry, local = self.geometry, self.geometry.local(rank)
        slots = geometry.capacity(geometry.max_tokens)

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            count = 1
            for one in shape:
                count *= one
            return self._aligned(4 * count).view(dtype).view(shape)

        return Layout(
            index=words(slots),
            weights=words(slots, dtype=torch.float32),
            counts=words(local),
            offsets=words(local + 1),
            total=words(1),
            slots=words(geometry.landing, geometry.top_k),
            tokens=words(geometry.ranks),
            sources=words(geometry.max_tokens),
        )

    def layout(self, rank: int, bound: int) -> Layout:
        """What a rank hands out in calls of this bound."""
        whole, slots = self.here(rank).layout, self.geometry.capacity(bound)
        fields = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
        return Layout(**{**fields, "index": whole.index[:slots], "weights": whole.weights[:slots]})

    def _call(self, step: Step, bound: int, kept: bool = False) -> ExchangeCall:
        return self._calls.setdefault((step, bound, kept), ExchangeCall(step, bound, kept=int(kept)))

    def dispatch(
        self, rank: int, x: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, bound: int
    ) -> Layout:
        """One rank's dispatch on its stream; without ids and weights by the layout of the one before, kept."""
        one, layout = self.here(rank), self.layout(rank, bound)
        call = self._call(Step.DISPATCH, bound, kept=ids is None)
        one.driver.dispatch(call, Outgoing(x, ids, weights, layout), one.stream)
        return layout

    def combine(
        self, rank: int, parts: torch.Tensor, out: torch.Tensor, bound: int, layout: Layout | None = None
    ) -> None:
        """One rank's combine on its stream."""
        one, layout = self.here(rank), layout or self.layout(rank, bound)
        one.driver.combine(self._call(Step.COMBINE, bound), Returning(parts, out, layout), one.stream)

    def here(self, rank: int) -> VirtualRank:
        """A rank of this process."""
        return next(one for one in self.ranks if one.rank == rank)

    def close(self) -> None:
        """Give the memory back; every rank calls it, and graphs with its calls cannot be replayed any more."""
        self.backend.device.synchronize()
        self.meet()
        for one in self.ranks:
            one.driver.close()
        own = {one.rank for one in self.ranks}
        if not self.virtual:
            for mine in (False, True):  # mappings first
                for rank, region in enumerate(self.regions):
                    if (rank in own) is mine:
                        region.close()
                self.meet()
        self.regions, self.ranks = [], []

    def errors(self) -> Sequence[Any]:
        """Every rank's fault, or None."""
        return [one.driver.error() for one in self.ranks]

    def guards_hold(self) -> bool:
        """Whether no byte between the regions of any rank has changed."""
        return all(
            bool((region.tensor[guard : guard + GUARD_BYTES] == GUARD_BYTE).all())
            for region in (self.regions[one.rank] for one in self.ranks)
            for guard in self.geometry.places.channel.guards
        )
