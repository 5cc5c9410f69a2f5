"""A vocabulary in parts: what all ranks choose together is what one rank chooses of the whole."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from halma.ops import rows as _rows  # noqa: F401  (defines embed)
from halma.ops import sampling as _sampling  # noqa: F401
from halma.ops import vocabulary as _family  # noqa: F401
from halma.ops.weight import Weight
from tests.cpu.ops.checks import check_contract, poisoned, run, same_bits

CARRIERS = (torch.float32, torch.float64, torch.bfloat16)
WORLDS = (2, 4, 8)


def best(logits: torch.Tensor, world: int) -> torch.Tensor:
    parts = logits.chunk(world, 1)
    width = parts[0].shape[1]
    own = [run("own_best", part.contiguous(), rank * width) for rank, part in enumerate(parts)]
    return run("best_of_all", torch.stack(own), logits.shape[1])


@pytest.mark.invariant("M11")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", CARRIERS)
def test_the_sum_of_all_parts_is_the_embedding_to_the_bit(dtype: torch.dtype, world: int) -> None:
    table = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.tensor([3, 0, 23, 3, 12, 11])
    width = 24 // world
    parts = [
        run("embed", tokens, Weight(table[rank * width : (rank + 1) * width].contiguous()), rank * width)
        for rank in range(world)
    ]
    assert same_bits(sum(parts[1:], parts[0]), table[tokens])
    assert all(int((part != 0).any(1).sum()) < len(tokens) for part in parts)


def test_a_token_outside_every_table_reads_none() -> None:
    """A failed exchange may leave any number as a token; it must not become an address."""
    tokens = torch.tensor([-1, 99, -(2**63), 2**62])
    assert not run("embed", tokens, Weight(torch.ones(6, 8)), 6).any()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_ranks_choose_what_one_would(dtype: torch.dtype, world: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 200, generator=generator, dtype=dtype)
    logits[0, [199, 17, 40]] = 50.0
    logits[1] = 0.0
    logits[2, 100:] = logits[2, :100]  # equal on several ranks
    logits[3] = -torch.inf
    logits[4, 150] = torch.inf
    assert torch.equal(best(logits, world), run("argmax_tokens", logits))
    assert best(logits, world)[:2].tolist() == [17, 0]


def test_real_rows_do_not_change_beside_rows_of_nan() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    expected = best(logits, 4)[:3]
    logits[3:] = poisoned((3, 200), torch.float32)
    found = best(logits, 4)
    assert torch.equal(found[:3], expected) and 0 <= int(found.min()) <= int(found.max()) < 200


@pytest.mark.parametrize("payload", [float("nan"), float("inf"), -1e30])
def test_a_choice_out_of_a_failed_exchange_is_still_a_token(payload: float) -> None:
    found = run("best_of_all", torch.full((4, 3, 2), payload), 200)
    assert 0 <= int(found.min()) <= int(found.max()) < 200


def test_the_last_token_of_a_large_vocabulary_keeps_its_number() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 63] = 1.0
    first = (1 << 24) - 64
    assert run("best_of_all", run("own_best", logits, first).unsqueeze(0), 1 << 24).tolist() == [(1 << 24) - 1]


@pytest.mark.parametrize(
    ("dtype", "first"), [(torch.float32, (1 << 24) - 63), (torch.bfloat16, 0), (torch.int64, 0)], ids=str
)
def test_ids_that_would_be_rounded_are_refused(dtype: torch.dtype, first: int) -> None:
    with pytest.raises(DispatchError, match="would not be exact"):
        run("own_best", torch.zeros(2, 64, dtype=dtype), first)


@pytest.mark.parametrize("world", WORLDS)
def test_columns_are_joined_in_the_order_of_the_ranks(world: int) -> None:
    whole = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    assert same_bits(run("join_columns", torch.stack(whole.chunk(world, 1))), whole)


@pytest.mark.parametrize("count", [1, 3])
def test_contracts(count: int) -> None:
    logits = torch.randn(count, 40, generator=torch.Generator().manual_seed(4))
    tokens, table = torch.arange(count), torch.randn(5, 8)
    assert check_contract("own_best", lambda: (logits.clone(), 40)) <= 5
    assert check_contract("best_of_all", lambda: (torch.zeros(4, count, 2), 40)) <= 7
    assert check_contract("join_columns", lambda: (torch.zeros(4, count, 10),)) == 1
    assert check_contract("embed", lambda: (tokens.clone(), Weight(table), 2)) <= 7
