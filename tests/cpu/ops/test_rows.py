"""Rows of a step, embedding, streams and last rows."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from halma.ops import rows as _family  # noqa: F401  (defines the ops)
from halma.ops.weight import Weight
from tests.cpu.ops.checks import check_contract, poisoned, run, same_bits
from tests.cpu.ops.test_weight import fp8_weight

CARRIERS = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_step_rows_number_the_tokens_and_null_the_padding(length: int) -> None:
    start, slot = torch.tensor([7, 0, 1_000_000, 3]), torch.tensor([2, 1, 4, 9])
    count = torch.tensor([length, max(length - 1, 0), 1, 0])
    tokens = torch.arange(100, 100 + 4 * length).view(4, length)
    real = torch.arange(length) < count.unsqueeze(1)
    tokens[~real] = -(2**62)  # padding holds anything
    found = run("step_rows", tokens, start, count, slot)
    expected: list[tuple[int, int, int]] = []
    for r in range(4):
        for j in range(length):
            row = (int(tokens[r, j]), int(start[r]) + j, int(slot[r]))
            expected.append(row if j < count[r] else (0, 0, 0))
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected
    check_contract("step_rows", lambda: (tokens.clone(), start.clone(), count.clone(), slot.clone()))


@pytest.mark.parametrize("dtype", CARRIERS)
def test_embed_takes_rows_and_streams_repeat_them(dtype: torch.dtype) -> None:
    table = torch.randn(11, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.tensor([3, 0, 10, 3])
    x = run("embed", tokens, Weight(table))
    assert same_bits(x, table[tokens])
    streams = run("expand_streams", x, 4)
    assert streams.shape == (4, 4, 24)
    assert all(same_bits(streams[:, j].contiguous(), x) for j in range(4))
    assert check_contract("embed", lambda: (tokens.clone(), Weight(table))) == 1
    assert check_contract("expand_streams", lambda: (x.clone(), 4)) == 1


def test_a_quantised_embedding_is_refused() -> None:
    with pytest.raises(DispatchError, match="stored plain"):
        run("embed", torch.zeros(1, dtype=torch.int64), fp8_weight(4, 8))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("tail", [(8,), (4, 8)])
def test_last_rows_take_the_last_real_token(length: int, tail: tuple[int, ...]) -> None:
    count = torch.tensor([length, 1, max(length - 1, 0), 0])
    x = torch.randn(4 * length, *tail, generator=torch.Generator().manual_seed(0))
    index = [r * length + max(int(c) - 1, 0) for r, c in enumerate(count)]
    for row in set(range(4 * length)) - set(index):
        x[row] = poisoned(tail, torch.float32)
    assert same_bits(run("last_rows", x, count, length), x[index])
    check_contract("last_rows", lambda: (x.clone(), count.clone(), length))
