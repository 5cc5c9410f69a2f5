"""``halma ffn``: as torchrun starts it, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from halma.hal.arena.sizes import up
from halma.hal.collectives.ring_board import Board
from halma.hal.collectives.ring_plan import HEADER_BYTES
from tests.cpu.cli.conftest import Halma
from tests.cpu.cli.launching import LAUNCHER, SECONDS, TORCHRUN, ended, environment, forked, start

DATA = Path(__file__).parents[3] / "src" / "halma" / "data" / "tiny-v4"
ROLES = ("--attention-ranks", "2", "--ffn-ranks", "1")

pytestmark = pytest.mark.timeout(2 * SECONDS)


def test_torchrun_gives_the_texts_of_one_process_and_says_who_did_what(halma: Halma):
    prompts = ["The President", "We the People", "Congress shall make"]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)] + ["--max-tokens", "8", "--json"]
    run = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "3", "-m", "halma", "ffn", "--backend", "cpu", *ROLES, *asked],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)  # one object: the other ranks print nothing
    alone = halma("generate", "--backend", "cpu", *asked)
    expected = json.loads(alone.out)
    assert found["schema"] == "halma.ffn/1" and len(found["generations"]) == 3
    assert [one["token_ids"] for one in found["generations"]] == [one["token_ids"] for one in expected["generations"]]
    assert found["text"] == expected["text"] and found["graphs"]["replayed_steps"] > 0
    assert [one["requests"] for one in found["attention_ranks"]] == [2, 1]
    (ffn,) = found["ffn_ranks"]
    assert ffn["experts"] == [0, 16] and ffn["served"]["items"] > 0
    assert ffn["served"]["pairs"] == 4 * ffn["served"]["rows"] and ffn["memory_bytes"]["rings"] > 0
    whole = expected["memory_bytes"]["weights"]
    assert ffn["memory_bytes"]["weights"] + found["memory_bytes"]["weights"] == whole, "each weight is on one of them"


@pytest.mark.nightly
def test_groups_of_attention_ranks_give_the_texts_of_one_process(halma: Halma):
    prompts = ["The President", "We the People", "Congress shall make"]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)] + ["--max-tokens", "8", "--json"]
    roles = ("--attention-ranks", "4", "--ffn-ranks", "2", "--tp", "2")
    found = forked("ffn", [(*roles, *asked)] * 6)
    assert [code for code, _, _ in found] == [0] * 6, found
    report = json.loads(found[0][1])
    expected = json.loads(halma("generate", "--backend", "cpu", *asked).out)
    assert [one["token_ids"] for one in report["generations"]] == [one["token_ids"] for one in expected["generations"]]
    assert [one["requests"] for one in report["attention_ranks"]] == [2, 2, 1, 1] and report["tp"] == 2
    assert [one["experts"] for one in report["ffn_ranks"]] == [[0, 8], [8, 16]]


# -- refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--attention-ranks", "0", "--ffn-ranks", "1"), ("--attention-ranks takes a number from 1 on",)),
        (("--attention-ranks", "1", "--ffn-ranks", "-1"), ("--ffn-ranks takes a number from 1 on",)),
        (
            (*ROLES, "--tp", "3"),
            ("attention ranks make no whole groups", "2 attention ranks in groups of --tp 3", "--tp 1, 2"),
        ),
        ((*ROLES, "--tp", "0"), ("--tp takes a number from 1 on",)),
        ((*ROLES, "--tp", "2"), ("3 ranks are 3 processes", "--ffn-ranks 1 --tp 2", "not set: RANK")),
        ((*ROLES, "--items", "post"), ("in no such way", "--items post", "one of headers, worst-case, auto")),
        ((*ROLES, "--mtp", "9"), ("--mtp takes a number of drafts",)),
        (ROLES, ("3 ranks are 3 processes", "--attention-ranks 2 --ffn-ranks 1", "not set: RANK")),
    ],
    ids=["no attention", "no ffn", "tp", "no tp", "groups", "items", "drafts", "alone"],
)
def test_options_that_mean_nothing_are_refused(monkeypatch, halma: Halma, options, words):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    done = halma("ffn", "--backend", "cpu", "--prompt", "a", *options)
    assert done.code == 2 and not done.out
    for word in words:
        assert word in done.err, done.err


def test_another_number_of_processes_than_both_roles_have_is_refused(monkeypatch, halma: Halma):
    for name, value in zip(LAUNCHER, ("0", "2", "0", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    done = halma("ffn", "--backend", "cpu", "--prompt", "a", *ROLES)
    assert done.code == 2 and not done.out
    assert "another number of processes" in done.err and "WORLD_SIZE=2" in done.err
    assert "--attention-ranks 2 --ffn-ranks 1" in done.err


def one_expert(folder: Path) -> Path:
    config = json.loads((DATA / "config.json").read_text())
    changed = {**config, "n_routed_experts": 1, "num_experts_per_tok": 1}
    (folder / "config.json").write_text(json.dumps(changed))
    for file in DATA.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder / file.name)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("more FFN ranks than experts", "asked: 2 FFN ranks", "the model has 1 experts")),
        (("--model", "tiny-v4", "--depth", "3"), ("no rings of this geometry", "depth = 3")),
    ],
    ids=["experts", "depth"],
)
def test_roles_that_cannot_be_are_refused_once_by_all(tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]):
    common = ("--model", str(one_expert(tmp_path)), "--prompt-ids", "1,2", "--attention-ranks", "1", "--ffn-ranks", "2")
    found = forked("ffn", [(*common, *options)] * 3)
    assert [(code, out) for code, out, _ in found] == [(2, "")] * 3
    assert [bool(told) for _, _, told in found] == [True, False, False]
    for word in words:
        assert word in found[0][2], found[0][2]


@pytest.mark.nightly
def test_items_without_headers_and_graphs_are_refused_once():
    roles = ("--attention-ranks", "1", "--ffn-ranks", "1", "--prompt", "The", "--max-tokens", "4", "--json")
    found = forked("ffn", [(*roles, "--items", "worst-case", "--no-graph")] * 2)
    assert [(code, out) for code, out, _ in found] == [(2, "")] * 2
    assert not found[0][2] and "one graph of the worst case needs graphs" in found[1][2]
    done = forked("ffn", [(*roles, "--items", "worst-case")] * 2)
    assert [code for code, _, _ in done] == [0, 0], done
    (served,) = [one["served"] for one in json.loads(done[0][1])["ffn_ranks"]]
    assert served["way"] == {"chosen": "worst-case", "why": "asked for"} and 0 < served["items"] <= served["looks"]


def latest_item(rank: subprocess.Popen[str]) -> int:
    """The number of the latest item whose header is on a board that this process has mapped."""
    found = [0]
    with open(f"/proc/{rank.pid}/maps") as maps, open(f"/proc/{rank.pid}/mem", "rb") as memory:
        for line in maps:
            begin, end = (int(one, 16) for one in line.split()[0].split("-"))
            if "halma-arena" in line and end - begin == up(Board.headers(2) + HEADER_BYTES, 4096):
                memory.seek(begin + Board.headers(2))
                found.append(int.from_bytes(memory.read(8), "little") >> 32)
    return max(found)


def wait_until_served(ranks: Sequence[subprocess.Popen[str]], items: int) -> None:
    end = time.monotonic() + SECONDS
    while latest_item(ranks[1]) < items:
        assert time.monotonic() < end and all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)


@pytest.mark.invariant("F16")
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_an_error_that_names_it(victim: int):
    arguments = ("--attention-ranks", "1", "--ffn-ranks", "1", "--prompt", "The President", "--max-tokens", "3000")
    ranks = start("ffn", [(*arguments, "--ignore-eos")] * 2, HALMA_COLLECTIVE_BOUND="20")
    wait_until_served(ranks, 100)  # of about 12,000
    os.kill(ranks[victim].pid, signal.SIGKILL)
    ranks[1 - victim].wait(SECONDS)
    found = ended(ranks)
    assert found[victim][0] == -signal.SIGKILL and found[1 - victim][0] == 2
    role = ("attention 0", "FFN 0")[victim]
    assert f"rank {victim} ({role}, " in found[1 - victim][2] and "halma: " in found[1 - victim][2]


# -- halma generate --ep N --------------------------------------------------------------------------------


def test_expert_parallel_ranks_give_the_texts_of_one_process(halma: Halma):
    prompts = ("The President", "We the People", "Congress")
    asked = [word for prompt in prompts for word in ("--prompt", prompt)] + ["--max-tokens", "6", "--json"]
    run = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "halma", "generate", "--backend", "cpu", "--ep", "2", *asked],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    expected = json.loads(halma("generate", "--backend", "cpu", *asked).out)
    assert [one["token_ids"] for one in found["generations"]] == [one["token_ids"] for one in expected["generations"]]
    ranks = found["expert_parallel"]
    assert [one["experts"] for one in ranks] == [[0, 8], [8, 16]]
    assert len({one["steps"] for one in ranks}) == 1, "equally many steps, whoever has how many requests"


@pytest.mark.parametrize(("ep", "words"), [("0", "--ep takes a number from 1 on"), ("2", "not set: RANK")])
def test_numbers_of_ep_ranks_that_cannot_be_are_refused(monkeypatch, halma: Halma, ep: str, words: str):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    done = halma("generate", "--backend", "cpu", "--prompt", "a", "--ep", ep)
    assert done.code == 2 and not done.out and words in done.err
