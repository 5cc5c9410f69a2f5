"""All-reduce into mixed residual streams (mHC): values, bits, replays, the wrap, neighbours on the channel, faults."""

from __future__ import annotations

import random
import time

import pytest
import torch

from benchmarks.virtual_ranks import SECOND, VirtualRanks
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.control import next_epoch
from tests.gpu.collectives.lab import MILLISECOND, ONE_SHOT_SENTINEL, ONE_SHOT_WORDS, Lab
from tests.gpu.collectives.streams_lab import Problem, compare
from tests.gpu.collectives.test_interleaved import Item

COLUMNS = (128, 1056, 4096)
"""One group of columns and more, an odd multiple of 32, the width of V4-Flash."""
BF16, F16 = torch.bfloat16, torch.float16


def made(lab: Lab, rows: int, columns: int, dtype: torch.dtype = BF16, **more) -> Problem:
    return Problem(lab.size, lab.device, rows, columns, dtype, **more)


def launch(lab: Lab, problem: Problem, rank: int) -> None:
    lab.channels[rank].launch(problem.call, ONE_SHOT_SENTINEL, problem.operands(rank), None, lab.streams[rank])


def run(lab: Lab, *problems: Problem) -> None:
    """Each problem once, on every rank."""
    lab.synchronize()
    for problem in problems:
        for rank in range(lab.size):
            launch(lab, problem, rank)
    lab.synchronize()
    assert lab.errors() == [None] * lab.size


@pytest.mark.invariant("C1")
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_every_number_of_rows(labs, size: int, dtype: torch.dtype) -> None:
    lab: Lab = labs(size)
    for columns in COLUMNS:
        for rows in range(1, 9):
            problem = made(lab, rows, columns, dtype, wide_weight=rows % 2 == 0)
            run(lab, problem)
            assert problem.wrong() == [], (rows, columns)


def test_other_widths_eps_and_rounds(labs, size: int) -> None:
    lab: Lab = labs(size)
    for rows, columns, more in (
        (1, 32, {}),
        (3, 7168, {}),  # V4-Pro: two groups a block
        (2, 96, {"iterations": 1, "hc_eps": 0.03}),
        (2, 96, {"iterations": 2, "hc_eps": 0.03}),
    ):
        problem = made(lab, rows, columns, **more)
        run(lab, problem)
        assert problem.wrong() == [], (rows, columns, more)


@pytest.mark.parametrize("cancel", (1e-1, 1e-2, 1e-3))
def test_streams_that_all_but_cancel(labs, cancel: float) -> None:
    """The norm comes from a Gram matrix; where its terms cancel it may be less exact, by the documented bound."""
    lab: Lab = labs(2)
    for dtype in (BF16, F16):
        problem = made(lab, 4, 4096, dtype, cancel=cancel)
        run(lab, problem)
        assert problem.wrong() == []
        assert all(bool(norm[:4].isfinite().all()) for norm in problem.norms)


@pytest.mark.invariant("C1")
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(labs, size: int) -> None:
    lab: Lab = labs(size)
    eight = made(lab, 8, 4096)
    run(lab, eight)
    for rows in (1, 2, 3):
        few = made(lab, rows, 4096)
        few.here, few.next = eight.here, eight.next
        few.sources = [source[:rows].contiguous() for source in eight.sources]
        few.first_streams, few.first_mixes = eight.first_streams[:rows], eight.first_mixes[:rows]
        few.reset()
        run(lab, few)
        for one, other in ((few.streams, eight.streams), (few.mixes, eight.mixes), (few.norms, eight.norms)):
            assert torch.equal(one[0][:rows], other[0][:rows]), rows


@pytest.mark.invariant("C2")
def test_back_to_back_replays(labs, size: int) -> None:
    """A graph of an odd number of calls, one behind the other: the buffers' parity turns with every replay."""
    lab: Lab = labs(size)
    problems = [made(lab, rows, 4096, seed=rows) for rows in (1, 8, 2, 1, 4, 3, 1)]
    lab.synchronize()

    def program(rank: int) -> None:
        for problem in problems:
            launch(lab, problem, rank)

    replay, before = lab.graphs(program), lab.channels[0].epoch()
    for _ in range(5):
        for problem in problems:
            problem.reset()
        lab.synchronize()
        replay()
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert [problem.wrong() for problem in problems] == [[]] * len(problems)
    for _ in range(50):  # nothing between them: in place, so each goes on from what the one before made
        replay()
    lab.synchronize()
    assert lab.errors() == [None] * size
    assert [channel.epoch() for channel in lab.channels] == [before + 55 * 7] * size
    for problem in problems:
        assert all(torch.equal(streams[: problem.rows], problem.streams[0][: problem.rows])
                   for streams in problem.streams)  # fmt: skip


@pytest.mark.parametrize("rows", (1, 8))
def test_calls_that_hand_on_what_they_made(labs, size: int, rows: int) -> None:
    """As a model makes them: each goes on from the streams and mixes of the one before."""
    lab: Lab = labs(size)
    chain = made(lab, rows, 1056)
    for turn in range(6):
        streams, mixes = chain.streams[0].clone(), chain.mixes[0].clone()
        run(lab, chain)
        assert compare(chain, chain.streams[0], chain.mixes[0], chain.norms[0], streams, mixes) == [], turn
        chain.here, chain.next = chain.next, chain.here
    once = [tensor.clone() for tensor in (chain.streams[0], chain.mixes[0], chain.norms[0])]
    chain.reset()
    lab.synchronize()

    def program(rank: int) -> None:
        here, following = chain.here, chain.next
        for turn in range(6):
            chain.here, chain.next = (here, following) if turn % 2 == 0 else (following, here)
            launch(lab, chain, rank)
        chain.here, chain.next = here, following

    replay = lab.graphs(program)
    replay()
    lab.synchronize()
    for tensor, expected in zip((chain.streams[0], chain.mixes[0], chain.norms[0]), once, strict=True):
        assert torch.equal(tensor[:rows], expected[:rows])


@pytest.mark.invariant("C2")
def test_the_epoch_wraps(gpu, size: int) -> None:
    first = 0xFFFFFFF0
    lab = VirtualRanks(gpu, size, first_epoch=first)
    problems = [made(lab, rows, 1056, seed=rows) for rows in (1, 8, 3)]
    lab.synchronize()
    replay = lab.graphs(lambda rank: [launch(lab, problem, rank) for problem in problems] and None)
    expected = first
    for _ in range(9):
        for problem in problems:
            problem.reset()
            expected = next_epoch(expected)
        lab.synchronize()
        replay()
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert [problem.wrong() for problem in problems] == [[]] * 3
    assert expected < 100 and [channel.epoch() for channel in lab.channels] == [expected] * size
    assert lab.guards_hold()


def _old_parts(lab: Lab, before: int) -> int:
    """Flags in any rank's exchange between blocks that are older than ``before``."""
    lane = lab.layout.parts
    assert lane is not None
    flags = [region.tensor[lane.offset : lane.offset + lane.nbytes].view(torch.int32)[1::2] for region in lab.regions]
    return sum(int(((each != 0) & (each < before)).sum()) for each in flags)


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("by_streams", (True, False), ids=("by-the-same-kind", "by-another-kind"))
def test_old_parts_are_scrubbed(gpu, size: int, by_streams: bool) -> None:
    scrubbed = 1 << 20
    lab = VirtualRanks(gpu, size, first_epoch=scrubbed - 3)
    run(lab, *(made(lab, 8, 4096, seed=seed) for seed in range(2)))
    assert _old_parts(lab, scrubbed) > 0
    if by_streams:
        problems = [made(lab, 1, 1056, seed=seed) for seed in range(2)]
        run(lab, *problems)
        assert [problem.wrong() for problem in problems] == [[], []]
    else:
        for seed in range(2):
            item = Item(lab, random.Random(seed), ONE_SHOT_WORDS, 8192)
            lab.synchronize()
            for rank in range(size):
                item.launch(lab, rank)
            lab.synchronize()
            assert item.right()
    assert lab.channels[0].epoch() == scrubbed + 1
    assert _old_parts(lab, scrubbed) == 0
    last = made(lab, 8, 4096)
    run(lab, last)
    assert last.wrong() == [] and lab.guards_hold()


@pytest.mark.invariant("C3")
def test_among_other_calls_of_the_channel(labs, size: int) -> None:
    lab: Lab = labs(size)
    rng = random.Random(size)
    problems = [made(lab, rng.randrange(1, 9), rng.choice(COLUMNS), seed=at) for at in range(6)]
    items = [Item(lab, rng) for _ in range(9)]
    calls = [*problems, *items]
    rng.shuffle(calls)
    lab.synchronize()

    def one(call: Problem | Item, rank: int) -> None:
        if isinstance(call, Problem):
            launch(lab, call, rank)
        else:
            call.launch(lab, rank)

    replay = lab.graphs(lambda rank: [one(call, rank) for call in calls] and None)
    for turn in range(4):
        for problem in problems:
            problem.reset()
        for item in items:
            for out in item.outs:
                out.fill_(float("nan"))
        eager = made(lab, 1 + turn, 4096, seed=turn)
        lab.synchronize()
        replay()
        for rank in rng.sample(range(size), size):
            launch(lab, eager, rank)
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert all(item.right() for item in items)
        assert [problem.wrong() for problem in (*problems, eager)] == [[]] * 7


@pytest.mark.invariant("C8")
def test_late_ranks_in_any_order(labs, size: int) -> None:
    lab: Lab = labs(size)
    rng = random.Random(7)
    for seed in range(6):
        problems = [made(lab, rows, 4096, seed=seed) for rows in (1, 8)]
        lab.synchronize()
        for rank in rng.sample(range(size), size):
            lab.delay(rank, rng.randrange(0, 4_000_000))  # up to about two milliseconds
            for problem in problems:
                launch(lab, problem, rank)
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert [problem.wrong() for problem in problems] == [[], []]


def all_nan(problem: Problem, rank: int) -> bool:
    """Whether all that a call gives is NaN."""
    outputs = (problem.streams[rank], problem.mixes[rank], problem.norms[rank])
    return all(bool(tensor.isnan().all()) for tensor in outputs)


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("columns", (1056, 4096))
def test_a_rank_is_missing(gpu, size: int, columns: int) -> None:
    bound = 20 * MILLISECOND
    lab = VirtualRanks(gpu, size, bound_ns=bound)
    first, later = made(lab, 3, columns), made(lab, 8, columns, seed=1)
    missing, there = size - 1, range(size - 1)
    lab.synchronize()
    replay = lab.graphs(lambda rank: launch(lab, later, rank))
    begin = time.monotonic()
    for rank in there:
        launch(lab, first, rank)
    lab.synchronize()
    assert time.monotonic() - begin < 20 * bound / SECOND
    for rank in there:
        record = lab.channels[rank].error()
        assert record is not None
        assert (record.fault, record.peer, record.call) == (Fault.TIMEOUT, missing, 1)
        assert record.digest == first.call.digest and record.waited_ns >= bound
        assert all_nan(first, rank)
    replay()  # sticky: nobody pushes or spins any more, blocks of one rank neither
    replay()
    lab.synchronize()
    assert time.monotonic() - begin < 60 * bound / SECOND
    assert all(all_nan(later, rank) for rank in there)
    for channel in lab.channels:
        channel.rearm(1000)
    later.reset()
    lab.synchronize()
    replay()
    lab.synchronize()
    assert lab.errors() == [None] * size and later.wrong() == []
    assert [channel.epoch() for channel in lab.channels] == [1001] * size
    assert lab.guards_hold()


@pytest.mark.invariant("C7", control=True)
def test_a_late_rank_within_the_bound_is_no_fault(gpu, size: int) -> None:
    lab = VirtualRanks(gpu, size, bound_ns=SECOND)
    problem = made(lab, 8, 4096)
    lab.synchronize()
    lab.delay(size - 1, 100_000_000)  # about 50 ms
    for rank in range(size):
        launch(lab, problem, rank)
    lab.synchronize()
    assert lab.errors() == [None] * size and problem.wrong() == []
