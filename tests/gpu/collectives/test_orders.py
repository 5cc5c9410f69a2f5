"""What keeps calls apart, each where taking it away shows: epoch cells, flags by parity, headers (C2, C8, C15)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.virtual_ranks import SECOND, VirtualRanks
from halma.hal.arena.layout import MAX_BLOCKS
from halma.hal.collectives.contract import Call, Choice, Kind
from tests.gpu.collectives.lab import (
    ONE_SHOT_CHUNKS,
    ONE_SHOT_WORDS,
    STAGED,
    STAGED_TWO_SHOT,
    Lab,
    all_reduce,
    in_rank_order,
    name_of,
    operands,
    same_bits,
)
from tests.gpu.collectives.test_interleaved import Item


def cells(lab: Lab) -> list[list[int]]:
    """The epochs that stand in the cells of each rank, each once."""
    begin = lab.layout.control
    return [region.tensor[begin : begin + 4 * MAX_BLOCKS].view(torch.int32).unique().tolist() for region in lab.regions]


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("blocks", (1, 3))
def test_a_small_grid_moves_the_cells_of_a_large_one(gpu, size: int, blocks: int) -> None:
    """Block 40 of the next call reads a cell that no block of this one has read."""
    lab = VirtualRanks(gpu, size)
    rng = random.Random(0)
    large = Item(lab, rng, ONE_SHOT_WORDS, 65536)
    small = Item(lab, rng, replace(ONE_SHOT_WORDS, blocks=blocks, threads=32), 480)
    lab.synchronize()
    for step, item in enumerate((large, small, small, large, small, large)):
        for rank in range(size):
            item.launch(lab, rank)
        lab.synchronize()
        assert cells(lab) == [[step + 1]] * size, step
    assert large.right() and small.right() and lab.errors() == [None] * size


@pytest.mark.invariant("C2", control=True)
def test_a_grid_of_one_size_moves_its_cells(gpu) -> None:
    lab = VirtualRanks(gpu, 2)
    item = Item(lab, random.Random(0), ONE_SHOT_WORDS, 65536)
    lab.synchronize()
    for _ in range(3):
        for rank in range(2):
            item.launch(lab, rank)
    lab.synchronize()
    assert item.right() and [channel.epoch() for channel in lab.channels] == [3, 3]


class Scripted:
    """Rank 0 of two, and a rank 1 whose stores this test makes: those of ``epoch``, and of the call behind it."""

    def __init__(self, gpu, choice: Choice, epoch: int, *, ahead: bool) -> None:
        self.lab = lab = VirtualRanks(gpu, 2, bound_ns=SECOND // 4, first_epoch=epoch - 1)
        self.call, self.choice = all_reduce(8192, torch.bfloat16), choice
        generator = torch.Generator().manual_seed(epoch)
        self.sources = [torch.randn(4096, generator=generator).bfloat16().to(lab.device) for _ in range(2)]
        self.outs = [torch.full_like(source, float("nan")) for source in self.sources]
        self._stage(epoch)
        self._tell(epoch)
        if ahead:
            self._tell(epoch + 1)
        lab.synchronize()

    def _stage(self, epoch: int) -> None:
        """Rank 1's message, and its half of the sum, in its own memory."""
        staging, sums = self.lab.layout.staging, self.lab.layout.stage_sum
        assert staging is not None and sums is not None
        theirs, total = self.lab.regions[1].tensor, in_rank_order(self.sources)
        at, half = staging.at(epoch & 1, 0), sums.at(epoch & 1, 0)
        theirs[at : at + 8192].copy_(self.sources[1].view(torch.uint8))
        theirs[half : half + 4096].copy_(total.view(torch.uint8)[4096:])

    def _tell(self, epoch: int) -> None:
        """Rank 1's header and flags, in rank 0's memory."""
        ours, headers, flags = self.lab.regions[0].tensor, self.lab.layout.headers, self.lab.layout.stage_flags
        assert flags is not None
        at = headers.at(epoch & 1, 1)
        word = torch.tensor([self.call.digest, epoch, 0, epoch], dtype=torch.int64).to(torch.int32)
        ours[at : at + 16].copy_(word.view(torch.uint8))
        for phase in range(2):
            half = flags.at(phase, 1) + (epoch & 1) * 2 * MAX_BLOCKS
            ours[half : half + 2 * MAX_BLOCKS].view(torch.int32).fill_(epoch)

    def made(self) -> list[object]:
        """Rank 0's call; its fault, and whether its sum is right."""
        self.lab.launch(self.call, self.choice, operands(self.sources, self.outs), ranks=(0,))
        self.lab.synchronize()
        return [self.lab.channels[0].error(), same_bits(self.outs[0], in_rank_order(self.sources))]


@pytest.mark.invariant("C8")
@pytest.mark.parametrize("epoch", (6, 7))
@pytest.mark.parametrize("choice", (STAGED, STAGED_TWO_SHOT), ids=name_of)
def test_a_flag_of_the_call_behind_does_not_hide_this_ones(gpu, choice: Choice, epoch: int) -> None:
    """A peer that has this rank's flag may be in its next call before this rank has looked for the peer's."""
    assert Scripted(gpu, choice, epoch, ahead=True).made() == [None, True]


@pytest.mark.invariant("C8", control=True)
@pytest.mark.parametrize("epoch", (6, 7))
@pytest.mark.parametrize("choice", (STAGED, STAGED_TWO_SHOT), ids=name_of)
def test_a_flag_of_this_call_alone_is_enough(gpu, choice: Choice, epoch: int) -> None:
    assert Scripted(gpu, choice, epoch, ahead=False).made() == [None, True]


@pytest.mark.invariant("C15")
@pytest.mark.parametrize("choice", (ONE_SHOT_WORDS, ONE_SHOT_CHUNKS, STAGED), ids=name_of)
def test_a_root_does_not_run_ahead_of_a_late_reader(gpu, size: int, choice: Choice) -> None:
    """It waits for nobody's data: the headers alone hold it within one call of the others."""
    lab = VirtualRanks(gpu, size)
    datas = [torch.randint(0, 256, (4096,), dtype=torch.uint8, device=lab.device) for _ in range(6)]
    outs = [[torch.full_like(data, 7) for data in datas] for _ in range(size)]
    lab.synchronize()
    lab.delay(size - 1, 20_000_000)  # about 10 ms
    call = Call(Kind.BROADCAST, 4096, "uint8", root=0)
    for at, data in enumerate(datas):
        lab.launch(call, choice, operands([data] * size, [outs[rank][at] for rank in range(size)]))
    lab.synchronize()
    assert lab.errors() == [None] * size
    assert all(torch.equal(out, data) for mine in outs for out, data in zip(mine, datas, strict=True))


@pytest.mark.invariant("C15", control=True)
def test_a_reader_in_time_has_them_too(gpu) -> None:
    lab = VirtualRanks(gpu, 2)
    data = torch.arange(64, dtype=torch.uint8, device=lab.device)
    outs = [torch.full_like(data, 7) for _ in range(2)]
    lab.synchronize()
    lab.launch(Call(Kind.BROADCAST, 64, "uint8", root=0), ONE_SHOT_WORDS, operands([data] * 2, outs))
    lab.synchronize()
    assert lab.errors() == [None, None] and all(torch.equal(out, data) for out in outs)
