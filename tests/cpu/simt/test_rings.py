"""The rings' kernels and their driver on the host, against the arithmetic that they stand for: simulated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.virtual_rings import VirtualRings
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.ring_contract import RingItem, RingWait
from halma.hal.collectives.ring_plan import RingGeometry, StateWords
from halma.hal.errors import CollectiveError
from tests.cpu.simt.host_kernels import COMPILER, host_backend
from tests.ring_world import (
    WHOEVER,
    check_items_of_every_size,
    check_items_of_whoever_comes,
    expected,
    geometry,
    item,
)

pytestmark = [
    pytest.mark.evidence("simulated"),
    pytest.mark.skipif(COMPILER is None, reason="the stand-in for a device needs g++"),
]
SECOND = 10**9


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    yield host_backend()


def worlds(geometry: RingGeometry, backend: Any, bound_ns: int = 60 * SECOND) -> VirtualRings:
    def map_host(file: Any) -> Any:
        return SimpleNamespace(address=np.frombuffer(file.mapping, np.uint8).ctypes.data, close=int)

    return VirtualRings(geometry, backend, map_host, bound_ns)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float32"),
        pytest.param(("float32", "float32"), marks=pytest.mark.nightly),
        pytest.param(("float16", "float32"), marks=pytest.mark.nightly),
    ],
)
def test_rows_go_where_their_experts_are_and_come_back_added_up(backend: Any, dtypes: tuple[str, str]) -> None:
    check_items_of_every_size(worlds(geometry(payload=dtypes[0], reply=dtypes[1]), backend))


@pytest.mark.invariant("F15")
@pytest.mark.invariant("F2", control=True)
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"ffn": 2, "experts": (0, 4, 9), "max_tokens": 40}, ((1, 5), (0, 40), (1, 7))),
        pytest.param({}, WHOEVER, marks=pytest.mark.nightly),
        pytest.param({"ffn": 1, "experts": (0, 9), "depth": 4}, WHOEVER, marks=pytest.mark.nightly),
    ],
    ids=["short", "three", "one"],
)
def test_a_device_takes_whichever_item_comes(backend: Any, changes: dict[str, Any], sizes: Any) -> None:
    check_items_of_whoever_comes(worlds(geometry(**changes), backend), sizes)


def test_a_device_that_is_sent_nothing_says_so_in_time(backend: Any) -> None:
    world = worlds(geometry(), backend)
    seen = world.seen()
    staging = world.serve_next(0, seen, patience_ns=1000)
    assert bool((staging.ids == -1).all()) and seen.counted.tolist() == [1, 0, 0, 0, 0, 0]
    assert int(seen.layer) == 0 and world.errors() == [None] * world.g.size


@pytest.mark.invariant("F2")
def test_a_device_refuses_a_header_that_cannot_be(backend: Any) -> None:
    world = worlds(geometry(), backend)
    one = item(world.g, 4, seed=1)
    world.submit(1, 2, one)
    at = world.plan.item_slot(1, 1) + world.plan.item.header
    world.regions[2].tensor.numpy()[at : at + 4].view(np.uint32)[0] = 99  # its layer
    seen = world.seen()
    staging = world.serve_next(0, seen)
    record = world.drivers[2].error()
    assert record is not None and record.fault is Fault.MISMATCH and (record.peer, record.digest) == (1, 99)
    assert bool((staging.ids == -1).all()) and int(seen.layer) == 0
    world.submit(0, 2, one)
    world.serve_next(0, seen)
    assert seen.counted.tolist()[:2] == [2, 0], "a fault is sticky"


def test_the_one_reply_comes_back_as_it_is(backend: Any) -> None:
    world = worlds(geometry(ffn=1, experts=(0, 9), payload="bfloat16", reply="bfloat16"), backend)
    x, ids, weights = item(world.g, 40, seed=1)
    world.submit(1, 0, (x, ids, weights))
    world.serve(0, 1, 1)
    out = torch.zeros_like(x)
    world.collect(1, out)
    assert torch.equal(out, expected(x, ids, weights))


def test_as_many_items_as_slots_are_under_way_and_ranks_do_not_mix(backend: Any) -> None:
    world = worlds(geometry(ffn=1, experts=(0, 9), depth=4), backend)
    sent = []
    for number in range(4):
        for rank in (0, 1):
            sent.append((rank, number + 1, item(world.g, 3 + number, seed=10 * rank + number)))
            world.submit(rank, number % 2, sent[-1][2])
    for rank, sequence, _ in reversed(sent):
        world.serve(0, rank, sequence)
    for rank, _, one in sent:
        out = torch.empty_like(one[0])
        world.collect(rank, out)
        assert torch.equal(out, expected(*one))


@pytest.mark.invariant("C2")
def test_numbers_wrap_and_skip_0(backend: Any) -> None:
    world = worlds(geometry(attention=1, ffn=1, experts=(0, 9)), backend)
    words = StateWords.of(world.g)
    memory: Any = world.regions[0].tensor.numpy()
    for offset, count in ((words.sent, 1), (words.collected, 512)):
        at = world.plan.state + offset
        memory[at : at + 4 * count].view(np.uint32)[:] = 0xFFFFFFFE
    for sequence in (0xFFFFFFFF, 2, 3, 4):
        one = item(world.g, 4, seed=sequence % 97)
        world.submit(0, 1, one)
        world.serve(0, 0, sequence)
        out = torch.empty_like(one[0])
        world.collect(0, out)
        assert torch.equal(out, expected(*one))
    assert world.errors() == [None, None]


@pytest.mark.invariant("F16")
def test_who_does_not_answer_is_on_record_and_nothing_is_sent_any_more(backend: Any) -> None:
    world = worlds(geometry(), backend, bound_ns=SECOND // 50)
    one = item(world.g, 4, seed=1)
    world.submit(0, 2, one)
    world.serve(0, 0, 1)
    world.serve(2, 0, 1)
    out = torch.zeros_like(one[0])
    world.collect(0, out)
    record = world.drivers[0].error()
    assert record is not None and record.fault is Fault.TIMEOUT and RingWait(record.algorithm) is RingWait.REPLY
    assert (record.peer, record.call, record.expected, record.seen) == (2 + 1, 1, 1, 0)
    assert record.waited_ns >= SECOND // 50 and bool(out.isnan().all())
    world.submit(0, 2, one)
    assert world.header(0, 0, 2) is None, "a fault is sticky"


@pytest.mark.invariant("F16")
def test_an_item_whose_payload_does_not_come_is_on_record(backend: Any) -> None:
    world = worlds(geometry(), backend, bound_ns=SECOND // 50)
    driver, staging = world.drivers[2], world.staging()
    driver.take(RingItem(1, 1, 3, 4, 4, 0, 2), staging, None)
    record = driver.error()
    assert record is not None and RingWait(record.algorithm) is RingWait.ITEM
    assert (record.peer, record.call, record.digest) == (1, 1, 3) and bool((staging.ids == -1).all())


@pytest.mark.invariant("F15")
def test_a_slot_is_not_written_before_it_was_given_back(backend: Any) -> None:
    world = worlds(geometry(attention=1, ffn=1, experts=(0, 9)), backend, bound_ns=SECOND // 50)
    first = item(world.g, 4, seed=1)
    for _ in range(2):
        world.submit(0, 1, first)
    before = world.regions[1].tensor.clone()
    world.submit(0, 1, item(world.g, 4, seed=2))
    record = world.drivers[0].error()
    assert record is not None and RingWait(record.algorithm) is RingWait.CREDIT and record.call == 3
    assert torch.equal(before, world.regions[1].tensor) and world.header(0, 0, 3) is None


def test_geometries_without_kernels_are_refused(backend: Any) -> None:
    for changes, said in (({"hidden": 12}, "rows of 12"), ({"payload": "float64", "weights": "float64"}, "float64")):
        with pytest.raises(CollectiveError, match=said):
            worlds(geometry(**changes), backend)
