"""Greedy choice, seeded sampling, and committing a token."""

from __future__ import annotations

import pytest
import torch

from halma.hal.workspace import Workspace
from halma.ops import sampling
from tests.cpu.ops.checks import check_contract, poisoned, run, same_bits


def logits_of(count: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw(
    logits: torch.Tensor,
    temperature: float | list[float] = 1.0,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 0,
    position: int | list[int] = 0,
) -> torch.Tensor:
    def each(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * len(logits), dtype=dtype)

    return run(
        "sample_tokens",
        logits,
        each(temperature, torch.float32),
        each(top_p, torch.float32),
        each(seed, torch.int64),
        each(position, torch.int64),
    )


# -- greedy ---------------------------------------------------------------------------------------------


def test_argmax_takes_the_lower_token_of_equals() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0], [5.0, 5.0, 5.0], [-3.0, -2.0, -1.0]])
    assert run("argmax_tokens", logits).tolist() == [1, 0, 2]
    wide = torch.zeros(2, 129280)
    wide[:, [777, 100_000]] = 1.0
    assert run("argmax_tokens", wide).tolist() == [777, 777]


def test_temperature_zero_is_greedy_ties_included() -> None:
    logits = logits_of(6, 300)
    logits[0, [299, 17, 40]] = 50.0
    logits[1] = 0.0
    for seed in range(5):
        assert torch.equal(draw(logits, temperature=0.0, seed=seed), run("argmax_tokens", logits))
    assert draw(logits, temperature=0.0)[:2].tolist() == [17, 0]


def test_a_tiny_temperature_is_greedy_too() -> None:
    logits = logits_of(4, 100)
    assert torch.equal(draw(logits, temperature=1e-30), logits.argmax(1))


# -- distribution ---------------------------------------------------------------------------------------


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic over cells that expect at least 5 draws, the rest pooled; and its degrees of freedom."""
    expected = probabilities * counts.sum()
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum().view(1)])
    wanted = torch.cat([expected[large], expected[~large].sum().view(1)])
    keep = wanted > 0
    return float(((observed - wanted) ** 2 / wanted)[keep].sum()), int(keep.sum()) - 1


def acceptable(statistic: float, freedom: int) -> bool:
    """Below the 99.9 % point of chi-square, by Wilson and Hilferty's approximation."""
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def frequencies(logits: torch.Tensor, draws: int, temperature: float, top_p: float, vary: str) -> torch.Tensor:
    """How often each token is drawn from one row of logits, over many seeds or many positions."""
    counter = list(range(draws))
    more = {"seed": counter, "position": 5} if vary == "seed" else {"seed": 5, "position": counter}
    tokens = draw(logits.expand(draws, -1).contiguous(), temperature, top_p, **more)
    return torch.bincount(tokens, minlength=logits.shape[1]).double()


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_softmax(temperature: float, vary: str) -> None:
    logits = logits_of(1, 40)
    counts = frequencies(logits, 20_000, temperature, 1.0, vary)
    probabilities = torch.softmax(logits[0].double() / temperature, 0)
    assert acceptable(*chi_square(counts, probabilities))
    wrong = torch.softmax(logits[0].double() / (temperature * 1.1), 0)
    assert not acceptable(*chi_square(counts, wrong)), "the test must tell a temperature from 1.1 times it"


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_draws_stay_in_the_nucleus_and_follow_it(top_p: float) -> None:
    logits = logits_of(1, 40)
    probabilities, order = torch.softmax(logits[0].double(), 0).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    kept = torch.zeros(40, dtype=torch.float64)
    kept[order[:size]] = probabilities[:size] / probabilities[:size].sum()
    counts = frequencies(logits, 8000, 1.0, top_p, "seed")
    assert counts[kept == 0].sum() == 0
    assert acceptable(*chi_square(counts, kept))
    assert (counts[order[:size]] > 0).all()


def test_a_small_top_p_leaves_the_best_token() -> None:
    logits = logits_of(50, 64)
    assert torch.equal(draw(logits, top_p=1e-6, seed=list(range(50))), logits.argmax(1))


def test_one_seed_gives_independent_tokens_at_successive_positions() -> None:
    """Pairs of successive draws fill the square evenly."""
    tokens = draw(torch.zeros(9000, 8), seed=3, position=list(range(9000)))
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64).double()
    assert acceptable(*chi_square(pairs, torch.full((64,), 1 / 64, dtype=torch.float64)))


def test_neighbouring_seeds_give_unrelated_tokens() -> None:
    first = draw(torch.zeros(9000, 8), seed=11, position=list(range(9000)))
    second = draw(torch.zeros(9000, 8), seed=12, position=list(range(9000)))
    pairs = torch.bincount(first * 8 + second, minlength=64).double()
    assert acceptable(*chi_square(pairs, torch.full((64,), 1 / 64, dtype=torch.float64)))


def test_excluded_and_hopeless_tokens_are_never_drawn() -> None:
    logits = torch.zeros(3000, 6)
    logits[:, 1] = float("-inf")
    logits[:, 2] = -1e30
    drawn = draw(logits, seed=list(range(3000)))
    assert set(drawn.tolist()) == {0, 3, 4, 5}


# -- reproducibility ------------------------------------------------------------------------------------


@pytest.mark.invariant("M10")
@pytest.mark.parametrize("vocabulary", [1000, 1027])
def test_a_request_draws_the_same_token_in_any_batch_and_row(vocabulary: int) -> None:
    count = 17
    logits = logits_of(count, vocabulary)
    heat, cut = [0.1 * i for i in range(count)], [1 - 0.05 * i for i in range(count)]
    seeds, places = [7 * i + 1 for i in range(count)], [13 * i for i in range(count)]
    together = draw(logits, heat, cut, seeds, places)
    for i in range(count):
        assert draw(logits[i : i + 1], heat[i], cut[i], seeds[i], places[i])[0] == together[i]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()

    def moved(values: list[float]) -> list[float]:
        return [values[i] for i in order]

    shuffled = draw(logits[order], moved(heat), moved(cut), moved(seeds), moved(places))  # type: ignore[arg-type]
    assert torch.equal(shuffled, together[order])


@pytest.mark.invariant("M10", control=True)
def test_other_seeds_and_other_positions_draw_other_tokens() -> None:
    flat = torch.zeros(64, 5000)
    by_seed = draw(flat, seed=list(range(64)))
    by_position = draw(flat, position=list(range(64)))
    assert len(set(by_seed.tolist())) > 60
    assert len(set(by_position.tolist())) > 60
    assert not torch.equal(by_seed[1:], by_position[1:])


def test_the_seed_zero_at_the_position_zero_is_as_good_as_any() -> None:
    """The mixer maps 0 to 0, whose noise would be the largest of all: token 0, always."""
    assert draw(torch.zeros(1, 1000), seed=0, position=0).item() != 0


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_is_a_seed(seed: int) -> None:
    tokens = draw(torch.zeros(40, 1000), seed=seed, position=list(range(40)))
    assert len(set(tokens.tolist())) > 30


def test_poisoned_rows_stay_in_range_and_change_nothing() -> None:
    logits = logits_of(6, 50)
    clean = draw(logits, seed=4)
    for bad in (poisoned((3, 50), torch.float32), torch.full((3, 50), float("nan"))):
        mixed = torch.cat([logits[:3], bad])
        heat, cut = [1.0, 1.0, 1.0, float("nan"), 0.0, 1.0], [1.0, 1.0, 1.0, float("nan"), 0.5, 1.0]
        tokens = draw(mixed, heat, cut, seed=4)
        assert torch.equal(tokens[:3], clean[:3])
        assert tokens.min() >= 0 and tokens.max() < 50
        greedy = run("argmax_tokens", mixed)
        assert greedy.min() >= 0 and greedy.max() < 50


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_carriers(dtype: torch.dtype) -> None:
    logits = logits_of(5, 60).to(torch.bfloat16)
    assert torch.equal(draw(logits.to(dtype), seed=2), draw(logits.float(), seed=2))


def test_the_noise_is_finite_and_falls_at_both_ends_of_its_range() -> None:
    words = torch.tensor([0, 1, 2**16, 2**31, 2**32 - 200, 2**32 - 1])
    noise = torch.empty(6)
    sampling._gumbel_of(words, noise)
    assert noise.isfinite().all()
    assert (noise[1:] <= noise[:-1]).all() and noise[0] > 22 and noise[-1] < -2.5
    exact = -torch.log(-torch.log1p(-(words[:4].double() + 0.5) / 2**32))
    torch.testing.assert_close(noise[:4].double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 3), (1.0 - 2.0**-20, 1)])
def test_all_means_all_where_the_sum_of_probabilities_rounds(top_p: float, kept: int) -> None:
    scores = torch.tensor([[0.0, -25.0, -26.0]])
    sampling._cut_to_nucleus(scores, torch.tensor([top_p]), Workspace())
    assert int(scores.isfinite().sum()) == kept


def test_a_vocabulary_of_one() -> None:
    assert draw(torch.zeros(2, 1)).tolist() == [0, 0]


def test_the_next_position_follows_the_tokens_that_were_fed() -> None:
    assert run("next_position", torch.tensor([5, 0]), torch.tensor([3, 1])).tolist() == [8, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_contracts(count: int) -> None:
    logits, i64 = logits_of(count, 40), torch.arange(count)
    heat, cut = torch.full((count,), 0.8), torch.full((count,), 0.9)
    assert check_contract("argmax_tokens", lambda: (logits.clone(),)) <= 1
    assert check_contract("next_position", lambda: (i64, i64)) <= 1
    assert check_contract("sample_tokens", lambda: (logits.clone(), heat, cut, i64, i64)) <= 64
    again = [draw(logits, 0.8, 0.9, 3, 1) for _ in range(2)]
    assert same_bits(*again)
