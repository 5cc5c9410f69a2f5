"""Drawn tokens under MTP: their distribution is the model's own, and the same seed gives the same tokens.

Drafts are drawn with the noise of their seed and position, as the model's own tokens are, and kept where both drew
one token. So nothing of the distribution is left to chance; the price is how often that happens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import torch

import halma
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper, Text, occupy
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from tests.cpu.model.mtp import TINY, again, plain, runner, texts
from tests.cpu.ops.test_sampling import chi_square

VOCABULARY, LENGTH, PROMPT = 6, 3, (5, 2, 0, 3)
HEAT, TOP_P = 1.2, 0.95
REQUESTS, DRAFTS = 64, 2


@functools.cache
def served() -> V4Runner:
    """The least model there is: one layer, six tokens."""
    config = small_config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_hash_layers=0,
        compress_ratios=(0, 0),
        quantised=False,
        expert_dtype="plain",
    )
    loaded = load_source(config, SyntheticSource(config, seed=5), LoadOptions())
    options = RunnerOptions(max_requests=REQUESTS, max_context=64, batches=(), chunk=8, mtp=DRAFTS)
    made = V4Runner(loaded.config, loaded.weights, halma.backend("cpu"), options)
    every = Descriptor("prefill", VOCABULARY**2, 8, made.capacities[0], "all")
    made.prepare([*made.descriptors(("sample",)), every])
    return made


def exact() -> torch.Tensor:
    """Probabilities of the three tokens behind the prompt, float64 [V, V, V], from the model's own logits."""
    runner, count = served(), VOCABULARY**2
    occupy(runner, REQUESTS)
    pairs = [[*PROMPT, a, b, 0, 0] for a in range(VOCABULARY) for b in range(VOCABULARY)]
    fed = torch.tensor(pairs)
    runner.inputs.fill(range(1, count + 1), [len(PROMPT) + 2] * count, tokens=fed)
    _, logits = runner.step(Descriptor("prefill", count, 8, runner.capacities[0], "all"))
    found = logits.view(VOCABULARY, VOCABULARY, 8, VOCABULARY)[:, :, len(PROMPT) - 1 : len(PROMPT) + 2]
    first, second, third = (nucleus(found[..., place, :]) for place in range(LENGTH))
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    """Logits [.., V] -> probabilities at HEAT, cut to the fewest most probable tokens that reach TOP_P."""
    shares, order = torch.softmax(logits.double() / HEAT, -1).sort(-1, descending=True)
    before = shares.cumsum(-1) - shares
    kept = shares.masked_fill(before >= TOP_P, 0.0)
    return torch.zeros_like(shares).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def chains(count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Three drawn tokens behind the prompt and what each step accepted, of the seeds 0, 1, ...

    The prompt is fed once: before each draw the requests are cut back to all of it but the last token.
    """
    runner = served()
    given = [Text(PROMPT, 16, temperature=HEAT, top_p=TOP_P) for _ in range(REQUESTS)]
    stepper = Stepper(runner, given)
    stepper.prefill()
    state = runner.model.state
    assert state.draft is not None
    for first in range(0, count, REQUESTS):
        state.lengths[1:] = len(PROMPT) - 1
        state.last_token[1:] = PROMPT[-1]
        state.draft.tokens.fill_(-1)
        for number, text in enumerate(given):
            text.seed, text.tokens, text.accepted, text.max_tokens = first + number, [], [], 16
        while any(len(text.tokens) < LENGTH for text in given):
            stepper.step(DRAFTS)
            for text in given:
                text.max_tokens = 16 if len(text.tokens) < LENGTH else len(text.tokens)
        yield from ((text.tokens[:LENGTH], text.accepted) for text in given)


def fits(counts: torch.Tensor, shares: torch.Tensor) -> bool:
    """p > 0.01: below the 99 % point of chi-square, by Wilson and Hilferty's approximation."""
    statistic, freedom = chi_square(counts, shares)
    return statistic < freedom * (1 - 2 / (9 * freedom) + 2.326 * (2 / (9 * freedom)) ** 0.5) ** 3


def check_distribution(count: int) -> None:
    expected = exact().flatten()
    seen = torch.zeros(VOCABULARY**LENGTH, dtype=torch.float64)
    drafted = accepted = 0
    for tokens, runs in chains(count):
        seen[tokens[0] * VOCABULARY**2 + tokens[1] * VOCABULARY + tokens[2]] += 1
        drafted += DRAFTS * (len(runs) - 1)  # the first step has none yet
        accepted += sum(runs)
    assert seen[expected == 0].sum() == 0, "nothing outside the nucleus"
    assert fits(seen, expected)
    # Drawn with noise of their own, drafts of these two models agree with the target's tokens one time in ten.
    assert 0.3 < accepted / drafted < 0.95, "drafts are drawn with the target's noise"


@pytest.mark.invariant("M10")
def test_the_distribution_is_that_of_plain_sampling():
    check_distribution(1024)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_distribution_of_two_hundred_thousand_draws_is_that_of_plain_sampling():
    check_distribution(math.ceil(200_000 / LENGTH))


def test_the_comparison_can_see_another_distribution():
    """The expected shares of a slightly hotter model do not fit 200,000 draws of this one."""
    shares = exact().flatten()
    draws = torch.multinomial(shares, 200_000, replacement=True, generator=torch.Generator().manual_seed(1))
    seen, hotter = torch.bincount(draws, minlength=len(shares)).double(), shares**0.97
    assert fits(seen, shares) and not fits(seen, hotter / hotter.sum())


@pytest.mark.invariant("M10")
def test_a_seed_gives_the_same_text_with_any_number_of_drafts_in_any_batch():
    drafts = 5
    given = texts(TINY, (3, 9, 1), 12, heat=1.0)
    crowd = Stepper(runner(TINY, max_requests=3, mtp=drafts, graph=False), again(given)).run(drafts)
    alone = Stepper(runner(TINY, max_requests=1, mtp=drafts, graph=False), again(given[:1])).run(drafts)
    assert [text.tokens for text in crowd] == [plain(TINY, text) for text in given]
    assert alone[0].tokens == crowd[0].tokens and alone[0].accepted == crowd[0].accepted


@pytest.mark.invariant("M10", control=True)
def test_another_seed_gives_another_text():
    one, other = texts(TINY, (3, 9, 1), 12, heat=1.0), texts(TINY, (3, 9, 1), 12, heat=1.0)
    other[0].seed += 1
    assert plain(TINY, one[0]) != plain(TINY, other[0])
