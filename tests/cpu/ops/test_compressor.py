"""Pooling of blocks: against the direct formula, in chunks of any size, and after rejected tokens."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError, ModelError
from halma.ops.compressor import CompressorState
from tests.cpu.ops.checks import bits, check_contract, poisoned, rows_are_invariant, run, same_bits
from tests.cpu.ops.stores import again, normal

KINDS = [(4, True), (6, False), (16, False), (3, True)]
"""Ratio and overlap."""

LENGTH, WIDTH = 70, 20


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Tokens:
    """What every token of one request leaves, and what its blocks should be."""

    def __init__(self, ratio: int, overlap: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.ratio, self.overlap, self.dtype = ratio, overlap, dtype
        width = WIDTH * (2 if overlap else 1)
        self.values = normal(LENGTH, width, seed=seed, dtype=dtype)
        self.gates = normal(LENGTH, width, seed=seed + 1, dtype=dtype, scale=3.0)
        self.ape = normal(ratio, width, seed=seed + 2, dtype=dtype)

    def block(self, w: int) -> torch.Tensor:
        """Block w in fp64, written down directly."""
        pairs = []
        for token in range(w * self.ratio, (w + 1) * self.ratio):
            gate = self.gates[token].double() + self.ape[token % self.ratio].double()
            pairs.append((self.values[token].double()[-WIDTH:], gate[-WIDTH:]))
        if self.overlap and w:
            for token in range((w - 1) * self.ratio, w * self.ratio):
                gate = self.gates[token].double() + self.ape[token % self.ratio].double()
                pairs.append((self.values[token].double()[:WIDTH], gate[:WIDTH]))
        values, gates = (torch.stack(part) for part in zip(*pairs, strict=True))
        return (torch.softmax(gates, 0) * values).sum(0)


def fresh_state(tokens: Tokens, most: int, slots: int = 2) -> CompressorState:
    """A state in which nothing was written: poison."""
    ring = tokens.ratio * (2 if tokens.overlap else 1) + most
    shape = (slots + 1, ring, tokens.values.shape[1])
    return CompressorState(poisoned(shape, tokens.dtype), poisoned(shape, tokens.dtype))


def feed(
    tokens: Tokens, state: CompressorState, start: int, count: int, length: int, slot: int = 2
) -> dict[int, torch.Tensor]:
    """One step of ``length`` rows, ``count`` of them real, and padding that holds poison. Returns its blocks."""
    real = torch.arange(length) < count
    where = (start + torch.arange(length)).clamp_max(LENGTH - 1)
    values, gates = tokens.values[where].clone(), tokens.gates[where].clone()
    values[~real], gates[~real] = float("nan"), float("inf")
    positions, row_slot = torch.where(real, start + torch.arange(length), 0), torch.where(real, slot, 0)
    again("compressor_insert", values, gates, tokens.ape, positions, row_slot, state)
    pooled, block = again(
        "compressor_pool",
        state,
        numbers(start),
        numbers(count),
        numbers(slot),
        tokens.ratio,
        tokens.overlap,
        length,
        tokens.dtype,
    )
    assert block.shape == (-(-length // tokens.ratio),)
    return {w: row for w, row in zip(block.tolist(), pooled, strict=True) if w >= 0}


def feed_all(tokens: Tokens, chunk: int, padded: int = 0, end: int = LENGTH) -> dict[int, torch.Tensor]:
    state, found = fresh_state(tokens, chunk + padded), {}
    for start in range(0, end, chunk):
        new = feed(tokens, state, start, min(chunk, end - start), chunk + padded)
        assert not set(new) & set(found)
        found |= new
    return found


@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_are_the_direct_formula(ratio: int, overlap: bool, dtype: torch.dtype) -> None:
    tokens = Tokens(ratio, overlap, dtype)
    found = feed_all(tokens, 1)
    assert sorted(found) == list(range(LENGTH // ratio))
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for w, row in found.items():
        torch.testing.assert_close(row.double(), tokens.block(w), rtol=tolerance, atol=tolerance)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
def test_chunks_of_any_size_give_the_same_bits(ratio: int, overlap: bool) -> None:
    tokens = Tokens(ratio, overlap)
    alone = feed_all(tokens, 1)
    for chunk, padded in ((5, 0), (7, 0), (64, 0), (5, 3), (1, 4)):
        found = feed_all(tokens, chunk, padded)
        assert sorted(found) == sorted(alone)
        for w in alone:
            assert same_bits(found[w], alone[w]), f"block {w} in chunks of {chunk}"


def test_the_first_block_has_no_previous_one() -> None:
    tokens = Tokens(4, True)
    other = Tokens(4, True)
    other.values[:4, :WIDTH], other.gates[:4, :WIDTH] = 1e30, 1e30  # first halves: for block 1 only
    assert same_bits(feed_all(tokens, 1, end=4)[0], feed_all(other, 1, end=4)[0])
    assert not same_bits(feed_all(tokens, 1, end=8)[1], feed_all(other, 1, end=8)[1])


@pytest.mark.invariant("M3")
@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
@pytest.mark.parametrize("width", [2, 5, 9])
def test_rejected_tokens_leave_no_trace(ratio: int, overlap: bool, width: int) -> None:
    tokens, wrong = Tokens(ratio, overlap), Tokens(ratio, overlap, seed=50)
    wrong.ape = tokens.ape
    wrong.values.mul_(1e20)
    expected = feed_all(tokens, 1)
    state, found, start, step = fresh_state(tokens, width), {}, 0, 0
    while start + width <= LENGTH:
        accepted = 1 + step * 7 % width
        guess = Tokens(ratio, overlap)
        guess.values[start + accepted :] = wrong.values[start + accepted :]
        guess.gates[start + accepted :] = wrong.gates[start + accepted :]
        new = feed(guess, state, start, width, width)
        # A block that holds a rejected token is written again once the right ones are there.
        found |= {w: row for w, row in new.items() if (w + 1) * ratio <= start + accepted}
        start, step = start + accepted, step + 1
    assert step > 5
    for w in range(start // ratio):
        assert same_bits(found[w], expected[w]), f"block {w}"


@pytest.mark.invariant("M3", control=True)
def test_a_token_that_stays_wrong_is_seen_in_its_block() -> None:
    tokens, wrong = Tokens(4, True), Tokens(4, True)
    wrong.values[5] += 1.0
    a, b = feed_all(tokens, 5), feed_all(wrong, 5)
    assert [w for w in a if not same_bits(a[w], b[w])] == [1, 2]


def test_a_ring_of_the_least_size_is_enough_and_a_smaller_one_is_refused() -> None:
    tokens = Tokens(4, True)
    for ring, fits in ((12, True), (11, False)):
        state = CompressorState(*(torch.zeros(2, ring, 2 * WIDTH) for _ in range(2)))
        arguments = (state, numbers(0), numbers(5), numbers(1), 4, True, 5, torch.float32)
        if fits:
            run("compressor_pool", *arguments)
            found = {}
            for start in range(0, LENGTH, 5):
                found |= feed(tokens, state, start, 5, 5, slot=1)
            torch.testing.assert_close(found[9].double(), tokens.block(9), rtol=2e-6, atol=2e-6)
        else:
            with pytest.raises(DispatchError, match="too small"):
                run("compressor_pool", *arguments)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False)])
def test_a_request_does_not_see_its_neighbours(ratio: int, overlap: bool) -> None:
    tokens = Tokens(ratio, overlap)
    state = fresh_state(tokens, 8, slots=64)
    start = ratio * 2 - 3 + torch.arange(64) % 5
    for slot in range(1, 65):
        before = torch.arange(int(start[slot - 1]) + 8)
        values = tokens.values[before] * (1 + slot / 64)
        for first in range(0, len(before), 8):
            part = before[first : first + 8]
            at = torch.full_like(part, slot)
            again("compressor_insert", values[part], tokens.gates[part], tokens.ape, part, at, state)

    def call(start: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        count = torch.full_like(start, 8)
        pooled, block = again("compressor_pool", state, start, count, slot, ratio, overlap, 8, torch.float32)
        nb = -(-8 // ratio)
        pooled = pooled.masked_fill(block.unsqueeze(1) < 0, 0.0)
        return torch.cat((pooled.view(-1, nb * WIDTH), block.view(-1, nb).float()), 1)

    assert bool((call(start, torch.arange(1, 65))[:, -1] >= 0).any())
    rows_are_invariant(call, start, torch.arange(1, 65))


def test_bf16_rows_are_rounded_once() -> None:
    tokens = Tokens(4, True)
    state = fresh_state(tokens, 8)
    feed(tokens, state, 0, 8, 8)
    arguments = (state, numbers(0), numbers(8), numbers(2), 4, True, 8)
    wide, _ = run("compressor_pool", *arguments, torch.float32)
    assert same_bits(run("compressor_pool", *arguments, torch.bfloat16)[0], wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
def test_contracts(ratio: int, overlap: bool, dtype: torch.dtype) -> None:
    tokens = Tokens(ratio, overlap, dtype)
    state = fresh_state(tokens, 6)
    feed(tokens, state, 0, 6, 6)
    rows = (tokens.values[:3], tokens.gates[:3], tokens.ape, numbers(6, 7, 0), numbers(1, 1, 0))
    check_contract("compressor_insert", lambda: (*(t.clone() for t in rows), state))
    pool = state, numbers(3, 0), numbers(3, 0), numbers(2, 0), ratio, overlap, 3, dtype
    assert check_contract("compressor_pool", lambda: pool) <= 24
    check_contract("block_positions", lambda: (numbers(3, -1, 0), ratio))


def test_a_strided_half_of_a_product_can_be_inserted() -> None:
    tokens = Tokens(4, True)
    both = torch.cat((tokens.values, tokens.gates), 1)[:3]
    a, b = fresh_state(tokens, 6), fresh_state(tokens, 6)
    rest = tokens.ape, torch.arange(3), numbers(1, 1, 1)
    run("compressor_insert", both[:, : 2 * WIDTH], both[:, 2 * WIDTH :], *rest, a)
    run("compressor_insert", tokens.values[:3], tokens.gates[:3], *rest, b)
    assert torch.equal(bits(a.values), bits(b.values)) and torch.equal(bits(a.gates), bits(b.gates))


def test_blocks_stand_at_their_first_token() -> None:
    assert run("block_positions", numbers(0, 3, -1, 70), 4).tolist() == [0, 12, 0, 280]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="do not fit one another"):
        CompressorState(torch.zeros(2, 8, 4), torch.zeros(2, 8, 5))
    with pytest.raises(ModelError, match="bfloat16"):
        CompressorState(*(torch.zeros(2, 8, 4, dtype=torch.bfloat16) for _ in range(2)))
    state = CompressorState(torch.zeros(2, 8, 4), torch.zeros(2, 8, 4))
    with pytest.raises(DispatchError, match="widths differ"):
        run("compressor_insert", normal(1, 4), normal(1, 4), normal(4, 8), numbers(0), numbers(1), state)
