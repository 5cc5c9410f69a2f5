"""Submissions in graphs: replays and eager ones, of several sizes, one after another without a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.virtual_rings import VirtualRings
from tests.ring_world import expected, geometry, item

SECOND = 10**9


@pytest.mark.invariant("F13")
@pytest.mark.invariant("C2")
def test_replays_and_eager_items_alternate(gpu: Any) -> None:
    shape = geometry(payload="bfloat16", hidden=1024, max_tokens=64)
    rings = VirtualRings(shape, gpu, gpu.memory.mapped, 20 * SECOND)
    sizes, graphs = (1, 7, 64), {}
    stream = rings.streams[0]
    for rows in sizes:
        one = item(rings.g, rows, rows, rings.device)
        out = torch.zeros_like(one[0])
        rings.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream.torch, capture_error_mode="thread_local"):
            rings.submit(0, 1, one)
            rings.collect(0, out)
        graphs[rows] = graph, one, out
    number = 0

    def served() -> None:
        nonlocal number
        number += 1
        for ffn in range(rings.g.ffn):
            rings.serve(ffn, 0, number)

    # The arithmetic of serve() is loaded before anything spins: loading may wait for kernels that do.
    warm = item(rings.g, 64, 5, rings.device)
    rings.settle()
    rings.submit(0, 0, warm)
    served()
    rings.collect(0, torch.empty_like(warm[0]))
    rings.settle()
    for turn in range(70):
        graph, one, out = graphs[sizes[turn % 3]]
        fresh, eager = item(rings.g, one[0].shape[0], 100 + turn, rings.device), item(rings.g, 9, turn, rings.device)
        for old, new in zip(one, fresh, strict=True):
            old.copy_(new)
        result = torch.zeros_like(eager[0])
        rings.settle()
        with stream:
            graph.replay()
            rings.submit(0, 2, eager)
            rings.collect(0, result)
        served()
        served()
        rings.settle()
        assert torch.equal(out, expected(*fresh)) and torch.equal(result, expected(*eager)), turn
    assert rings.errors() == [None] * rings.g.size
