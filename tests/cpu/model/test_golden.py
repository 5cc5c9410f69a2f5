"""Every golden case, by its own tolerance, eager and replayed, with one and more tokens a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import halma
from halma.hal.errors import ModelError
from halma.models.deepseek_v4.golden import CaseFile, Check, verify
from halma.models.deepseek_v4.golden_models import loader_for

CASES = Path(__file__).parents[2] / "data" / "cases"
EXACT = ["hash_only", "all_layers", "tiny_v4_exact"]
# Pairwise over (graph, tokens a step); the full product is the nightly row's.
PAIRS = [("hash_only", True, 1), ("hash_only", False, 5), ("all_layers", False, 1), ("all_layers", True, 2)]
PRODUCT = [(case, graph, step) for case in EXACT for graph in (True, False) for step in (1, 2, 5)]


def run(name: str, graph: bool, step: int):
    """Drafts are test_mtp_golden's."""
    backend = halma.backend("cpu")
    path = CASES / f"{name}.safetensors"
    load = loader_for(path, "tiny-v4", backend)
    return verify(path, load, backend, graph=graph, tokens_per_step=step, drafts=False)


def assert_passed(report) -> None:
    failed = [f"{c.name}: {c.value:g} against {c.limit:g} {c.detail}" for c in report.checks if not c.passed]
    assert report.checks and not failed, failed


@pytest.mark.parametrize(("case", "graph", "step"), [*PAIRS, ("tiny_v4_exact", True, 5)])
def test_exact_cases(case, graph, step):
    assert_passed(run(case, graph, step))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("case", "graph", "step"), PRODUCT)
def test_exact_cases_in_full(case, graph, step):
    assert_passed(run(case, graph, step))


@pytest.mark.timeout(600)
def test_the_quantised_ladder():
    report = run("tiny_v4_quant", graph=True, step=5)  # its drafts: nightly, test_mtp_golden
    assert_passed(report)
    names = [check.name for check in report.checks]
    assert {"rounding act128", "rounding kv_row", "rounding index", "rounding e2m1", "layer 3"} <= set(names)
    assert sum("float64" in name for name in names) == 8, "tokens and logits of four prompts"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("graph", "step"), [(False, 1), (True, 1), (False, 2), (True, 2), (False, 5)])
def test_the_quantised_ladder_in_full(graph, step):
    assert_passed(run("tiny_v4_quant", graph, step))


def edited(tmp_path: Path, change) -> Path:
    """The case hash_only with some tensors changed."""
    source = CASES / "hash_only.safetensors"
    tensors, metadata = load_file(source), CaseFile(source).metadata
    change(tensors)
    save_file(tensors, tmp_path / "case.safetensors", metadata=metadata)
    return tmp_path / "case.safetensors"


def test_a_case_that_is_off_fails(tmp_path):
    """The comparison can see a fault: one expected logit moved by 3e-4 sigma, one token changed."""

    def change(tensors):
        tensors["out.step_logits"][1, 20, 7] += 3e-4
        tensors["out.tokens"][2, 24] += 1

    path = edited(tmp_path, change)
    backend = halma.backend("cpu")
    report = verify(path, loader_for(path, "tiny-v4", backend), backend)
    assert [check.name for check in report.checks if not check.passed] == ["decode logits", "tokens"]


def test_nan_never_passes():
    assert not Check("x", float("nan"), 1.0).passed and not Check("x", float("nan"), 1.0, at_least=True).passed


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_no_case_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot be read|not a golden case"):
        CaseFile(path)


def test_a_missing_case_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        CaseFile(tmp_path / "absent.safetensors")


def test_case_metadata_is_json_where_it_should_be():
    case = CaseFile(CASES / "tiny_v4_exact.safetensors")
    assert case.json("facts")["mid"]["prompt_len"] == 165 and not case.quantised and not case.random
    assert case.prompts() == ["bos", "long", "mid", "short"] and isinstance(json.loads(case.metadata["facts"]), dict)
    assert torch.equal(case["bos.prompt_ids"], torch.tensor([0]))
