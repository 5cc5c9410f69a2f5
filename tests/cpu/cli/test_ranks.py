"""``halma verify --tp N`` and ``halma capture --tp N``; what they share with ``generate`` is in its own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from halma.models.deepseek_v4.golden import CaseFile
from tests.cpu.cli.conftest import Halma
from tests.cpu.cli.launching import SECONDS, forked

CASES = Path(__file__).parents[2] / "data" / "cases"
EXACT = CASES / "tiny_v4_exact.safetensors"

pytestmark = pytest.mark.timeout(2 * SECONDS)


def edited(tmp_path: Path, change) -> Path:
    """The exact case of tiny-v4 with one short prompt, and with some tensors changed."""
    tensors = {name: value for name, value in load_file(EXACT).items() if name.startswith("short.")}
    change(tensors)
    save_file(tensors, tmp_path / "case.safetensors", metadata=CaseFile(EXACT).metadata)
    return tmp_path / "case.safetensors"


@pytest.mark.nightly
def test_every_rank_compares_a_case_and_rank_0_tells(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda tensors: None)
    first, second = forked("verify", [("--json", "--tokens-per-step", "5", str(path))] * 2)
    assert (first[0], second[0]) == (0, 0), first[2]
    assert second[1] == "", "one speaks"
    found = json.loads(first[1])
    assert found["passed"] and found["ranks"] == [{"rank": 0, "failed": []}, {"rank": 1, "failed": []}]
    (case,) = found["cases"]
    assert case["graph"] and case["arithmetic"] == "exact" and case["passed"]
    assert [check["name"] for check in case["checks"]] == ["short: logits", "short: tokens"]


def test_what_one_rank_alone_finds_fails_all(tmp_path: Path) -> None:
    """Rank 1 has another file: rank 0's comparison holds, and the command does not."""

    def change(tensors) -> None:
        tensors["short.logits"][0, 7] += 1.0

    good = edited(tmp_path, lambda tensors: None)
    (tmp_path / "other").mkdir()
    bad = edited(tmp_path / "other", change)
    ranks = [("--json", "--tokens-per-step", "5", "case.safetensors")] * 2
    first, second = forked("verify", ranks, folders=[good.parent, bad.parent])
    assert (first[0], second[0]) == (1, 1), first[2]
    found = json.loads(first[1])
    assert not found["passed"] and found["cases"][0]["passed"]
    assert found["ranks"] == [{"rank": 0, "failed": []}, {"rank": 1, "failed": ["case"]}]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hash_only", ("hash_only: the model cannot be divided", "vocab_size = 211", "divide all of them: 1")),
        ("tiny_v4_quant", ("official roundings as one rank makes them", "--tp 1 for this case")),
    ],
)
def test_a_case_that_ranks_cannot_run_is_refused_before_any_runs(case: str, words: tuple[str, ...]) -> None:
    ranks = forked("verify", [(str(EXACT), str(CASES / f"{case}.safetensors"))] * 2)
    assert [(code, out) for code, out, _ in ranks] == [(2, "")] * 2 and ranks[1][2] == ""
    for word in words:
        assert word in ranks[0][2], ranks[0][2]


def test_what_ranks_capture_is_told_by_rank() -> None:
    arguments = ("--json", "--max-requests", "2", "--context", "200", "--chunk", "8")
    first, second = forked("capture", [arguments] * 2)
    assert (first[0], second[0], second[1]) == (0, 0, ""), first[2]
    found = json.loads(first[1])
    assert found["captured"] == len(found["descriptors"]) == 3
    mine, other = found["ranks"]
    assert mine == {**other, "rank": 0} and other["rank"] == 1
    assert mine["arena_bytes"] > 2 * 16 * 256 * 4 and mine["workspace_bytes"] == found["workspace_bytes"] > 0
    assert (mine["pool_growth"], mine["captured"]) == (0, 3)


@pytest.mark.nightly
def test_what_ranks_captured_in_a_scratch_session_is_a_table() -> None:
    arguments = ("--scratch", "--max-requests", "1", "--context", "200", "--chunk", "8")
    first, second = forked("capture", [arguments] * 2)
    assert (first[0], second[0], second[1]) == (0, 0, ""), first[2]
    lines = first[1].splitlines()
    heads = next(at for at, line in enumerate(lines) if line.startswith("rank") and "pool grown by" in line)
    assert [line.split()[0] for line in lines[heads + 1 : heads + 3]] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("capture", "--tp", "2", "--arena", "channel"), ("--arena channel with --tp 2", "--world N")),
        (("capture", "--tp", "2", "--compare-unshared"), ("--compare-unshared with --tp 2",)),
        (("capture", "--tp", "0"), ("--tp takes a number from 1 on",)),
        (("capture", "--tp", "2"), ("started alone", "torchrun --nproc-per-node 2 -m halma capture --tp 2")),
        (("verify", "--tp", "2", str(EXACT)), ("started alone", "torchrun --nproc-per-node 2 -m halma verify --tp 2")),
    ],
)
def test_what_ranks_cannot_do_is_refused(halma: Halma, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = halma(*arguments, "--backend", "cpu")
    assert done.code == 2 and not done.out
    for word in words:
        assert word in done.err, done.err


def test_a_model_that_cannot_be_divided_is_refused_once_with_the_legal_numbers() -> None:
    ranks = forked("capture", [("--max-requests", "1", "--context", "200")] * 4)
    assert [(code, out) for code, out, _ in ranks] == [(2, "")] * 4
    assert "divide all of them: 1, 2" in ranks[0][2] and all(said == "" for _, _, said in ranks[1:])
