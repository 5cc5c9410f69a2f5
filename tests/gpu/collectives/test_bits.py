"""Every algorithm, dtype, size and world size: the same bits, for every bit pattern (C1, C9, C10)."""

from __future__ import annotations

import pytest
import torch

from halma.hal.collectives.contract import Call, Kind
from halma.hal.errors import CollectiveError
from tests.gpu.collectives.lab import (
    ONE_SHOT_CHUNKS,
    ONE_SHOT_SENTINEL,
    ONE_SHOT_WORDS,
    REDUCTIONS,
    STAGED,
    TWO_SHOT,
    Lab,
    all_reduce,
    in_rank_order,
    name_of,
    operands,
    same_bits,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 16, 48, 8, 4, 20, 1000, 8192, 8208, 65536, 65552, 262144 + 16, 1 << 20)
"""Bytes: none, one unit, odd numbers of words, parts of a unit, the largest of each wire and just beyond."""


def any_bits(nbytes: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random bytes with runs of the awkward patterns: all ones, -0, NaN payloads, infinities, subnormals."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    values = raw.view(dtype).clone()
    count = values.numel()
    special = torch.tensor([-1, -32768, 0x7F80, -128, 0x7FC1, 1, -2, 0], dtype=torch.int16)
    if dtype == torch.float32:
        patterns = torch.tensor([-1, -(2**31), 0x7F800000, -0x800000, 0x7FC00001, 1, -2, 0], dtype=torch.int32)
    else:
        patterns = special
    where = torch.randint(0, max(count, 1), (count // 4,), generator=generator)
    which = torch.randint(0, 8, (count // 4,), generator=generator)
    if count:
        values.view(patterns.dtype)[where] = patterns[which]
    return values.to(device)


@pytest.mark.invariant("C1")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_algorithms_agree_bit_by_bit(labs, size: int, dtype: torch.dtype) -> None:
    lab: Lab = labs(size)
    for nbytes in SIZES:
        sources = [any_bits(nbytes, dtype, lab.device, 100 * nbytes + rank) for rank in range(size)]
        expected = in_rank_order(sources)
        call, found = all_reduce(nbytes, dtype), {}
        for choice in REDUCTIONS:
            if choice is ONE_SHOT_WORDS and nbytes > lab.layout.words.largest:
                continue
            outs = [torch.full_like(source, 77) for source in sources]
            lab.synchronize()
            lab.launch(call, choice, operands(sources, outs))
            lab.synchronize()
            assert lab.errors() == [None] * size, (nbytes, name_of(choice))
            for out in outs:
                assert same_bits(out, outs[0]), (nbytes, name_of(choice))
            assert same_bits(outs[0], expected, any_nan=True), (nbytes, name_of(choice))
            found[name_of(choice)] = outs[0]
        first = next(iter(found.values()))
        assert all(same_bits(first, other) for other in found.values()), nbytes


@pytest.mark.invariant("C1", control=True)
def test_the_reference_notices_another_order(gpu) -> None:
    parts = [torch.tensor([v], dtype=torch.float32, device=gpu.device.torch_device) for v in (1e8, -1e8, 1.0)]
    assert not same_bits(in_rank_order(parts), in_rank_order(parts[::-1]))


@pytest.mark.invariant("C9")
@pytest.mark.parametrize("choice", REDUCTIONS, ids=name_of)
def test_in_place_and_at_an_offset(labs, size: int, choice) -> None:
    lab: Lab = labs(size)
    nbytes = 8192 + 16
    sources = [any_bits(nbytes, torch.bfloat16, lab.device, rank) for rank in range(size)]
    expected = in_rank_order(sources)
    bigger = [torch.zeros(nbytes // 2 + 64, dtype=torch.bfloat16, device=lab.device) for _ in range(size)]
    inside = [one[8 : 8 + nbytes // 2] for one in bigger]
    for inner, source in zip(inside, sources, strict=True):
        inner.copy_(source)
    lab.synchronize()
    for _ in range(2):  # the second round sums the sums, on the other buffer
        lab.launch(all_reduce(nbytes, torch.bfloat16), choice, operands(inside, inside))
    lab.synchronize()
    again = in_rank_order([expected] * size)
    for inner, outer in zip(inside, bigger, strict=True):
        assert same_bits(inner, again, any_nan=True)
        assert not outer[:8].any() and not outer[8 + nbytes // 2 :].any()


@pytest.mark.invariant("C10")
def test_a_misaligned_address_is_refused(labs) -> None:
    lab: Lab = labs(2)
    memory = torch.zeros(64, dtype=torch.bfloat16, device=lab.device)
    with pytest.raises(CollectiveError, match="no multiple of 16"):
        lab.launch(all_reduce(32, torch.bfloat16), ONE_SHOT_WORDS, operands([memory[1:17]] * 2, [memory] * 2))


@pytest.mark.invariant("C10")
def test_what_does_not_fit_is_refused(labs) -> None:
    lab: Lab = labs(2)
    memory = torch.zeros((1 << 20) + 16, dtype=torch.uint8, device=lab.device)
    for choice in (ONE_SHOT_WORDS, ONE_SHOT_SENTINEL, TWO_SHOT, STAGED):
        with pytest.raises(CollectiveError, match="do not fit a box"):
            lab.launch(all_reduce((1 << 21) + 32, torch.bfloat16), choice, operands([memory] * 2, [memory] * 2))
    with pytest.raises(CollectiveError, match="float64"):
        lab.launch(all_reduce(32, torch.float64), ONE_SHOT_WORDS, operands([memory] * 2, [memory] * 2))


MOVES = (ONE_SHOT_WORDS, ONE_SHOT_CHUNKS, STAGED, ONE_SHOT_SENTINEL)


@pytest.mark.invariant("C9")
@pytest.mark.parametrize("choice", MOVES, ids=name_of)
def test_all_gather_keeps_every_bit(labs, size: int, choice) -> None:
    lab: Lab = labs(size)
    dtype = torch.float32 if choice is ONE_SHOT_SENTINEL else torch.uint8
    for nbytes in (0, 4, 12, 1000, 8192, 40000, 65536):
        sources = [any_bits(nbytes, torch.float32, lab.device, rank).view(dtype) for rank in range(size)]
        outs = [torch.full((size * nbytes,), 7, dtype=torch.uint8, device=lab.device) for _ in range(size)]
        call = Call(Kind.ALL_GATHER, nbytes, str(dtype).removeprefix("torch."))
        lab.synchronize()
        lab.launch(call, choice, operands(sources, outs))
        lab.synchronize()
        expected = torch.cat(sources)
        for out in outs:
            found = out.view(dtype)
            assert same_bits(found, outs[0].view(dtype)), nbytes
            assert same_bits(found, expected, any_nan=dtype == torch.float32), nbytes
    assert lab.errors() == [None] * size


@pytest.mark.invariant("C9")
@pytest.mark.parametrize("choice", MOVES, ids=name_of)
def test_broadcasts_in_a_row(labs, size: int, choice) -> None:
    lab: Lab = labs(size)
    dtype = torch.float32 if choice is ONE_SHOT_SENTINEL else torch.uint8
    for nbytes in (8, 20, 4096, 65536):
        rounds = []
        for turn in range(9):  # the root waits for nobody's data: only headers hold it back
            root = turn % size if turn % 3 else 0
            data = any_bits(nbytes, torch.float32, lab.device, turn).view(dtype)
            outs = [torch.full_like(data, 7) for _ in range(size)]
            rounds.append((root, data, outs))
        lab.synchronize()
        for root, data, outs in rounds:
            call = Call(Kind.BROADCAST, nbytes, str(dtype).removeprefix("torch."), root=root)
            lab.launch(call, choice, operands([data if rank == root else outs[rank] for rank in range(size)], outs))
        lab.synchronize()
        for _root, data, outs in rounds:
            assert all(same_bits(out, outs[0]) for out in outs)
            assert same_bits(outs[0], data, any_nan=dtype == torch.float32)
    assert lab.errors() == [None] * size


def test_barriers(labs, size: int) -> None:
    lab: Lab = labs(size)
    empty = [torch.empty(0, dtype=torch.uint8, device=lab.device)] * size
    before = lab.channels[0].epoch()
    for choice in (ONE_SHOT_WORDS, STAGED):
        for _ in range(5):
            lab.launch(Call(Kind.BARRIER, 0, "uint8"), choice, operands(empty, empty))
    lab.synchronize()
    assert [channel.epoch() for channel in lab.channels] == [before + 10] * size


def test_the_epoch_is_the_same_in_every_cell(labs, size: int) -> None:
    lab: Lab = labs(size)
    lab.synchronize()
    cells = [region.tensor[lab.layout.control : lab.layout.control + 2048].view(torch.int32) for region in lab.regions]
    assert all(len(cell.unique()) == 1 for cell in cells)
    assert len({int(cell[0]) for cell in cells}) == 1
    assert cells[0].numel() == 512
