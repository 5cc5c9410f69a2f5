"""Ranks agree before and after each capture: as pure functions, and in two CPU processes over gloo."""

# pyright: basic
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halma.hal.errors import CaptureError
from halma.hal.graph.agreement import NoAgreement, Vote, settle
from halma.hal.testing.forks import script

SECONDS = 100
"""Bound of every wait for a process; the group's own is in the script."""


class Votes:
    """Rank 0, with the votes of others."""

    rank = 0

    def __init__(self, *others: Vote) -> None:
        self.others = others

    def exchange(self, vote: Vote) -> Sequence[Vote]:
        return (vote, *self.others)

    def leave(self, reason: str) -> None: ...


@pytest.mark.invariant("G26")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Vote("ladder", ("captured", "a", "c")), "entry 2 of ladder"),
        (Vote("ladder", ("off", "a", "b")), "entry 0 of ladder"),
        (Vote("ladder", ("captured", "a")), "rank 1: nothing"),
        (Vote("capture", ("captured", "a", "b")), "differ in their stage"),
        (Vote("ladder", ("captured", "a", "b"), error="ValueError: no"), "rank 1: ValueError: no"),
    ],
    ids=["descriptor", "mode", "fewer", "stage", "failure"],
)
def test_the_first_difference_is_named_with_its_rank(other: Vote, message: str) -> None:
    mine = Vote("ladder", ("captured", "a", "b"))
    with pytest.raises(CaptureError, match=message):
        settle(Votes(other), mine)


@pytest.mark.invariant("G26", control=True)
def test_equal_votes_settle() -> None:
    mine = Vote("ladder", ("captured", "a"))
    assert settle(Votes(mine), mine) is None
    assert settle(NoAgreement(), mine) is None


def test_one_rank_without_memory_keeps_all_eager() -> None:
    mine = Vote("warm-up", ("a",))
    assert settle(Votes(Vote("warm-up", ("a",), refusal="no memory")), mine) == "rank 1: no memory"
    assert settle(NoAgreement(), Vote("warm-up", refusal="no memory")) == "no memory"


def test_the_own_error_is_left_to_the_caller() -> None:
    mine = Vote("capture", error="mine")
    assert settle(Votes(Vote("capture", error="theirs")), mine) is None


RANK = """
import datetime, json, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
import halma
from halma.hal.errors import HalmaError
from halma.hal.graph.agreement import RankAgreement
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.settings import GraphSwitch
from halma.hal.testing.conformance.roles import Toy
from halma.hal.workspace import Workspace

store, rank, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]
second = rank == 1
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
backend = halma.backend("cpu")
toy = Toy(backend, 8)
switch = GraphSwitch(on=not (case == "mode" and second))
agreement = RankAgreement()
session = CaptureSession(backend, Workspace(), "persistent", switch=switch, agreement=agreement,
                         reserve=1 << 62 if case == "memory" and second else 0)
ladder = decode_ladder(4 if case == "ladder" and second else 8)
if case == "duplicate" and second:
    ladder = ladder + ladder[:1]
calls = 0

def program_of(descriptor):
    program = toy.program(session, descriptor)
    def run():
        global calls
        calls += descriptor.num_requests == 2
        # once to plan, so the second call is the capture
        if second and descriptor.num_requests == 2 and (case, calls) in (("plan", 1), ("capture", 2)):
            raise ValueError("layer 3 is missing")
        if case == "dies" and second and descriptor.num_requests == 2 and calls == 2:
            sys.exit(7)
        return program()
    return run

found = {"error": "", "kind": ""}
try:
    with torch.no_grad():
        order = "ascending" if case == "order" and second else "descending"
        session.capture_all(ladder, program_of, order)
except Exception as error:
    found = {"error": str(error), "kind": type(error).__name__}
found["captured"] = [row.descriptor.num_requests for row in session.report().rows if not row.why_not]
found["reasons"] = sorted({row.why_not for row in session.report().rows if row.why_not})
found["open"] = len(session.executables)
print(json.dumps(found))
sys.stdout.flush()
if case != "dies":
    dist.destroy_process_group()
"""


def two_ranks(case: str, folder: Path) -> list[dict[str, Any]]:
    """What both ranks print; both end within the bound."""
    ranks = [script(RANK, str(folder / "store"), str(rank), case) for rank in (0, 1)]
    ended = [rank.end(SECONDS) for rank in ranks]
    return [json.loads(one.out.strip().splitlines()[-1]) if one.out.strip() else {"stderr": one.err} for one in ended]


@pytest.mark.invariant("G26", control=True)
def test_two_ranks_that_agree_capture_everything(tmp_path: Path) -> None:
    for found in two_ranks("agree", tmp_path):
        assert found["error"] == "" and found["captured"] == [8, 4, 2, 1] and found["open"] == 4


@pytest.mark.invariant("G26")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mode", "decode: capture is switched off"),
        ("ladder", "rank 0: decode(8 tokens, 8 requests)"),
        ("order", "persistent, ascending"),
    ],
)
def test_ranks_that_differ_are_told_before_anything_is_captured(case: str, message: str, tmp_path: Path) -> None:
    for found in two_ranks(case, tmp_path):
        assert "ranks do not agree on what to capture" in found["error"] and message in found["error"]
        assert found["captured"] == [] and found["open"] == 0


@pytest.mark.invariant("G26")
@pytest.mark.parametrize("case", ["plan", "capture", "duplicate"])
def test_a_failure_of_one_rank_is_seen_by_both_with_its_message(case: str, tmp_path: Path) -> None:
    first, second = two_ranks(case, tmp_path)
    message = "in the ladder twice" if case == "duplicate" else "ValueError: layer 3 is missing"
    assert first["kind"] == "CaptureError" and "rank 1 failed at" in first["error"] and message in first["error"]
    assert second["kind"] == ("CaptureError" if case == "duplicate" else "ValueError")
    assert message.removeprefix("ValueError: ") in second["error"]
    # Both keep the same graphs: those captured before the failure.
    assert first["captured"] == second["captured"] == ([8, 4] if case == "capture" else [])
    assert first["open"] == second["open"] == len(first["captured"])


@pytest.mark.invariant("G26")
def test_no_memory_on_one_rank_keeps_both_eager(tmp_path: Path) -> None:
    for found in two_ranks("memory", tmp_path):
        assert found["error"] == "" and found["captured"] == []
        # They name the free memory of their moment, which is the whole machine's.
        assert found["reasons"]
        assert all(reason.startswith("rank 1: 4,611,686,018,427,387,904 bytes") for reason in found["reasons"])


@pytest.mark.invariant("G26")
def test_a_rank_that_dies_is_an_error_on_the_other_within_the_bound(tmp_path: Path) -> None:
    first, second = two_ranks("dies", tmp_path)
    assert "a rank did not take part in a capture" in first["error"] and "captured" in first
    assert "captured" not in second
