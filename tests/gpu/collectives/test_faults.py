"""Every wait is bounded; a fault is named, sticky, and forgotten by rearm without a new capture (C7, C15)."""

from __future__ import annotations

import random
import time

import pytest
import torch

from benchmarks.virtual_ranks import SECOND, VirtualRanks
from halma.hal.collectives.contract import Call, Choice, Fault, Kind
from tests.gpu.collectives.lab import (
    MILLISECOND,
    ONE_SHOT_CHUNKS,
    ONE_SHOT_SENTINEL,
    ONE_SHOT_WORDS,
    REDUCTIONS,
    TWO_SHOT,
    Lab,
    all_reduce,
    name_of,
    operands,
)
from tests.gpu.collectives.test_interleaved import Item

BOUND = 20 * MILLISECOND


def seconds(work) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("choice", REDUCTIONS, ids=name_of)
def test_a_rank_is_missing(gpu, size: int, choice: Choice) -> None:
    lab = VirtualRanks(gpu, size, bound_ns=BOUND)
    item, later = (Item(lab, random.Random(at), choice, 20000) for at in range(2))
    missing, there = size - 1, range(size - 1)
    for out in [*item.outs, *later.outs]:
        out.fill_(7)
    lab.synchronize()
    replay = lab.graphs(lambda rank: later.launch(lab, rank))
    for rank in there:
        item.launch(lab, rank)
    took = seconds(lab.synchronize)
    assert took < 20 * BOUND / SECOND
    for rank in there:
        record = lab.channels[rank].error()
        assert record is not None
        assert (record.fault, record.peer, record.call) == (Fault.TIMEOUT, missing, 1)
        assert record.digest == item.call.digest and record.waited_ns >= BOUND
        assert item.outs[rank].isnan().all()
    assert lab.channels[missing].error() is None

    # Sticky: a captured call ends at once where a fault is set. The rank that was late may still find what its peers
    # sent in the first call; in the second nobody sends any more, and its wait ends within the bound.
    replay()
    replay()
    assert seconds(lab.synchronize) < 20 * BOUND / SECOND
    assert all(later.outs[rank].isnan().all() for rank in there)
    assert all(channel.error() is not None for channel in lab.channels)

    for channel in lab.channels:
        channel.rearm(1000)
    assert lab.errors() == [None] * size
    for _ in range(3):
        replay()  # the same graph
    lab.synchronize()
    assert lab.errors() == [None] * size and later.right()
    assert [channel.epoch() for channel in lab.channels] == [1003] * size
    assert lab.guards_hold()


@pytest.mark.invariant("C7", control=True)
@pytest.mark.parametrize("choice", REDUCTIONS, ids=name_of)
def test_a_late_rank_within_the_bound_is_no_fault(gpu, size: int, choice: Choice) -> None:
    lab = VirtualRanks(gpu, size, bound_ns=SECOND)
    item = Item(lab, random.Random(0), choice, 20000)
    lab.synchronize()
    lab.delay(size - 1, 100_000_000)  # about 50 ms
    for rank in range(size):
        item.launch(lab, rank)
    lab.synchronize()
    assert lab.errors() == [None] * size and item.right()


@pytest.mark.invariant("C15")
@pytest.mark.parametrize("choice", (*REDUCTIONS, ONE_SHOT_CHUNKS), ids=name_of)
def test_another_size_is_a_mismatch_at_once(gpu, size: int, choice: Choice) -> None:
    lab = VirtualRanks(gpu, size, bound_ns=5 * SECOND)
    kind = Kind.ALL_GATHER if choice is ONE_SHOT_CHUNKS else Kind.ALL_REDUCE
    calls = [Call(kind, 16384 if rank else 8192, "bfloat16") for rank in range(size)]
    sources = [torch.ones(8192, device=lab.device, dtype=torch.bfloat16) for _ in range(size)]
    outs = [torch.ones(8192 * size, device=lab.device, dtype=torch.bfloat16) for _ in range(size)]
    lab.synchronize()
    for rank in range(size):
        lab.launch(calls[rank], choice, operands(sources, outs), ranks=(rank,))
    assert seconds(lab.synchronize) < 1.0
    for rank, record in enumerate(lab.errors()):
        assert record is not None and record.fault is Fault.MISMATCH
        assert record.expected == calls[rank].digest and record.seen in {call.digest for call in calls} - {
            record.expected
        }
        assert (record.peer == 0) == (rank != 0)
    # Blocks that had all their words may be done with that call; whatever the next one touches is NaN.
    for out in outs:
        out.fill_(7)
    lab.synchronize()
    lab.launch(calls[0], choice, operands(sources, outs))
    lab.synchronize()
    written = (1 if kind is Kind.ALL_REDUCE else size) * calls[0].nbytes // 2
    assert all(out[:written].isnan().all() and (out[written:] == 7).all() for out in outs)


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("choice", (ONE_SHOT_WORDS, ONE_SHOT_SENTINEL, TWO_SHOT), ids=name_of)
def test_a_later_flag_is_an_overrun_at_once(gpu, choice: Choice) -> None:
    lab = VirtualRanks(gpu, 2, bound_ns=300 * MILLISECOND, first_epochs=(10, 12))
    item = Item(lab, random.Random(0), choice, 8192)
    lab.synchronize()
    for rank in range(2):
        item.launch(lab, rank)
    lab.synchronize()
    behind, ahead = lab.errors()
    assert behind is not None and ahead is not None
    assert (behind.fault, behind.expected, behind.seen) == (Fault.OVERRUN, 11, 13)
    assert behind.waited_ns < 100 * MILLISECOND
    assert (ahead.fault, ahead.expected) == (Fault.TIMEOUT, 13)


@pytest.mark.invariant("C7")
def test_the_flight_recorder_names_the_straggler(gpu) -> None:
    lab = VirtualRanks(gpu, 4, bound_ns=10 * SECOND, entries=8)
    items = [Item(lab, random.Random(at), ONE_SHOT_WORDS, 8192) for at in range(12)]
    lab.synchronize()
    for item in items[:-1]:
        for rank in range(4):
            item.launch(lab, rank)
    for rank in (0, 1, 3):
        items[-1].launch(lab, rank)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(lab.channels[r].flight()[-1:] == [] or
                                              lab.channels[r].flight()[-1].call != 12 for r in (0, 1, 3)):  # fmt: skip
        pass
    flights = [channel.flight() for channel in lab.channels]  # the device hangs meanwhile
    assert [flight[-1].call for flight in flights] == [12, 12, 11, 12]
    assert [entry.call for entry in flights[0]] == list(range(5, 13))
    last = flights[0][-1]
    assert (last.digest, last.nbytes, last.kind, last.algorithm) == (items[-1].call.digest, 8192, 1, 1)
    assert lab.errors() == [None] * 4  # read without waiting for the device
    items[-1].launch(lab, 2)
    lab.synchronize()
    assert items[-1].right() and lab.errors() == [None] * 4


@pytest.mark.invariant("C7")
def test_a_fault_is_read_while_the_device_hangs(gpu) -> None:
    lab = VirtualRanks(gpu, 2, bound_ns=BOUND)
    item = Item(lab, random.Random(0), ONE_SHOT_WORDS, 8192)
    lab.synchronize()
    item.launch(lab, 0)
    for rank in range(2):
        lab.delay(rank, 4_000_000_000)  # about 2 s, behind the call and beside it
    record, deadline = None, time.monotonic() + 1.0
    while record is None and time.monotonic() < deadline:
        record = lab.channels[0].error()
    assert not any(stream.torch.query() for stream in lab.streams)  # pyright: ignore[reportAttributeAccessIssue]
    assert record is not None
    assert (record.fault, record.peer, record.call, record.algorithm) == (Fault.TIMEOUT, 1, 1, 1)
    assert record.digest == item.call.digest and BOUND <= record.waited_ns < SECOND
    lab.synchronize()
    assert lab.channels[0].error() == record


@pytest.mark.invariant("C7", control=True)
def test_a_busy_device_is_no_fault(gpu) -> None:
    lab = VirtualRanks(gpu, 2, bound_ns=10 * SECOND)
    item = Item(lab, random.Random(0), ONE_SHOT_WORDS, 8192)
    lab.synchronize()
    for rank in range(2):
        item.launch(lab, rank)
        lab.delay(rank, 400_000_000)
    assert lab.errors() == [None, None]
    lab.synchronize()
    assert lab.errors() == [None, None] and item.right()


@pytest.mark.invariant("C7")
def test_the_bound_of_captured_calls_can_be_changed(gpu) -> None:
    lab: Lab = VirtualRanks(gpu, 2, bound_ns=60 * SECOND)
    item = Item(lab, random.Random(0), ONE_SHOT_WORDS, 8192)
    lab.synchronize()
    replay = lab.graphs(lambda rank: item.launch(lab, rank) if rank == 0 else lab.delay(1, 1))
    replay()
    lab.channels[0].set_bound(BOUND)  # while it spins
    assert seconds(lab.synchronize) < 2.0
    record = lab.channels[0].error()
    assert record is not None and record.fault is Fault.TIMEOUT


@pytest.mark.invariant("C7", control=True)
def test_no_call_no_fault(gpu) -> None:
    lab = VirtualRanks(gpu, 2)
    assert lab.errors() == [None, None] and list(lab.channels[0].flight()) == []
    assert all_reduce(16, torch.bfloat16).digest != all_reduce(32, torch.bfloat16).digest
