"""``halma generate --tp N``: as torchrun starts it, and every way in which its processes may not come together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cpu.cli.conftest import Halma
from tests.cpu.cli.launching import LAUNCHER, SECONDS, TORCHRUN, ended, environment, forked, free_port, start

DATA = Path(__file__).parents[3] / "src" / "halma" / "data" / "tiny-v4"

pytestmark = pytest.mark.timeout(2 * SECONDS)


# -- as it is meant -------------------------------------------------------------------------------------


def test_torchrun_gives_the_text_of_one_rank_and_says_how():
    """Standard input goes to all processes, and only one of them could read it: rank 0 reads for all."""
    run = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "halma", "generate", "--backend", "cpu", "--tp", "2"]
        + ["--max-tokens", "12", "--json"],
        input="The President",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)  # one object: rank 1 prints nothing
    assert found["text"].startswith("'s Senate and House of") and len(found["token_ids"]) == 12
    assert found["graphs"]["captured"] > 0 and found["graphs"]["replayed_steps"] == 11
    parallel, whole = found["tensor_parallel"], (DATA / "model.safetensors").stat().st_size
    assert parallel["size"] == 2 and parallel["all_reduces_per_step"] == 9 and parallel["all_reduce_bytes"] == 1024
    assert parallel["all_reduce_algorithm"] == "one_shot/words"
    assert len(parallel["rank_memory_bytes"]) == 2 and whole > 0
    assert all(one["weights"] > 0 and one["state"] > 0 and one["arena"] > 0 for one in parallel["rank_memory_bytes"])
    assert {entry["call"].split()[0] for entry in parallel["collectives"]} == {"all_reduce", "all_gather"}


@pytest.mark.nightly
def test_ranks_draft_together_and_give_the_text_of_one_rank_without_drafts():
    common = ("--prompt", "The President", "--max-tokens", "12", "--mtp", "auto", "--ahead", "3", "--json")
    (code, out, told), (other, silent, _) = ended(start("generate", [common] * 2))
    assert code == other == 0 and silent == "", told
    found = json.loads(out)
    assert found["text"].startswith("'s Senate and House of") and len(found["token_ids"]) == 12
    assert found["mtp"]["choices"] and found["mtp"]["verified"] < 11 and found["mtp"]["time_share"]["draft"] is not None
    assert found["tensor_parallel"]["all_reduces_per_step"] == 9 + 3 * 8


# -- launched wrongly: said at once, by each process ----------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "launcher", "words"),
    [
        ("2", {}, ("started alone", "not set: RANK, WORLD_SIZE", "torchrun --nproc-per-node 2")),
        ("2", {"RANK": "0", "WORLD_SIZE": "2"}, ("not set: MASTER_ADDR, MASTER_PORT",)),
        ("4", {"WORLD_SIZE": "2"}, ("another number of processes", "--tp 4", "WORLD_SIZE=2", "--tp 2")),
        ("1", {"WORLD_SIZE": "2"}, ("another number of processes", "--tp 1", "WORLD_SIZE=2")),
        ("2", {"WORLD_SIZE": "two"}, ("are not numbers", "WORLD_SIZE=two")),
        ("2", {"RANK": "2"}, ("RANK=2, WORLD_SIZE=2",)),
        ("0", {}, ("--tp takes a number from 1 on",)),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(monkeypatch, halma: Halma, tp, launcher, words):
    full = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given = {**full, **launcher} if len(launcher) == 1 else launcher
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
        if name in given:
            monkeypatch.setenv(name, given[name])
    done = halma("generate", "--backend", "cpu", "--prompt", "a", "--tp", tp)
    assert done.code == 2 and not done.out
    for word in words:
        assert word in done.err, done.err


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("0", ("1 of 2 ranks did not start within 0.5 s", "missing: rank 1")),
        ("1", ("rank 1 does not reach rank 0", "start rank 0 too")),
    ],
)
def test_a_rank_that_does_not_start_is_named_by_those_that_did(monkeypatch, halma: Halma, rank: str, words):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port()), "HALMA_COLLECTIVE_BOUND": "0.5"}.items():
        monkeypatch.setenv(name, value)
    done = halma("generate", "--backend", "cpu", "--prompt", "a", "--tp", "2")
    assert done.code == 2 and not done.out
    for word in words:
        assert word in done.err, done.err


# -- refused by one or by all: one voice, and exit code 2 everywhere ------------------------------------


def test_a_model_that_cannot_be_divided_is_refused_once_with_the_legal_numbers(tmp_path: Path):
    shutil.copy(DATA / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1023}))
    first, second = forked("generate", [("--model", str(tmp_path), "--prompt-ids", "1")] * 2)
    assert first[0] == second[0] == 2 and first[1] == second[1] == second[2] == ""
    for word in ("cannot be divided", "asked: 2 ranks", "vocab_size = 1023", "divide all of them: 1"):
        assert word in first[2]


def test_what_one_rank_refuses_ends_all_and_is_told_once():
    common = ("--prompt", "a")
    first, second = forked("generate", [common, (*common, "--model", "tiny-v5")])
    assert first[0] == second[0] == 2 and first[1:] == ("", "")
    assert 'halma: on rank 1: no model called "tiny-v5"' in second[2] and second[2].count("halma:") == 1


@pytest.mark.nightly
def test_torchrun_ends_no_rank_before_it_has_ended_itself():
    """It terminates all as soon as one has ended; each still ends with its own code, and the reason is there once."""
    command = [*TORCHRUN, "--nproc-per-node", "4", "-m", "halma", "generate", "--backend", "cpu"]
    command += ["--tp", "4", "--prompt", "a"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode != 0 and run.stderr.count("exitcode  : 2 ") == 4
    assert run.stderr.count("halma: the model cannot be divided") == 1 and "divide all of them: 1, 2\n" in run.stderr


@pytest.mark.nightly
@pytest.mark.invariant("C7")
def test_a_rank_that_dies_is_an_error_that_names_it():
    arguments = ("--prompt", "The President", "--max-tokens", "3000", "--ignore-eos")
    ranks = start("generate", [arguments] * 2, HALMA_COLLECTIVE_BOUND="20")
    stdout = ranks[0].stdout
    assert stdout is not None and stdout.read(4) == "The "  # it decodes now
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[0].wait(SECONDS)
    (code, _, told), (killed, _, _) = ended(ranks)
    assert killed == -signal.SIGKILL and code == 2
    assert "rank 1" in told and "halma: " in told
