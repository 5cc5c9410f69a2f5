"""The engine on tiny-v4: what it accepts is what the golden cases have, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import halma
from halma.models.deepseek_v4.engine import Engine, Generation, Request
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.runner import RunnerOptions

CASE = Path(__file__).parents[2] / "data" / "cases" / "tiny_v4_exact.safetensors"
PROMPTS = ("short", "mid", "long", "bos")
TOKENS_PER_STEP = {1: 1.70, 2: 2.21, 3: 2.56, 4: 2.80}
"""Over the four prompts, as published with the cases."""
AHEAD = 5
"""Tokens behind the 96 of the cases: the last step that begins before their end has room for all its drafts."""


def generated(case: dict[str, Any], drafts: int, batch: int, prompts: tuple[str, ...]) -> list[Generation]:
    options = RunnerOptions(max_requests=batch, batches=(batch,), max_context=512, mtp=drafts)
    runner = load_v4("tiny-v4", halma.backend("cpu"), options).runner
    runner.prepare(runner.descriptors(("greedy",)))
    requests = [Request(tuple(case[f"{prompt}.prompt_ids"].tolist()), 96 + AHEAD) for prompt in prompts]
    try:
        return Engine(runner, ahead=2, drafts=drafts).run(requests)
    finally:
        runner.close()


def check(drafts: int, batch: int, copies: int) -> None:
    case = load_file(CASE)
    prompts = PROMPTS * copies
    found = generated(case, drafts, batch, prompts)
    accepted: list[int] = []
    for prompt, generation in zip(prompts, found, strict=True):
        expected = case[f"{prompt}.spec_accepted_k{drafts}"].tolist()
        assert generation.tokens[:96] == case[f"{prompt}.tokens"].tolist()
        assert generation.accepted[: len(expected)] == expected
        accepted += generation.accepted[: len(expected)]
    assert round(1 + sum(accepted) / len(accepted), 2) == TOKENS_PER_STEP[drafts]


@pytest.mark.invariant("M2")
@pytest.mark.timeout(900)
def test_a_batch_of_four_prompts_accepts_what_the_cases_have():
    check(drafts=4, batch=4, copies=1)


@pytest.mark.invariant("M2", control=True)
@pytest.mark.timeout(900)
def test_prompts_accept_differently_so_that_a_mixed_up_batch_would_show():
    case = load_file(CASE)
    runs = [case[f"{prompt}.spec_accepted_k4"].tolist() for prompt in PROMPTS]
    assert all(one[:10] != other[:10] for place, one in enumerate(runs) for other in runs[:place])


@pytest.mark.nightly
@pytest.mark.invariant("M2")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_acceptance_is_equal_at_every_batch_size(drafts: int, batch: int):
    check(drafts, batch, copies=max(1, batch // 4))
