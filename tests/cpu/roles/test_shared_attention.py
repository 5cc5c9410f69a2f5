"""Expert parallelism with MTP and with tensor parallelism on the same ranks, in real processes: the tokens of one
process without any of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.hal.errors import ModelError, RequestError
from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4.checkpoint import load_source
from halma.models.deepseek_v4.engine import Request
from halma.models.deepseek_v4.parted import PartedExperts
from halma.models.deepseek_v4.preparation import LoadOptions
from halma.models.deepseek_v4.ranks import ONE_RANK
from halma.models.deepseek_v4.spread import share
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from tests.expert_processes import Shared, count_calls, play, runner_of, served
from tests.role_processes import Job, prompts

SECONDS = 300.0
pytestmark = pytest.mark.timeout(600)
UNEVEN: Mapping[str, Any] = {"vocab_size": 200, "n_routed_experts": 7, "index_topk": 4}
"""A layer whose experts follow from a table, three that are scored, and the module's; 4 and 3 experts a rank."""
EIGHT: Mapping[str, Any] = {**UNEVEN, "num_attention_heads": 8, "o_groups": 8}
MODELS = {"tiny-v4": None, "uneven": UNEVEN, "eight groups": EIGHT}


def job(model: str, count: int, *, graph: bool = True, mtp: int = 0) -> Job:
    """Unequal prompts and answers; of more than three every third one is drawn."""
    changes = MODELS[model]
    given = prompts(count, 24, vocabulary=1024 if changes is None else 200)
    heat = [0.7 * (count > 3 and n % 3 == 2) for n in range(count)]
    requests = [Request(one, 4 + 3 * (n % 3), temperature=heat[n], seed=n) for n, one in enumerate(given)]
    options = {"max_requests": 2, "batches": (), "max_context": 64, "mtp": mtp}
    return Job(tuple(requests), graph=graph, changes=changes, options=options)


@functools.cache
def alone(model: str, count: int, mtp: int = 0) -> Shared:
    return served(job(model, count, graph=False, mtp=mtp))


def in_groups(whole: Job, groups: int) -> list[Job]:
    """Requests by turns to so many groups of ranks: with an odd number of them one has more to do."""
    return [replace(whole, requests=whole.requests[n::groups]) for n in range(groups)]


def check(pools: RankPools, ep: int, tp: int, whole: Job, model: str) -> list[Shared]:
    """Every rank the tokens of one process without MTP; who shares attention has the same."""
    count, groups = len(whole.requests), ep // tp
    expected = alone(model, count)
    found = pools[ep].run(play, in_groups(whole, groups), tp, seconds=SECONDS)
    for rank, one in enumerate(found):
        mine = slice(rank // tp, None, groups)
        assert one.tokens == expected.tokens[mine] and one.finish == expected.finish[mine]
        assert (one.replayed > 0) == (whole.graph and bool(one.tokens))
    return found


# -- drafts beside an exchange ----------------------------------------------------------------------------


@pytest.mark.invariant("M1")
def test_ranks_that_exchange_rows_draft(all_ranks: RankPools) -> None:
    found = check(all_ranks, 2, 1, job("tiny-v4", 2, mtp=3), "tiny-v4")
    assert sum(one.drafted for one in found) > 0


def with_lengths(even: bool, *lengths: int) -> tuple[int, ...]:
    """A runner's numbers of drafts, where all steps must have equally many exchanges or not."""
    experts: Any = type("Experts", (PartedExperts,), {"even": even})(small_config(**UNEVEN), ONE_RANK)
    wanted = replace(job("uneven", 1), graph=False, options={"mtp": 2, "mtp_lengths": lengths})
    return runner_of(wanted, experts=experts).options.draft_lengths


@pytest.mark.invariant("M1")
@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_exchange_rows_have_one_number_of_drafts(other: int) -> None:
    """Ranks that choose unlike would make unequally many exchanges a step, and take one layer's rows for another's."""
    with pytest.raises(RequestError, match=rf"one number of drafts(.|\n)*asked: steps of {other}, 2 drafts"):
        with_lengths(True, other, 2)


@pytest.mark.invariant("M1", control=True)
def test_one_number_of_drafts_is_taken_and_several_where_ranks_have_the_same_requests() -> None:
    assert with_lengths(True, 2) == (2,) and with_lengths(False, 0, 1, 2) == (0, 1, 2)


# -- attention that is shared, experts that are parted ---------------------------------------------------


@pytest.mark.invariant("M11")
@pytest.mark.invariant("M1")
@pytest.mark.parametrize(
    ("model", "mtp", "graph"), [("uneven", 2, True), pytest.param("tiny-v4", 3, False, marks=pytest.mark.nightly)]
)
def test_ranks_with_the_same_rows_run_their_experts(all_ranks: RankPools, model: str, mtp: int, graph: bool) -> None:
    found = check(all_ranks, 2, 2, job(model, 3, mtp=mtp, graph=graph), model)
    count = small_config(**UNEVEN).n_routed_experts if model == "uneven" else 16
    (first, middle), (same, last) = (one.experts for one in found)
    assert first == 0 < middle == same < last == count and abs(2 * middle - count) <= 1


@pytest.mark.invariant("M11", control=True)
def test_all_experts_on_one_rank_give_its_bits_and_a_part_gives_other_tokens() -> None:
    """So the tokens above depend on experts of both ranks."""
    wanted, config = job("uneven", 3, graph=False), small_config(**UNEVEN)
    whole = served(wanted, experts=PartedExperts(config, ONE_RANK))
    assert whole.experts == (0, 7) and whole.tokens == alone("uneven", 3).tokens
    for first, last in ((0, 4), (4, 7)):
        part = PartedExperts(config, ONE_RANK)
        part.held, part._first, part._count = (first, last), first, last - first
        assert served(wanted, experts=part).tokens != whole.tokens


def test_nothing_is_sent_for_the_experts(all_ranks: RankPools) -> None:
    """A step of parted experts sends what one of divided experts does: tests/cpu/model/test_tensor_parallel.py."""
    layers, requests, width = 4, 3, 128
    wanted = replace(job("uneven", 0, graph=False), options={"max_context": 64})
    for calls in all_ranks[2].run(count_calls, wanted, seconds=SECONDS):
        assert [nbytes for kind, nbytes in calls if kind == "all_reduce"] == [requests * width * 4] * (2 * layers + 1)
        assert [nbytes for kind, nbytes in calls if kind != "all_reduce"] == [requests * 8]


@pytest.mark.invariant("M11")
@pytest.mark.parametrize("dequantise", [True, False])
def test_a_part_of_the_experts_is_whole_and_the_shared_one_is_cut(dequantise: bool) -> None:
    config = small_config(**UNEVEN, moe_intermediate_size=256)
    source = SyntheticSource(config, seed=3)
    options = LoadOptions(dequantise=dequantise)
    whole = load_source(config, source, options).weights
    part = load_source(config, source, replace(options, rank=1, world=2, experts=(3, 7))).weights
    for mine, all_of_it in zip((*part.layers, part.mtp[0].block), (*whole.layers, whole.mtp[0].block), strict=True):
        for name in ("gate_up", "down"):
            here, there = getattr(mine.ffn, name), getattr(all_of_it.ffn, name)
            assert here.format == there.format and torch.equal(here.data, there.data[3:7])
        gate, up = all_of_it.ffn.shared_gate_up.data[128:256], all_of_it.ffn.shared_gate_up.data[384:]
        shared = mine.ffn.shared_gate_up.data
        assert torch.equal(shared.view(torch.uint8), torch.cat((gate.view(torch.uint8), up.view(torch.uint8))))
        assert mine.attn.wq_b.shape[0] * 2 == all_of_it.attn.wq_b.shape[0]


def test_more_ranks_than_experts_are_refused_with_the_legal_numbers() -> None:
    eight: Any = type("Ranks", (), {"rank": 0, "size": 8})()
    with pytest.raises(ModelError, match=r"more ranks than experts(.|\n)*7 routed experts(.|\n)*--ep 1 to 7"):
        PartedExperts(small_config(**UNEVEN), eight)


# -- groups of ranks in one exchange ----------------------------------------------------------------------


def shares(rows: int, size: int) -> list[tuple[int, int]]:
    ranks: list[Any] = [type("Ranks", (), {"rank": rank, "size": size})() for rank in range(size)]
    return [share(rows, one) for one in ranks]


@pytest.mark.invariant("M11")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_row_is_sent_by_one_rank_of_a_group(size: int) -> None:
    for rows in range(70):
        parts = shares(rows, size)
        assert [row for part in parts for row in range(*part)] == list(range(rows))
        assert max(last - first for first, last in parts) == -(-rows // size)


@pytest.mark.invariant("W1")
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_no_rank_sends_more_of_fewer_rows(size: int) -> None:
    """A plan of the largest step holds the others: three of eight ranks' rows, cut by r * M // N, did not."""
    counts = [[last - first for first, last in shares(rows, size)] for rows in range(70)]
    for less, more in itertools.pairwise(counts):
        assert all(few <= many for few, many in zip(less, more, strict=True))


@pytest.mark.nightly
@pytest.mark.invariant("M11")
def test_a_group_without_requests_goes_along(all_ranks: RankPools) -> None:
    wanted = job("uneven", 3, mtp=2)
    idle, busy = replace(wanted, requests=()), wanted
    found = all_ranks[4].run(play, [idle, busy], 2, seconds=SECONDS)
    assert [one.tokens for one in found[:2]] == [[], []]
    assert [one.tokens for one in found[2:]] == [alone("uneven", 3).tokens] * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.invariant("M1")
@pytest.mark.invariant("M11")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("count", [1, 5], ids="{} requests".format)
@pytest.mark.parametrize("mtp", [0, 1, 4], ids="mtp {}".format)
@pytest.mark.parametrize(
    ("ep", "tp", "model"),
    [(2, 1, "tiny-v4"), (3, 1, "uneven"), (2, 2, "tiny-v4"), (2, 2, "uneven"), (4, 2, "uneven")]
    + [(4, 4, "eight groups")],
)
def test_every_way_gives_the_tokens_of_one_process(
    all_ranks: RankPools, ep: int, tp: int, model: str, mtp: int, count: int, graph: bool
) -> None:
    found = check(all_ranks, ep, tp, job(model, count, mtp=mtp, graph=graph), model)
    drafted = sum(one.drafted for one in found[::tp])
    assert drafted == alone(model, count, mtp).drafted and (drafted > 0 or mtp == 0 or model != "tiny-v4")
