"""MTP on the GPU: golden drafts, and the tokens that the model gives without it, with graphs on and off.

python -m pytest tests/gpu/test_cuda_mtp.py --halma-backend cuda --halma-require-backend cuda
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.graph.breakable import Outcome
from halma.models.deepseek_v4.golden import CaseFile, verify
from halma.models.deepseek_v4.golden_drafts import accepted_runs
from halma.models.deepseek_v4.golden_models import loader_for
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper, Text

CONTEXT = 512


def runner_for(backend: Backend, arithmetic: str = "exact", **options: Any) -> V4Runner:
    given = RunnerOptions(max_context=CONTEXT, arithmetic=arithmetic, **options)
    runner = load_v4("tiny-v4", backend, given).runner
    runner.prepare(runner.descriptors(("greedy", "sample")))
    return runner


def requests(count: int, tokens: int = 32, heat: float = 0.8) -> list[Text]:
    """Unequal prompts, every second one drawn."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1024, (1 + 7 * n % 40,), generator=generator).tolist() for n in range(count)]
    return [Text(prompt, tokens - n % 5, temperature=heat * (n % 2), seed=n) for n, prompt in enumerate(prompts)]


def tokens_of(texts: Sequence[Text]) -> list[list[int]]:
    return [text.tokens for text in texts]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", ["all_layers", "tiny_v4_exact", "tiny_v4_quant"])
def test_golden_drafts_hold(backend: Backend, cases: Path, name: str, graph: bool) -> None:
    path = cases / f"{name}.safetensors"
    report = verify(path, loader_for(path, "tiny-v4", backend), backend, graph=graph, target=False)
    assert report.checks and [check for check in report.checks if not check.passed] == []


@pytest.mark.invariant("M1")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_in_exact_arithmetic_no_token_differs_from_a_run_without_mtp(backend: Backend, count: int, graph: bool) -> None:
    without = runner_for(backend, max_requests=count, batches=(count,))
    expected = tokens_of(Stepper(without, requests(count)).run(0))
    without.close()
    runner = runner_for(backend, max_requests=count, batches=(count,), mtp=8, mtp_lengths=(0, 1, 4, 8), graph=graph)
    try:
        for drafts in (1, 4, 8):
            replays = runner.session.replays
            found = Stepper(runner, requests(count)).run(drafts)
            assert tokens_of(found) == expected
            assert sum(sum(text.accepted) for text in found) > 0
            assert (runner.session.replays > replays) == graph
        if graph:
            report = runner.session.report()
            assert report.pool_growth == 0 and {row.outcome for row in report.rows} == {Outcome.CAPTURED}
    finally:
        runner.close()


@pytest.mark.invariant("M2")
@pytest.mark.parametrize("copies", [1, 4, 16])
def test_the_golden_prompts_accept_the_same_in_any_batch(backend: Backend, cases: Path, copies: int) -> None:
    case = CaseFile(cases / "tiny_v4_exact.safetensors")
    runner = runner_for(backend, max_requests=4 * copies, batches=(4 * copies,), mtp=4)
    try:
        found = accepted_runs(runner, case, 4, copies)
        for number, text in enumerate(found):
            assert text.accepted == case[f"{case.prompts()[number % 4]}.spec_accepted_k4"].tolist()
    finally:
        runner.close()


@pytest.mark.invariant("M1")
def test_in_shipping_arithmetic_tokens_differ_where_two_were_near_alone(
    backend: Backend, record_property: Callable[[str, object], None]
) -> None:
    """Steps of other shapes sum in another order, which flips a rounding now and then; a text that took another token
    goes its own way. So what is bounded is how near the two tokens were, at the first one that differs."""
    without = runner_for(backend, "shipping", max_requests=16, batches=(16,))
    stepper = Stepper(without, requests(16, tokens=36, heat=0.0))
    stepper.prefill()
    margins: list[list[float]] = [[] for _ in stepper.texts]
    for _ in stepper.unfinished():
        running = [number for number, text in enumerate(stepper.texts) if not text.done]
        _, logits = stepper.step(0)
        best = logits[: len(running)].float().topk(2).values
        near = ((best[:, 0] - best[:, 1]) / logits[: len(running)].float().std(1)).tolist()
        for number, margin in zip(running, near, strict=True):
            margins[number].append(margin)  # of the tokens from the second on
    without.close()
    runner = runner_for(backend, "shipping", max_requests=16, batches=(16,), mtp=4)
    found = Stepper(runner, requests(16, tokens=36, heat=0.0)).run(4)
    runner.close()
    apart: list[float] = []
    for text, other, margin in zip(found, stepper.texts, margins, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(text.tokens, other.tokens, strict=True)) if a != b), None)
        if place is not None:
            assert place > 0, "both runs feed the prompt with one program"
            apart.append(margin[place - 1])
    record_property("requests_that_differ", f"{len(apart)} of 16, nearest to widest margin {sorted(apart)} sigma")
    assert all(margin < 0.25 for margin in apart), apart
