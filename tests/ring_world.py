"""Items for rings whose ranks are all in this process, and what must become of them."""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.virtual_rings import VirtualRings
from halma.hal.collectives.ring_plan import RingGeometry


def geometry(**changes: Any) -> RingGeometry:
    given: dict[str, Any] = {
        "attention": 2, "ffn": 3, "max_tokens": 600, "hidden": 16, "top_k": 3, "experts": (0, 1, 5, 9), "layers": 4,
        "depth": 2, "payload": "float32", **changes,
    }  # fmt: skip
    return RingGeometry(**given)


def item(g: RingGeometry, rows: int, seed: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of small whole numbers and weights that are powers of two, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (rows, g.hidden), generator=generator).to(getattr(torch, g.payload))
    ids = torch.stack([torch.randperm(g.experts[-1], generator=generator)[: g.top_k] for _ in range(rows)])
    weights = 2.0 ** -torch.randint(0, 4, (rows, g.top_k), generator=generator).float()
    return x.to(device), ids.to(device), weights.to(device)


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What comes back of an item that :meth:`VirtualRings.serve` answers: exact in any order of ranks."""
    total = weights.masked_fill(ids < 0, 0.0).sum(1, keepdim=True)
    return (x.float() * (total + 1.0)).to(x.dtype)


def check_items_of_every_size(world: VirtualRings) -> None:
    """More rows than a block has threads; fewer than ranks; choices that are none; everything on few experts."""
    g, device = world.g, world.device
    for sequence, rows in enumerate((1, 600, 5, 2, 130, 7), start=1):
        x, ids, weights = item(g, rows, rows, device)
        if rows == 130:
            ids[:] = torch.tensor([8, 7, 6])
        if rows == 7:
            ids[2:4] = -1
        world.settle()
        world.submit(0, 3, (x, ids, weights))
        seen = 0
        for ffn in range(g.ffn):
            found = world.awaited(ffn, 0, sequence)
            local = (ids >= g.experts[ffn]) & (ids < g.experts[ffn + 1])
            first, last = g.shared_part(rows, ffn)
            goes = local.any(1)
            goes[first:last] = True
            counts = (3, int(goes.sum()), int(local.sum()), last - first)
            assert (found.layer, found.rows, found.pairs, found.shared) == counts
            staging = world.serve(ffn, 0, sequence)
            world.settle()
            assert torch.equal(staging.rows[: found.rows], x[goes])
            here = torch.where(local, ids - g.experts[ffn], -1)[goes]
            assert torch.equal(staging.ids[: found.rows], here) and bool((staging.ids[found.rows :] == -1).all())
            seen += found.pairs
        assert seen == int((ids >= 0).sum())
        out = torch.full_like(x, float("nan"))
        world.settle()
        world.collect(0, out)
        world.settle()
        assert torch.equal(out, expected(x, ids, weights))
    assert world.errors() == [None] * g.size


WHOEVER = ((1, 5), (0, 600), (1, 130), (1, 7), (0, 1), (0, 33))
"""Attention ranks and rows of their items."""


def check_items_of_whoever_comes(world: VirtualRings, sizes: Sequence[tuple[int, int]] = WHOEVER) -> None:
    """Items of all sizes from ranks in no order; FFN ranks are told nothing of them, and look once more than there are
    items."""
    g, device = world.g, world.device
    sent = [(rank, item(g, rows, rows, device)) for rank, rows in sizes]
    seen = [world.seen() for _ in range(g.ffn)]
    waiting: dict[int, list[Any]] = {rank: [] for rank in range(g.attention)}
    world.settle()

    def answer(patience_ns: int = 10**9) -> None:
        for ffn in range(g.ffn):
            world.serve_next(ffn, seen[ffn], patience_ns)

    def collected(rank: int) -> None:
        one = waiting[rank].pop(0)
        out = torch.full_like(one[0], float("nan"))
        world.settle()
        world.collect(rank, out)
        world.settle()
        assert torch.equal(out, expected(*one))

    for number, (rank, one) in enumerate(sent):
        if len(waiting[rank]) == g.depth:  # every FFN rank has answered it: it looked as often as there were items
            collected(rank)
        world.submit(rank, number % g.layers, one)
        waiting[rank].append(one)
        answer()
    for rank in waiting:
        while waiting[rank]:
            collected(rank)
    answer(1_000_000)  # there is nothing
    world.settle()
    for one in seen:
        looks, items, empty, rows, _, shared = one.counted.tolist()
        assert (looks, items) == (len(sent) + 1, len(sent)) and rows >= shared
        assert int(one.shared) == 0, "nobody's item has no rows"
        assert empty == 0 or rows < sum(size for _, size in sizes)
    assert sum(int(one.counted[4]) for one in seen) == g.top_k * sum(rows for _, rows in sizes)
    assert world.errors() == [None] * g.size
