"""Attention and FFN ranks as processes: the tokens of one process, and what becomes of them when one of them fails."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from tests.role_processes import (
    Job,
    Served,
    attend,
    bad_header,
    mismatch,
    never_comes,
    out_of_turn,
    play,
    play_until,
    prompts,
    too_many,
)

SECONDS = 300.0
BOUND = 3.0
MARGIN = 20.0
"""Seconds that a busy machine may add to a bound."""
pytestmark = pytest.mark.timeout(600)


def job(**changes: Any) -> Job:
    """Four requests through three slots: prompts of several chunks, requests that come and go."""
    given = {"requests": tuple(Request(prompt, 6 + 3 * (n % 2)) for n, prompt in enumerate(prompts(4, 30)))}
    return Job(**{**given, **changes})


@functools.cache
def alone(*changes: tuple[str, Any]) -> Served:
    return attend(job(**dict(changes)))


# -- the same tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        (("graph", True),),
        (("graph", False), ("ffn_graph", False)),
        (("graph", True), ("arithmetic", "shipping"), ("ffn_graph", False)),
    ],
    ids=["graph", "eager", "shipping"],
)
def test_one_of_each_gives_the_tokens_of_one_process(all_ranks: RankPools, changes: tuple[tuple[str, Any], ...]):
    expected = alone(*changes)
    served, counters = all_ranks[2].run(play, [job(**dict(changes))], 1, seconds=SECONDS)
    assert served.tokens == expected.tokens and served.finish == expected.finish
    assert (served.replayed, served.eager) == (expected.replayed, expected.eager)
    assert (served.replayed > 0) == dict(changes)["graph"]
    assert 0 < served.weights < expected.weights / 2, "an attention rank holds no expert"
    # Four layers a step; every step's rows go there, padding included.
    assert counters["items"] == 4 * (served.replayed + served.eager) and counters["shared"] == counters["rows"]
    if job(**dict(changes)).ffn_graph:
        assert counters["program"]["replays"] > 0 and counters["program"]["eager_items"] > 0


@pytest.mark.nightly
def test_drafts_and_their_module_go_through_the_rings_too(all_ranks: RankPools):
    drafting = job(options={"mtp": 2})
    served, counters = all_ranks[2].run(play, [drafting], 1, seconds=SECONDS)
    assert served.tokens == attend(drafting).tokens == alone(("graph", True)).tokens
    assert counters["items"] > 4 * (served.replayed + served.eager)


def test_experts_may_be_split_unevenly(all_ranks: RankPools):
    """In float64, where the order of a sum over two ranks moves no token."""
    wide = job(carrier=torch.float64)
    served, few, many = all_ranks[3].run(play, [wide], 2, seconds=SECONDS, each=[((0, 3, 16),)] * 3)
    assert served.tokens == attend(wide).tokens
    assert few["items"] == many["items"] and 0 < few["pairs"] < many["pairs"]
    # Four choices a row, and one shared expert.
    assert few["pairs"] + many["pairs"] == 4 * (few["shared"] + many["shared"])


@pytest.mark.invariant("F15")
def test_an_idle_attention_rank_blocks_nobody(all_ranks: RankPools):
    busy, idle = job(), job(requests=())
    served, nothing, counters = all_ranks[3].run(play, [busy, idle], 1, seconds=90.0)
    assert served.tokens == alone().tokens and nothing is None
    assert counters["items"] == 4 * (served.replayed + served.eager)


@pytest.mark.invariant("F15", control=True)
def test_two_busy_attention_ranks_share_an_ffn_rank(all_ranks: RankPools):
    first, second = job(), job(requests=job().requests[::-1][:3])
    one, two, counters = all_ranks[3].run(play, [first, second], 1, seconds=SECONDS)
    assert one.tokens == alone().tokens and two.tokens == attend(second).tokens
    assert counters["items"] == 4 * sum(served.replayed + served.eager for served in (one, two))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_begins_late_is_waited_for(all_ranks: RankPools, late: int):
    served, _ = all_ranks[2].run(play, [job()], 1, seconds=SECONDS, each=[((), {late: 1.0})] * 2)
    assert served.tokens == alone().tokens


def short_requests(count: int) -> Job:
    """Prompts of one chunk or two, answers of a few tokens: prefill and decode come by turns."""
    requests = tuple(Request(prompt, 1 + n % 5) for n, prompt in enumerate(prompts(count, 20)))
    return job(requests=requests, options={"max_requests": 8, "batches": (1, 2, 4, 8), "max_context": 64})


@pytest.mark.parametrize("count", [24, pytest.param(8192, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])])
def test_many_short_requests_that_mix_prefill_and_decode(all_ranks: RankPools, count: int):
    wanted = short_requests(count)
    served, counters = all_ranks[2].run(play, [wanted], 1, seconds=20 * SECONDS)
    expected = attend(wanted)
    assert len(served.tokens) == count and served.tokens == expected.tokens and served.finish == expected.finish
    assert counters["items"] == 4 * (served.replayed + served.eager)
    assert served.eager >= count and served.replayed > count // 8, "a prompt is a step or two, and a batch many"


# -- one of them fails ------------------------------------------------------------------------------------


@pytest.mark.invariant("F16")
@pytest.mark.parametrize(
    ("victim", "graph"),
    [
        pytest.param(0, True, id="attention-graph"),
        pytest.param(1, False, id="ffn-eager"),
        pytest.param(0, False, id="attention-eager", marks=pytest.mark.nightly),
        pytest.param(1, True, id="ffn-graph", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_dies_ends_the_other_with_its_name(all_ranks: RankPools, victim: int, graph: bool):
    long = job(graph=graph, requests=tuple(Request(prompt, 60) for prompt in prompts(3, 30)))
    found = all_ranks[2].run(play_until, [long], 1, victim, "dies", BOUND, seconds=60.0, lost=[victim])
    assert isinstance(found[victim], Lost) and "exit status 9" in found[victim].why
    said, seconds = found[1 - victim]
    role = ("attention 0", "FFN 0")[victim]
    assert said.startswith(f"RankError: rank {victim} ({role}, global rank {victim} on ") and "ended" in said
    assert seconds < BOUND + MARGIN


@pytest.mark.invariant("F16")
@pytest.mark.invariant("C7")
def test_an_ffn_rank_that_stands_still_is_named_within_the_bound(all_ranks: RankPools):
    long = job(requests=tuple(Request(prompt, 60) for prompt in prompts(3, 30)))
    found = all_ranks[2].run(play_until, [long], 1, 1, "stands still", BOUND, seconds=60.0, lost=[1])
    assert isinstance(found[1], Lost)
    said, seconds = found[0]
    assert "RankError: rank 1 (FFN 0, " in said and f"did not do its part within {BOUND:.0f}" in said
    assert "its reply: item" in said and BOUND <= seconds < BOUND + MARGIN


@pytest.mark.invariant("G26")
@pytest.mark.parametrize("victim", [0, 1], ids=["attention", "ffn"])
def test_a_rank_that_fails_tells_the_other_why(all_ranks: RankPools, victim: int):
    long = job(requests=tuple(Request(prompt, 60) for prompt in prompts(3, 30)))
    found = all_ranks[2].run(play_until, [long], 1, victim, "fails", BOUND, seconds=60.0)
    assert found[victim][0] == "ModelError: its experts are lost"
    said, _ = found[1 - victim]
    assert said.startswith(f"RankError: rank {victim} (") and " left\n" in said and "its experts are lost" in said


# -- before the first item --------------------------------------------------------------------------------


@pytest.mark.invariant("F14")
@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (1, {"max_tokens": 32}, ("max_tokens: rank 0 (", " has 16, rank 1 (", " has 32")),
        (0, {"top_k": 2, "layers": 3}, ("top_k: rank 0 (", " has 2, rank 1", "layers: rank 0 (", " has 3, rank 1")),
        (1, {"experts": (0, 8)}, ("experts: rank 0 (", " has (0, 16), rank 1")),
        (1, {"depth": 4}, ("depth: rank 0 (", " has 2, rank 1")),
        (1, {"model": (("swiglu_limit", 7.0),)}, ("swiglu_limit: rank 0", "arithmetic: rank 0 (", "not said")),
    ],
    ids=["tokens", "two fields", "experts", "depth", "model"],
)  # fmt: skip
def test_geometries_are_compared_field_by_field(all_ranks: RankPools, rank: int, change: Any, words: tuple[str, ...]):
    changes = [change if rank == one else {} for one in range(2)]
    for said in all_ranks[2].run(mismatch, job(), changes):
        assert said.startswith("CollectiveError: attention and FFN ranks were made for different shapes"), said
        for word in words:
            assert word in said


@pytest.mark.invariant("F14", control=True)
def test_equal_geometries_are_opened(all_ranks: RankPools):
    assert all_ranks[2].run(mismatch, job(), [{}, {}]) == ["", ""]


def test_a_batch_above_the_declared_worst_case_is_refused_and_nothing_is_sent(all_ranks: RankPools):
    (said, _), (_, seen) = all_ranks[2].run(too_many, job())
    assert "does not fit the declared worst case, and nothing was sent" in said and "9 rows" in said and not seen


def test_calls_out_of_turn_are_refused(all_ranks: RankPools):
    (nothing, layer, dtype, full, rows), (ffn,) = all_ranks[2].run(out_of_turn, job())
    assert "no item is under way" in nothing and "there is no layer 4" in layer and "rings are full" in full
    assert "ids does not fit the rings" in dtype and "out does not fit the rings" in rows
    assert "an FFN rank submits nothing" in ffn


@pytest.mark.invariant("F2")
def test_a_header_whose_counts_do_not_sum_is_refused(all_ranks: RankPools):
    said = all_ranks[2].run(bad_header, job())[1]
    assert "RankError: attention rank 0 sent a header that cannot be" in said and "layer 99 of 4" in said
    assert "13 pairs of 3 rows and 4 choices" in said and "shared rows to 4" in said


def test_a_rank_that_never_comes_is_named(all_ranks: RankPools):
    said = all_ranks[2].run(never_comes, job(), 1, 1.0)[0]
    assert "RankError" in said and "rank 1 (global rank 1 on " in said
    assert "did not come to 'the geometry of roles'" in said


def test_a_geometry_without_sense_is_refused():
    from halma.hal.errors import CollectiveError
    from tests.role_processes import geometry

    right = geometry(job(), 1, 2)
    for change, word in (
        ({"experts": (0, 8, 8)}, "each above the one before"),
        ({"experts": (0, 16)}, "must be 3 bounds"),
        ({"top_k": 17}, "top_k = 17; there are 16 experts"),
        ({"depth": 3}, "power of two"),
        ({"reply": "int8"}, "dtype int8"),
    ):
        with pytest.raises(CollectiveError, match=word):
            replace(right, **change)
