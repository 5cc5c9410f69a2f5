"""Graphs and eager calls, sizes, algorithms and grids on one channel, late ranks, the wrap, slots (C2, C3, C8)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.virtual_ranks import VirtualRanks
from halma.hal.collectives.contract import Box, Call, Choice, Kind
from halma.hal.collectives.control import next_epoch
from tests.gpu.collectives.lab import (
    ONE_SHOT_CHUNKS,
    ONE_SHOT_SENTINEL,
    ONE_SHOT_WORDS,
    REDUCTIONS,
    STAGED,
    STAGED_TWO_SHOT,
    TWO_SHOT,
    Lab,
    all_reduce,
    in_rank_order,
    name_of,
    operands,
    same_bits,
)

SIZES = (16, 480, 8192, 20000, 65536)


class Item:
    """One all-reduce with inputs of its own and poisoned outputs."""

    def __init__(self, lab: Lab, rng: random.Random, choice: Choice | None = None, nbytes: int | None = None) -> None:
        self.choice = choice or rng.choice(REDUCTIONS)
        if choice is None and rng.random() < 0.5:  # a grid of the caller's
            self.choice = replace(self.choice, blocks=rng.choice((1, 2, 3, 7)), threads=rng.choice((32, 96, 256)))
        nbytes = nbytes or rng.choice(SIZES)
        self.call = all_reduce(nbytes, torch.bfloat16)
        self.sources = [torch.randn(nbytes // 2, device=lab.device).bfloat16() for _ in range(lab.size)]
        self.outs = [torch.full_like(source, float("nan")) for source in self.sources]
        self.box: Box | None = None

    def launch(self, lab: Lab, rank: int) -> None:
        lab.launch(self.call, self.choice, operands(self.sources, self.outs), self.box, ranks=(rank,))

    def right(self) -> bool:
        expected = in_rank_order(self.sources)
        return all(same_bits(out, expected) for out in self.outs)


@pytest.mark.invariant("C3")
def test_mixed_calls_eager_and_captured(labs, size: int) -> None:
    lab: Lab = labs(size)
    rng = random.Random(size)
    captured = [Item(lab, rng) for _ in range(11)]  # odd: the parity of the buffers turns with every replay
    lab.synchronize()

    def program(rank: int) -> None:
        for item in captured:
            item.launch(lab, rank)

    replay = lab.graphs(program)
    for turn in range(4):
        eager = [Item(lab, rng) for _ in range(rng.randrange(1, 6))]
        for item in captured:
            for source, out in zip(item.sources, item.outs, strict=True):
                source.copy_(torch.randn_like(source))
                out.fill_(float("nan"))
        lab.synchronize()
        replay()
        for item in eager:
            for rank in rng.sample(range(size), size):
                item.launch(lab, rank)
        lab.synchronize()
        assert lab.errors() == [None] * size
        wrong = [
            (turn, at, name_of(i.choice), i.call.nbytes) for at, i in enumerate([*captured, *eager]) if not i.right()
        ]
        assert not wrong


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("choice", REDUCTIONS, ids=name_of)
def test_a_one_call_graph_back_to_back(labs, size: int, choice: Choice) -> None:
    lab: Lab = labs(size)
    item = Item(lab, random.Random(1), choice, 8192)
    before = lab.channels[0].epoch()
    lab.synchronize()
    replay = lab.graphs(lambda rank: item.launch(lab, rank))
    for _ in range(101):
        replay()
    lab.synchronize()
    assert item.right() and lab.errors() == [None] * size
    assert [channel.epoch() for channel in lab.channels] == [before + 101] * size


@pytest.mark.invariant("C8")
def test_late_ranks_in_any_order(labs, size: int) -> None:
    lab: Lab = labs(size)
    rng = random.Random(7)
    for _ in range(12):
        items = [Item(lab, rng) for _ in range(3)]
        lab.synchronize()
        for rank in rng.sample(range(size), size):
            lab.delay(rank, rng.randrange(0, 4_000_000))  # up to about two milliseconds
            for item in items:
                item.launch(lab, rank)
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert all(item.right() for item in items)


@pytest.mark.invariant("C2")
def test_the_epoch_wraps(gpu, size: int) -> None:
    first = 0xFFFFFFF0
    lab = VirtualRanks(gpu, size, first_epoch=first)
    rng, expected = random.Random(3), first
    for _ in range(40):
        items = [Item(lab, rng) for _ in range(1)]
        lab.synchronize()
        for item in items:
            for rank in range(size):
                item.launch(lab, rank)
            expected = next_epoch(expected)
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert all(item.right() for item in items)
    assert [channel.epoch() for channel in lab.channels] == [expected] * size
    assert expected == 40 - 15 + 1
    assert lab.guards_hold()


def _old_words(lab: Lab, message: int) -> int:
    """Flags that lie beyond a message of ``message`` bytes, in all boxes of all ranks."""
    words = lab.layout.words
    assert words is not None
    count = 0
    for region in lab.regions:
        boxes = region.tensor[words.offset : words.offset + words.nbytes].view(torch.int32).view(2, lab.size, -1)
        count += int((boxes[:, :, message // 2 :] != 0).sum())
    return count


def _old_flags(lab: Lab, before: int) -> int:
    count = 0
    for lane in (lab.layout.chunk_flags, lab.layout.stage_flags):
        assert lane is not None
        for region in lab.regions:
            flags = region.tensor[lane.offset : lane.offset + lane.nbytes].view(torch.int32)
            count += int(((flags != 0) & (flags < before)).sum())
    return count


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("small", (ONE_SHOT_WORDS, ONE_SHOT_SENTINEL, TWO_SHOT, STAGED, ONE_SHOT_CHUNKS), ids=name_of)
def test_old_flags_are_scrubbed(gpu, size: int, small: Choice) -> None:
    scrubbed = 1 << 20
    lab = VirtualRanks(gpu, size, first_epoch=scrubbed - 9)
    rng = random.Random(5)
    for choice in (ONE_SHOT_WORDS, TWO_SHOT, STAGED, STAGED_TWO_SHOT) * 2:  # on both buffers
        item = Item(lab, rng, choice, 65536)
        lab.synchronize()
        for rank in range(size):
            item.launch(lab, rank)
        lab.synchronize()
        assert item.right()
    assert lab.channels[0].epoch() == scrubbed - 1
    assert _old_words(lab, 64) > 0 and _old_flags(lab, scrubbed) > 0
    for _ in range(2):
        sources = [torch.ones(32, device=lab.device, dtype=torch.bfloat16) for _ in range(size)]
        outs = [torch.zeros(32 * size, device=lab.device, dtype=torch.bfloat16) for _ in range(size)]
        kind = Kind.ALL_GATHER if small is ONE_SHOT_CHUNKS else Kind.ALL_REDUCE
        lab.synchronize()
        lab.launch(Call(kind, 64, "bfloat16"), small, operands(sources, outs))
    lab.synchronize()
    assert lab.channels[0].epoch() == scrubbed + 1
    assert _old_words(lab, 64) == 0 and _old_flags(lab, scrubbed) == 0
    item = Item(lab, rng, ONE_SHOT_WORDS, 65536)
    lab.synchronize()
    for rank in range(size):
        item.launch(lab, rank)
    lab.synchronize()
    assert item.right() and lab.errors() == [None] * size


@pytest.mark.invariant("A3")
def test_slots_of_a_plan(gpu, size: int) -> None:
    slot = 1 << 16
    lab = VirtualRanks(gpu, size, spare=8 * slot)
    rng = random.Random(11)
    doubled = [Box(lab.layout.end + 2 * at * slot, slot) for at in range(2)]
    single = [Box(lab.layout.end + (4 + at) * slot, 0) for at in range(3)]
    for boxes in (doubled, single):  # undoubled slots come round after two other calls
        items = [Item(lab, rng, rng.choice((STAGED, STAGED_TWO_SHOT)), rng.choice((480, 65536))) for _ in range(12)]
        for at, item in enumerate(items):
            item.box = boxes[at % len(boxes)]
        lab.synchronize()
        for rank in range(size):
            for item in items:
                item.launch(lab, rank)
        lab.synchronize()
        assert lab.errors() == [None] * size
        assert all(item.right() for item in items)
    assert lab.guards_hold()
