"""Rings on one GPU, every rank a stream: what arrives, in what order slots are used again, and what a fault says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.virtual_rings import VirtualRings
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.ring_contract import RingItem, RingWait
from tests.ring_world import check_items_of_every_size, check_items_of_whoever_comes, expected, geometry, item

SECOND = 10**9


def world(gpu: Any, bound_ns: int = 20 * SECOND, **changes: Any) -> VirtualRings:
    made = VirtualRings(geometry(**changes), gpu, gpu.memory.mapped, bound_ns)
    made.settle()
    return made


@pytest.mark.invariant("C13")
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")])
def test_items_of_every_size(gpu: Any, dtypes: tuple[str, str]) -> None:
    check_items_of_every_size(world(gpu, payload=dtypes[0], reply=dtypes[1], hidden=4096))


@pytest.mark.invariant("C13")
@pytest.mark.parametrize("changes", [{}, {"ffn": 1, "experts": (0, 9), "depth": 4}, {"payload": "bfloat16"}])
def test_a_device_takes_whichever_item_comes(gpu: Any, changes: dict[str, Any]) -> None:
    check_items_of_whoever_comes(world(gpu, hidden=512, **changes))


@pytest.mark.invariant("F15")
def test_one_graph_serves_items_of_every_size_and_sender(gpu: Any) -> None:
    """Replays are queued ahead of the items, and more of them than there are items."""
    rings = world(gpu, ffn=1, experts=(0, 9), payload="bfloat16", reply="bfloat16", hidden=512)
    serving, staging, seen = rings.streams[2], rings.staging(), rings.seen()
    rings.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=serving.torch, capture_error_mode="thread_local"):
        rings.drivers[2].take_next(staging, seen, SECOND // 10, serving)
        out = (staging.rows.float() * (staging.weights.sum(1, keepdim=True) + 1.0)).to(torch.bfloat16)
        rings.drivers[2].reply_next(out, None, serving)
    for turn in range(40):
        sent = [item(rings.g, 1 + (37 * turn + 101 * rank) % 300, 7 * turn + rank, rings.device) for rank in (0, 1)]
        outs = [torch.full_like(one[0], float("nan")) for one in sent]
        rings.settle()
        with serving:
            graph.replay()
            graph.replay()
        for rank in (turn % 2, 1 - turn % 2):
            rings.submit(rank, turn % 4, sent[rank])
            rings.collect(rank, outs[rank])
        rings.settle()
        assert all(torch.equal(out, expected(*one)) for out, one in zip(outs, sent, strict=True)), turn
    with serving:
        graph.replay()
    rings.settle()
    assert seen.counted.tolist()[:3] == [81, 80, 0] and rings.errors() == [None] * 3


@pytest.mark.invariant("C13")
def test_slots_are_used_again_and_again(gpu: Any) -> None:
    """Two attention ranks, as many items as slots under way, of sizes that change: nothing stale, nothing mixed."""
    rings = world(gpu, ffn=1, experts=(0, 9), payload="bfloat16", reply="bfloat16", hidden=512)
    for turn in range(60):
        numbers = (2 * turn + 1, 2 * turn + 2)
        keys = [(rank, number) for rank in (0, 1) for number in numbers]
        sent = {(r, n): item(rings.g, 1 + (37 * n + 101 * r) % 300, 7 * n + r, rings.device) for r, n in keys}
        rings.settle()
        for (rank, _), one in sent.items():
            rings.submit(rank, turn % 4, one)
        for rank, number in sent:
            rings.serve(0, rank, number)
        outs = {key: torch.full_like(one[0], float("nan")) for key, one in sent.items()}
        rings.settle()
        for (rank, _), out in zip(sent, outs.values(), strict=True):
            rings.collect(rank, out)
        rings.settle()
        assert all(torch.equal(outs[key], expected(*one)) for key, one in sent.items()), turn
    assert rings.errors() == [None] * 3


@pytest.mark.invariant("F16")
def test_an_answer_that_does_not_come_is_on_record(gpu: Any) -> None:
    rings = world(gpu, bound_ns=SECOND // 10)
    one = item(rings.g, 4, 1, rings.device)
    rings.settle()
    rings.submit(0, 2, one)
    rings.serve(0, 0, 1)
    rings.serve(2, 0, 1)
    out = torch.zeros_like(one[0])
    rings.settle()
    rings.collect(0, out)
    rings.settle()
    record = rings.drivers[0].error()
    assert record is not None and record.fault is Fault.TIMEOUT and RingWait(record.algorithm) is RingWait.REPLY
    assert (record.peer, record.call, record.expected, record.seen) == (3, 1, 1, 0)
    assert bool(out.isnan().all())
    rings.submit(0, 2, one)
    rings.settle()
    assert rings.header(0, 0, 2) is None, "a fault is sticky"


@pytest.mark.invariant("F16")
def test_a_payload_that_does_not_come_is_on_record(gpu: Any) -> None:
    rings = world(gpu, bound_ns=SECOND // 10)
    staging = rings.staging()
    rings.settle()
    rings.drivers[2].take(RingItem(1, 1, 3, 4, 4, 0, 2), staging, rings.streams[2])
    rings.settle()
    record = rings.drivers[2].error()
    assert record is not None and RingWait(record.algorithm) is RingWait.ITEM
    assert (record.peer, record.call, record.digest) == (1, 1, 3) and bool((staging.ids == -1).all())


@pytest.mark.invariant("F15")
def test_a_slot_is_not_written_before_it_was_given_back(gpu: Any) -> None:
    rings = world(gpu, bound_ns=SECOND // 10, attention=1, ffn=1, experts=(0, 9))
    first, second = item(rings.g, 4, 1, rings.device), item(rings.g, 4, 2, rings.device)
    rings.settle()
    for _ in range(2):
        rings.submit(0, 1, first)
    rings.settle()
    before = rings.regions[1].tensor.clone()
    rings.submit(0, 1, second)
    rings.settle()
    record = rings.drivers[0].error()
    assert record is not None and RingWait(record.algorithm) is RingWait.CREDIT and record.call == 3
    assert torch.equal(before, rings.regions[1].tensor) and rings.header(0, 0, 3) is None
