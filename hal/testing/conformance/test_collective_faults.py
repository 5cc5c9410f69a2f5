"""Missing, killed and mistaken ranks: an error that names them, within the bound, and a channel that goes on."""

from __future__ import annotations

import re

import pytest

from halma.hal.backend import Backend
from halma.hal.testing.conformance import collective_faults as programs
from halma.hal.testing.conformance.collective_setup import BRIEF
from halma.hal.testing.ranks import Lost, RankPools

MARGIN = 20.0
"""Seconds that a busy machine may add to a bound."""


@pytest.mark.invariant("C7")
@pytest.mark.parametrize(
    ("size", "absent", "way"), [(2, 1, None), (2, 0, 1), (4, 2, None)], ids=["last", "first by sentinel", "of four"]
)
def test_a_rank_that_stays_away_is_named_and_the_channel_goes_on(
    ranks: RankPools, size: int, absent: int, way: int | None
) -> None:
    for found in ranks[size].run(programs.stay_away, ranks.backend, absent, 3, way):
        assert found["after"] == [True] * 3, "the same graph, without another capture"
        if found["rank"] == absent:
            assert found["flags"] == [4] * (size - 1), "after the fault nobody sent anything"
            continue
        assert (found["fault"], found["call"], found["expected"]) == ("TIMEOUT", 4, 4)
        assert found["peer"] == absent and found["stragglers"] == [absent]
        assert f"rank {absent} (global rank {absent} on " in found["text"] and "all_reduce of 80 bytes" in found["text"]
        assert "rearm()" in found["text"] and "RankError" not in found["sticky"] and "ChannelFault" in found["sticky"]
        assert found["nan"] and BRIEF <= found["seconds"] < BRIEF + MARGIN, "one bound for all that was queued"


@pytest.mark.invariant("C7", control=True)
@pytest.mark.invariant("C12", control=True)
def test_a_rank_that_is_late_within_the_bound_is_waited_for(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.late_but_there, all_ranks.backend, 2 * BRIEF) == [True, True]


@pytest.mark.invariant("C2")
@pytest.mark.invariant("A10")
@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
def test_a_channel_that_is_opened_again_has_nothing_of_the_first_time(all_ranks: RankPools, faulty: bool) -> None:
    for found in all_ranks[2].run(programs.opened_again, all_ranks.backend, faulty):
        assert found["flags"] == [0] and found["epoch"] == 0, "a flag of the first time would be taken for an arrival"
        assert found["sums"] == [1.0, 3.0, 5.0]
        assert 'channel "main" of the arena has a communicator' in found["beside"] and found["again"] == found["beside"]


def test_nothing_uses_an_arena_that_was_closed_first(all_ranks: RankPools) -> None:
    for found in all_ranks[2].run(programs.arena_first, all_ranks.backend):
        assert [name for name, said in found.items() if "the arena is closed" not in said] == []


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_and_the_others_live(all_ranks: RankPools, victim: int) -> None:
    found = all_ranks[2].run(programs.leaving, programs.end_suddenly, all_ranks.backend, victim, lost=[victim])
    assert isinstance(found[victim], Lost) and "exit status -9" in found[victim].why
    survivor = found[1 - victim]
    assert (survivor["fault"], survivor["peer"], survivor["stragglers"]) == ("TIMEOUT", victim, [victim])
    assert survivor["nan"] and survivor["usable"] and survivor["seconds"] < BRIEF + MARGIN
    assert survivor["answered"] == [1 - victim] and f"no answer from rank {victim}" in survivor["text"]


@pytest.mark.invariant("C7")
@pytest.mark.invariant("C15")
@pytest.mark.parametrize("what", ["shape", "dtype", "kind", "step"])
def test_another_call_is_an_error_at_once_also_unchecked(all_ranks: RankPools, what: str) -> None:
    for found in all_ranks[2].run(programs.other_call, all_ranks.backend, 1, what, False):
        assert found["fault"] == "MISMATCH" and found["expected"] != found["seen"]
        assert found["seconds"] < MARGIN, "not after the bound, which is a minute here"
        assert found["after"], "and the channel goes on after rearm()"
        first = found["text"].splitlines()[0].split("makes another call: ")[1]
        assert re.match(r"(all_reduce|broadcast) of \d+ bytes", first), "also of a call that this rank never made"


@pytest.mark.invariant("C7")
def test_behind_a_wait_a_mismatch_is_known_before_anything_is_read(ranks: RankPools) -> None:
    for found in ranks[2].run(programs.waited_for, ranks.backend, True):
        assert found["fault"] == "MISMATCH" and "ChannelFault" in found["next"] and found["after"] == 2.0


@pytest.mark.invariant("C7", control=True)
def test_behind_a_wait_sums_are_right(ranks: RankPools) -> None:
    for found in ranks[2].run(programs.waited_for, ranks.backend, False):
        assert found == {"fault": "NONE", "right": True, "after": 2.0}


@pytest.mark.invariant("C7")
def test_a_newer_flag_is_reported_at_once(all_ranks: RankPools) -> None:
    behind, ahead = all_ranks[2].run(programs.one_rank_ahead, all_ranks.backend)
    assert (behind["fault"], behind["expected"], behind["seen"]) == ("OVERRUN", 7, 9)
    assert behind["seconds"] < MARGIN and ahead["fault"] in ("TIMEOUT", "OVERRUN")


@pytest.mark.invariant("C6")
@pytest.mark.invariant("C12")
@pytest.mark.parametrize("what", ["shape", "dtype", "kind", "step"])
def test_checked_mode_names_the_first_difference_before_anybody_waits(all_ranks: RankPools, what: str) -> None:
    differs = {"shape": "56 bytes", "dtype": "float16", "kind": "broadcast", "step": "prefill of 7"}[what]
    for found in all_ranks[2].run(programs.other_call, all_ranks.backend, 1, what, True):
        assert found["fault"] == "NONE" and found["flight"] == 0, "nothing was launched"
        assert "eager call 1 of channel main" in found["error"] and differs in found["error"]
        assert found["after"]


@pytest.mark.invariant("C6", control=True)
@pytest.mark.parametrize("checked", [True, False])
def test_the_same_call_on_every_rank_is_none(all_ranks: RankPools, checked: bool) -> None:
    for found in all_ranks[2].run(programs.other_call, all_ranks.backend, 1, "nothing", checked):
        assert (found["error"], found["fault"], found["flight"], found["after"]) == ("", "NONE", 1, True)


@pytest.mark.invariant("C6")
@pytest.mark.parametrize("checked", [False, True], ids=["asked", "before the first replay"])
def test_captured_calls_are_compared_as_a_list(ranks: RankPools, checked: bool) -> None:
    for found in ranks[2].run(programs.captured_lists, ranks.backend, 1, checked):
        assert "captured call 2" in found and "40 bytes" in found and "48 bytes" in found
    good = ranks[2].run(programs.captured_lists, ranks.backend, None, checked)
    assert good == (["4.0"] if checked else ["2 calls"]) * 2


@pytest.mark.invariant("C4")
def test_a_channel_has_one_stream_at_a_time(ranks: RankPools) -> None:
    for found in ranks[2].run(programs.two_streams, ranks.backend):
        for name in ("captured", "eager", "replayed"):
            assert found[name].startswith("CollectiveError") and "used on two streams" in found[name], name


@pytest.mark.invariant("C4", control=True)
def test_a_hand_over_orders_the_streams(ranks: RankPools) -> None:
    for found in ranks[2].run(programs.two_streams, ranks.backend):
        assert found["right"] == "True"


def test_who_does_not_come_to_an_exchange_is_named(all_ranks: RankPools, halma_backend: Backend) -> None:
    found = all_ranks[2].run(programs.absent_from_exchange, all_ranks.backend, 1)
    assert "rank 1 (global rank 1 on " in found[0] and "did not come to 'the plan'" in found[0]
    for said in found:
        assert "'one stage'" in said and "'another stage'" in said and "at different stages" in said
