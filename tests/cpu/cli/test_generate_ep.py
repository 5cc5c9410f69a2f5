"""``halma generate --ep N`` with ``--tp`` and ``--mtp``: the texts of one process, and which numbers go together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cpu.cli.conftest import Halma
from tests.cpu.cli.launching import LAUNCHER, SECONDS, forked

pytestmark = pytest.mark.timeout(2 * SECONDS)
PROMPTS = ("--prompt", "The President", "--prompt", "We the People", "--prompt", "Congress", "--max-tokens", "6")


def on_ranks(*arguments: str, size: int) -> dict[str, Any]:
    """What rank 0 prints; the others print nothing. ``--tp`` is given last, and so counts."""
    (code, out, told), *others = forked("generate", [(*PROMPTS, "--json", *arguments)] * size)
    assert code == 0, told
    assert all(other[:2] == (0, "") for other in others)
    return json.loads(out)


def texts(found: dict[str, Any]) -> list[str]:
    return [one["text"] for one in found["generations"]]


def alone(halma: Halma) -> list[str]:
    return texts(json.loads(halma("generate", "--backend", "cpu", *PROMPTS, "--json").out))


@pytest.mark.nightly
def test_ranks_share_attention_and_part_the_experts(halma: Halma):
    found = on_ranks("--ep", "2", "--tp", "2", "--mtp", "2", size=2)
    assert texts(found) == alone(halma)
    assert [one["experts"] for one in found["expert_parallel"]] == [[0, 8], [8, 16]]
    assert found["tensor_parallel"]["size"] == 2 and found["mtp"]["verified"] > 0


@pytest.mark.nightly
def test_ranks_that_share_attention_choose_drafts_alike(halma: Halma):
    found = on_ranks("--ep", "2", "--tp", "2", "--mtp", "auto", "--ahead", "2", size=2)
    assert texts(found) == alone(halma) and found["mtp"]["choices"]


@pytest.mark.nightly
def test_ranks_that_exchange_rows_draft_run_ahead_and_stop_at_a_text(halma: Halma):
    given = ("--mtp", "3", "--ahead", "2", "--stop", "Sen")
    found = on_ranks("--ep", "2", "--tp", "1", *given, size=2)
    expected = json.loads(halma("generate", "--backend", "cpu", *PROMPTS, "--json", *given).out)
    assert texts(found) == texts(expected) and any(one["finish"] == "stop" for one in found["generations"])
    ranks = found["expert_parallel"]
    assert len({one["steps"] for one in ranks}) == 1 and all(one["mtp"]["verified"] for one in ranks)


@pytest.mark.nightly
def test_two_groups_of_two_ranks(halma: Halma):
    found = on_ranks("--ep", "4", "--tp", "2", "--mtp", "2", size=4)
    assert texts(found) == alone(halma) and found["tensor_parallel"] == {"size": 2, "groups": 2}
    ranks = found["expert_parallel"]
    assert [one["experts"] for one in ranks] == [[0, 4], [4, 8], [8, 12], [12, 16]]
    assert [one["mtp"] for one in ranks[::2]] == [one["mtp"] for one in ranks[1::2]]
    assert ranks[0]["mtp"] != ranks[2]["mtp"] and len({one["steps"] for one in ranks}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ep", "2", "--tp", "4"), ("do not go together", "--ep 2 --tp 4", "--tp 1 or 2; or --tp 4 alone")),
        (("--ep", "6", "--tp", "4"), ("no whole number of groups of 4", "--tp 1, 2, 3 or 6")),
        (("--ep", "4", "--mtp", "auto"), ("one number of drafts", "--ep 4 --mtp auto", "--mtp 1 to 8", "--tp 4")),
        (("--ep", "4", "--tp", "2", "--mtp", "auto"), ("one number of drafts", "--ep 4 --tp 2 --mtp auto")),
        (("--ep", "2", "--tp", "0"), ("--tp takes a number from 1 on",)),
        (("--ep", "2", "--mtp", "9"), ("from 1 to 8, or auto",)),
        (("--ep", "4", "--tp", "2"), ("not set: RANK", "--nproc-per-node 4 -m halma generate --ep 4 --tp 2 ...")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value[0].startswith("--") else "",
)
def test_numbers_that_do_not_go_together_are_refused(monkeypatch, halma: Halma, arguments, words):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    done = halma("generate", "--backend", "cpu", "--prompt", "a", *arguments)
    assert done.code == 2 and not done.out
    for word in words:
        assert word in done.err, done.err


@pytest.mark.nightly
def test_a_model_that_does_not_divide_is_refused_once_with_the_legal_numbers():
    """tiny-v4 has two groups of heads."""
    found = forked("generate", [("--prompt", "a", "--ep", "4")] * 4)
    assert [one[0] for one in found] == [2] * 4
    told = "".join(one[2] for one in found)
    assert told.count("halma: ") == 1 and "cannot be divided" in told and "divide all of them: 1, 2\n" in told
