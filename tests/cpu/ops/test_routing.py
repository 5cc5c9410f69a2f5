"""Scores, selection and table lookup of experts."""

from __future__ import annotations

import pytest
import torch

from halma.ops import routing as _family  # noqa: F401  (defines the ops)
from halma.ops.weight import Weight
from tests.cpu.ops.checks import check_contract, fresh_ops, poisoned, rows_are_invariant, run, same_bits

CARRIERS = (torch.float32, torch.float64, torch.bfloat16)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gate(experts: int, width: int, dtype: torch.dtype = torch.float32) -> Weight:
    return Weight(rows(experts, width, seed=1, dtype=dtype))


def accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("count", [1, 4, 19])
def test_scores_are_the_root_of_softplus(count: int, dtype: torch.dtype) -> None:
    x, w = rows(count, 40, dtype=dtype), gate(11, 40, dtype)
    found = run("route_scores", x, w)
    expected = torch.nn.functional.softplus(x.double() @ w.data.double().t(), threshold=1e9).sqrt()
    assert found.dtype is accumulated(dtype)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5 if dtype is not torch.float64 else 1e-12, atol=1e-6)


def test_scores_at_the_ends_of_the_range() -> None:
    w = Weight(torch.eye(8))
    x = torch.tensor([[0.0, -200.0, -80.0, -1.0, 1.0, 20.0, 90.0, 3e38]])
    found = run("route_scores", x, w)[0]
    expected = torch.nn.functional.softplus(x[0].double(), threshold=1e9).sqrt()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)
    assert found.isfinite().all() and found[1] == 0


def test_an_expert_with_a_tiny_score_keeps_its_leading_digits() -> None:
    x = torch.full((1, 1), -40.0)
    assert run("route_scores", x, Weight(torch.ones(1, 1))).item() == pytest.approx(2.0611536e-09, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("experts", "k"), [(16, 4), (7, 1), (256, 6), (5, 5)])
def test_selection_follows_the_biased_and_weights_the_unbiased_scores(experts: int, k: int, dtype: torch.dtype) -> None:
    scores, bias = rows(9, experts, dtype=dtype).abs(), rows(experts, seed=2)
    ids, weights = run("select_experts", scores, bias, k, 2.5)
    for row in range(9):
        biased = [float(v) for v in scores[row] + bias]
        best = sorted(range(experts), key=lambda e: (-biased[e], e))[:k]
        assert ids[row].tolist() == best
        chosen = scores[row][best].double()
        torch.testing.assert_close(weights[row].double(), chosen / chosen.sum() * 2.5, rtol=1e-6, atol=0)
    assert weights.dtype is dtype


def test_ties_go_to_the_lower_expert() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 5.0]])
    ids, _ = run("select_experts", scores, torch.zeros(5), 3, 1.0)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [4, 0, 1]]


def test_scores_that_all_underflowed_give_finite_weights() -> None:
    _, weights = run("select_experts", torch.zeros(1, 4), torch.zeros(4), 2, 1.5)
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_table_gives_the_experts_of_each_token() -> None:
    scores = rows(5, 8).abs()
    table = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:3] for i in range(20)])
    tokens = torch.tensor([19, 0, 0, 7, 3])
    ids, weights = run("lookup_experts", scores, table, tokens, 1.5)
    assert torch.equal(ids, table[tokens])
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 1.5)


def test_poisoned_rows_choose_experts_within_range() -> None:
    scores = torch.cat([rows(2, 16).abs(), poisoned((3, 16), torch.float32), torch.full((2, 16), float("nan"))])
    ids, _ = run("select_experts", scores, rows(16, seed=2), 4, 1.0)
    assert ids.min() >= 0 and ids.max() < 16
    alone, _ = run("select_experts", scores[:2], rows(16, seed=2), 4, 1.0)
    assert torch.equal(ids[:2], alone)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("experts", [16, 7, 13])
@pytest.mark.parametrize("dtype", CARRIERS)
def test_routing_of_a_row_does_not_depend_on_its_neighbours(experts: int, dtype: torch.dtype) -> None:
    w, bias = gate(experts, 48, dtype), rows(experts, seed=2)

    def route(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops = fresh_ops()
        scores = ops.route_scores(x, w)
        ids, weights = ops.select_experts(scores, bias, 3, 1.5)
        return scores.clone(), ids.clone(), weights.clone()

    rows_are_invariant(route, rows(64, 48, dtype=dtype))


@pytest.mark.invariant("K7", control=True)
def test_the_library_softplus_does_depend_on_the_place_so_the_check_can_see_it() -> None:
    x = rows(64, 7, seed=3)
    together = torch.nn.functional.softplus(x)
    alone = torch.cat([torch.nn.functional.softplus(row) for row in x.split(1)])
    if same_bits(together, alone):
        pytest.skip("this build's softplus is the same everywhere")
    with pytest.raises(AssertionError, match="other bits"):
        rows_are_invariant(torch.nn.functional.softplus, x, poison=False)


@pytest.mark.parametrize("count", [1, 5])
def test_contracts(count: int) -> None:
    scores, bias = rows(count, 16).abs(), rows(16, seed=2)
    table = torch.arange(40).view(10, 4) % 16
    assert check_contract("route_scores", lambda: (rows(count, 32), gate(16, 32))) <= 24
    assert check_contract("select_experts", lambda: (scores.clone(), bias, 4, 1.5)) <= 12
    assert check_contract("lookup_experts", lambda: (scores.clone(), table, torch.arange(count), 1.5)) <= 8
