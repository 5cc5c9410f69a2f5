"""Arenas of two processes, which are ranks 1 and 3 of four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.arena.ranks import LADDER, MEMBERS

SECONDS = 200
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both members found, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "tests.cpu.arena.ranks", str(folder)]
    done = subprocess.run(line, env=environment, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [folder / f"{rank}.json" for rank in MEMBERS]
    assert all(answer.exists() for answer in answers), done.stderr
    return [json.loads(answer.read_text()) for answer in answers]


@pytest.mark.invariant("A13")
@pytest.mark.invariant("A10", control=True)
def test_ranks_of_a_group_map_each_other_whatever_their_numbers_in_the_world(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["writes_are_seen"]["seen"] == [40, 41]
        assert one["writes_are_seen"]["names"] == ["rank 1 on here", "rank 3 on here"]
        assert one["writes_are_seen"]["left"] == []
    assert found[0]["writes_are_seen"]["fingerprint"] == found[1]["writes_are_seen"]["fingerprint"]


@pytest.mark.invariant("A4")
def test_processes_with_different_plans_are_told_before_either_allocates(found: list[dict[str, Any]]) -> None:
    for one in found:
        error = one["plans_differ"]["error"]
        assert "ranks do not agree on the arena's plan" in error and one["plans_differ"]["left"] == []
        assert "rank 1 on here: asked: messages of up to 4,096 bytes" in error
        assert "rank 3 on here: asked: 2 descriptors" in error


@pytest.mark.invariant("A4")
def test_a_process_that_cannot_map_ends_the_start_up_of_both_and_nothing_stays(found: list[dict[str, Any]]) -> None:
    first, second = (one["one_cannot_map"] for one in found)
    assert (first["kind"], second["kind"]) == ("ArenaError", "CollectiveError")
    assert "rank 3 on here failed at \"the arena's peers\"" in first["error"] and "its owner is gone" in first["error"]
    assert first["left"] == second["left"] == []


@pytest.mark.invariant("A4")
def test_a_process_that_captured_one_call_less_is_found_by_both(found: list[dict[str, Any]]) -> None:
    for one in found:
        error = one["one_call_less"]["error"]
        assert "they differ in entry 1 of the arenas' ledger" in error and one["one_call_less"]["left"] == []
        assert "rank 0: decode(2 tokens, 2 requests): 3 calls" in error
        assert "rank 1: decode(2 tokens, 2 requests): 2 calls" in error


@pytest.mark.invariant("A4", control=True)
def test_processes_that_captured_the_same_replay_it(found: list[dict[str, Any]]) -> None:
    for one in found:
        result = one["all_calls"]
        assert (result["slots"], result["replays"]) == (3 * len(LADDER), len(LADDER)) and result["left"] == []
        assert result["sealed"] == sorted(map(str, LADDER))


@pytest.mark.invariant("A9")
def test_a_process_that_died_is_an_error_at_the_end_of_the_other_which_gives_its_memory_back(
    found: list[dict[str, Any]],
) -> None:
    result = found[0]["one_dies"]
    assert result["kind"] == "RankError" and "did not come to \"the arena's end\"" in result["error"]
    assert result["left"] == [] and "one_dies" not in found[1]
