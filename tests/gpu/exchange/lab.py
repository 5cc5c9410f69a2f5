"""Ranks of one exchange as streams of one GPU, with toy experts, and what must come out of a step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.virtual_exchange import VirtualExchange
from benchmarks.virtual_ranks import SECOND
from halma.hal.backend import Backend
from halma.hal.collectives.exchange_contract import Layout
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.testing.conformance.exchange_setup import Experts, Item, identity_sums, wrong_slots

MILLISECOND = SECOND // 1000


class Place:
    """Fixed memory of one rank's step, and the step itself."""

    def __init__(self, lab: Lab, rank: int, tokens: int, bound: int) -> None:
        geometry, device = lab.geometry, lab.device
        self.lab, self.rank, self.bound = lab, rank, bound
        self.x = torch.empty((tokens, geometry.hidden), dtype=getattr(torch, geometry.given), device=device)
        self.ids = torch.full((tokens, geometry.top_k), -1, dtype=torch.int64, device=device)
        self.weights = torch.empty((tokens, geometry.top_k), device=device)
        self.out = torch.empty((tokens, geometry.hidden), device=device)

    def put(self, item: Item) -> None:
        """On the rank's stream, not waited for."""
        with self.lab.ranks[self.rank].stream:
            for place, tensor in ((self.x, item.x), (self.ids, item.ids), (self.weights, item.weights)):
                if tensor.numel():
                    place.copy_(tensor.pin_memory(), non_blocking=True)

    def step(self) -> None:
        """Dispatch, experts, combine, on the rank's stream."""
        self.dispatch()
        self.combine()

    def dispatch(self) -> None:
        self.lab.dispatch(self.rank, self.x, self.ids, self.weights, self.bound)

    def dispatch_kept(self) -> None:
        """By the layout of the dispatch before."""
        self.lab.dispatch(self.rank, self.x, None, None, self.bound)

    def combine(self) -> None:
        with self.lab.ranks[self.rank].stream:
            parts = self.lab.experts[self.rank](self.lab.handed(self.rank, self.bound))
        self.lab.combine(self.rank, parts, self.out, self.bound)


class Lab(VirtualExchange):
    """A virtual exchange with toy experts on every rank; rows are poisoned when it is made."""

    def __init__(self, backend: Backend, geometry: Geometry, **options: Any) -> None:
        super().__init__(backend, geometry, **options)
        self.experts = [Experts(backend, geometry) for _ in self.ranks]
        self.poison()

    def poison(self, byte: int = 0xFF) -> None:
        """NaN, or another byte, in every landing row and scale."""
        self.synchronize()
        for one in self.ranks:
            one.rows.view(torch.uint8).fill_(byte)
            if one.scales is not None:
                one.scales.view(torch.uint8).fill_(byte)
        self.synchronize()

    def synchronize(self) -> None:
        self.backend.device.synchronize()

    def handed(self, rank: int, bound: int) -> Any:
        """What a dispatch hands out, as experts and oracles take it."""
        one, layout = self.ranks[rank], self.layout(rank, bound)
        fields = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
        return SimpleNamespace(rows=one.rows, scales=one.scales, **fields)

    def places(self, items: Sequence[Item], bound: int) -> list[Place]:
        """Each rank's memory for an item like these."""
        return [Place(self, rank, len(item.x), bound) for rank, item in enumerate(items)]

    def wrong(self, places: Sequence[Place], items: Sequence[Item]) -> list[str]:
        """What of the sums is not as it must be, bit by bit."""
        self.synchronize()
        found: list[str] = []
        for place, item in zip(places, items, strict=True):
            wanted = identity_sums(self.geometry, item)
            if not torch.equal(place.out.cpu().view(torch.int32), wanted.view(torch.int32)):
                found.append(f"sums of rank {place.rank}: {int((place.out.cpu() != wanted).sum())} of {wanted.numel()}")
        return found + [f"rank {rank}: {error}" for rank, error in enumerate(self.errors()) if error is not None]

    def wrong_slots(self, bound: int, items: Sequence[Item]) -> list[str]:
        """What of the slots is not as it must be."""
        self.synchronize()
        found: list[str] = []
        for rank in range(self.geometry.ranks):
            side: Any = SimpleNamespace(
                exchange=SimpleNamespace(geometry=self.geometry, rank=rank), done=lambda tensor: tensor.cpu().clone()
            )
            found += [f"rank {rank}: {text}" for text in wrong_slots(side, self.handed(rank, bound), items)]
        return found
