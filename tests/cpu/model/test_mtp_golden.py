"""What the module drafts, beside the golden cases; every case by its own tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import halma
from halma.models.deepseek_v4.golden import CaseFile, CaseReport, verify
from halma.models.deepseek_v4.golden_drafts import accepted_runs
from halma.models.deepseek_v4.golden_models import loader_for
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from tests.cpu.model.mtp import TINY, model

CASES = Path(__file__).parents[2] / "data" / "cases"
TOKENS_A_STEP = {1: 1.70, 2: 2.21, 3: 2.56, 4: 2.80}


def run(path: Path, graph: bool) -> CaseReport:
    backend = halma.backend("cpu")
    return verify(path, loader_for(path, "tiny-v4", backend), backend, graph=graph, target=False)


def assert_passed(report: CaseReport) -> None:
    failed = [f"{c.name}: {c.value:g} against {c.limit:g} {c.detail}" for c in report.checks if not c.passed]
    assert report.checks and not failed, failed


def test_a_random_models_drafts_and_their_logits():
    report = run(CASES / "all_layers.safetensors", graph=False)
    assert_passed(report)
    assert sum("logits" in check.name for check in report.checks) == 4


@pytest.mark.timeout(900)
def test_the_tiny_checkpoints_drafts_and_what_is_accepted_of_them():
    report = run(CASES / "tiny_v4_exact.safetensors", graph=True)
    assert_passed(report)
    means = {check.name: float(check.detail) for check in report.checks if check.name.endswith("tokens a step")}
    assert means == {f"{k} drafts: tokens a step": pytest.approx(mean, abs=5e-3) for k, mean in TOKENS_A_STEP.items()}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("case", "graph"),
    [("all_layers", True), ("tiny_v4_exact", False), ("tiny_v4_quant", True), ("tiny_v4_quant", False)],
)
def test_drafts_in_full(case, graph):
    assert_passed(run(CASES / f"{case}.safetensors", graph))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.invariant("M2")
@pytest.mark.parametrize("copies", [1, 4, 16])
def test_the_prompts_of_the_case_accept_the_same_in_any_batch(copies):
    """Batches of 4, 16 and 64; a batch of 1 is what the case was made with."""
    case = CaseFile(CASES / "tiny_v4_exact.safetensors")
    prompts = case.prompts()
    options = RunnerOptions(max_requests=4 * copies, max_context=512, batches=(4 * copies,), mtp=4, graph=False)
    runner = V4Runner(*model(TINY, "exact"), halma.backend("cpu"), options)
    runner.prepare()
    found = accepted_runs(runner, case, 4, copies)
    for number, text in enumerate(found):
        assert text.accepted == case[f"{prompts[number % 4]}.spec_accepted_k4"].tolist()


def test_a_draft_that_is_off_fails(tmp_path):
    """The comparison can see a fault: one expected draft changed, one expected logit moved by 3e-4 sigma."""
    source = CASES / "all_layers.safetensors"
    tensors, metadata = load_file(source), CaseFile(source).metadata
    tensors["mtp.after_text.draft_tokens"][1, 3] += 1
    tensors["mtp.after_prompt.draft_logits"][0, 2, 7] += 3.3e-4
    save_file(tensors, tmp_path / "case.safetensors", metadata=metadata)
    report = run(tmp_path / "case.safetensors", graph=False)
    failed = [check.name for check in report.checks if not check.passed]
    assert failed == ["after_prompt: draft logits", "after_text: drafts"]


def test_a_case_without_drafts_has_nothing_to_compare():
    assert run(CASES / "hash_only.safetensors", graph=False).checks == []
