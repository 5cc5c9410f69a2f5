"""Attention and FFN ranks on GPUs of their own: the tokens of one process, idle ranks, and ranks that fail.

Collected where there are two GPUs or more: ranks that wait for each other on one device may keep each other from
running.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from tests.role_group_processes import play_grouped
from tests.role_processes import Job, attend, mismatch, play, play_spread, play_until, prompts, too_many

SECONDS = 400.0
BOUND = 3.0
MARGIN = 30.0
IDLE = 10.0
pytestmark = pytest.mark.timeout(900)


def job(backend: str, **changes: Any) -> Job:
    """Shipping arithmetic, and FFN ranks that run the very ops of one process: the same bits."""
    requests = tuple(Request(prompt, 12) for prompt in prompts(6, 40))
    return Job(backend=backend, **{"requests": requests, "arithmetic": "shipping", "ffn_graph": False, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"graph": True}, {"graph": False}, {"arithmetic": "exact", "ffn_graph": True}],
    ids=["graph", "eager", "ladder"],
)
def test_one_of_each_gives_the_tokens_of_one_process(halma_rank_pools: RankPools, changes: dict[str, Any]) -> None:
    """A ladder's grouped products round in other places, so with one the arithmetic is exact."""
    wanted = job(halma_rank_pools.backend, **changes)
    served, counters = halma_rank_pools[2].run(play, [wanted], 1, seconds=SECONDS)
    alone = attend(wanted)
    assert served.tokens == alone.tokens and served.finish == alone.finish
    assert (served.replayed, served.eager) == (alone.replayed, alone.eager) and (served.replayed > 0) == wanted.graph
    assert counters["items"] >= 4 * (served.replayed + served.eager)
    assert not wanted.ffn_graph or counters["program"]["replays"] > 0


@pytest.mark.invariant("F15")
def test_an_attention_rank_that_submits_nothing_for_a_while_goes_on(halma_rank_pools: RankPools) -> None:
    wanted = job(halma_rank_pools.backend)
    began = time.monotonic()
    served, _ = halma_rank_pools[2].run(play, [wanted], 1, seconds=SECONDS, each=[((), None, (IDLE,))] * 2)
    assert time.monotonic() - began > IDLE and served.tokens == attend(wanted).tokens


@pytest.mark.invariant("F15")
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_graph_without_headers_gives_the_tokens_of_one_process(halma_rank_pools: RankPools, ranks: int) -> None:
    """With three ranks one of two attention ranks has nothing to ask."""
    need_devices(ranks)
    wanted = job(halma_rank_pools.backend, arithmetic="exact", ffn_graph=True, items="worst-case")
    jobs = [wanted, replace(wanted, requests=())][: ranks - 1]
    served, *_, counters = halma_rank_pools[ranks].run(
        play, jobs, 1, seconds=SECONDS, each=[((), None, (1.0,))] * ranks
    )
    assert served.tokens == attend(wanted).tokens and served.replayed > 0
    assert counters["way"]["chosen"] == "worst-case" and counters["items"] >= 4 * (served.replayed + served.eager)


@pytest.mark.parametrize("ffn", [1, 2])
def test_attention_ranks_that_share_a_model_give_the_tokens_of_one_process(
    halma_rank_pools: RankPools, ffn: int
) -> None:
    need_devices(2 + ffn)
    wanted = job(halma_rank_pools.backend, arithmetic="exact", ffn_graph=True)
    first, second, *served = halma_rank_pools[2 + ffn].run(play_grouped, [wanted], ffn, 2, seconds=SECONDS)
    assert first.tokens == second.tokens == attend(wanted).tokens and first.replayed > 0
    assert all(one["items"] >= 4 * (first.replayed + first.eager) for one in served)


def need_devices(count: int) -> None:
    there = torch.accelerator.device_count()
    if there < count:
        pytest.skip(f"needs {count} devices, there are {there}")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_begins_late_is_waited_for(halma_rank_pools: RankPools, late: int) -> None:
    wanted = job(halma_rank_pools.backend)
    served, _ = halma_rank_pools[2].run(play, [wanted], 1, seconds=SECONDS, each=[((), {late: 2.0})] * 2)
    assert served.tokens == attend(wanted).tokens


@pytest.mark.parametrize("count", [64, pytest.param(8192, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
def test_many_short_requests_that_mix_prefill_and_decode(halma_rank_pools: RankPools, count: int) -> None:
    requests = tuple(Request(prompt, 1 + n % 5) for n, prompt in enumerate(prompts(count, 20)))
    options = {"max_requests": 64, "batches": (1, 4, 16, 64), "max_context": 64, "chunk": 32}
    wanted = job(halma_rank_pools.backend, requests=requests, options=options)
    with ThreadPoolExecutor(1) as side, torch.no_grad():  # beside each other: thousands of eager prefills take minutes
        ranks = side.submit(halma_rank_pools[2].run, play, [wanted], 1, seconds=1500.0)
        alone = attend(wanted)
        served, _ = ranks.result()
    assert len(served.tokens) == count and served.tokens == alone.tokens and served.finish == alone.finish


@pytest.mark.invariant("F16")
@pytest.mark.parametrize("victim", [0, 1], ids=["attention", "ffn"])
def test_a_rank_that_dies_ends_the_other_with_its_name(halma_rank_pools: RankPools, victim: int) -> None:
    long = job(halma_rank_pools.backend, requests=tuple(Request(prompt, 80) for prompt in prompts(3, 30)))
    found = halma_rank_pools[2].run(play_until, [long], 1, victim, "dies", BOUND, seconds=SECONDS, lost=[victim])
    assert isinstance(found[victim], Lost)
    said, seconds = found[1 - victim]
    role = ("attention 0", "FFN 0")[victim]
    assert said.startswith(f"RankError: rank {victim} ({role}, global rank {victim} on ") and "ended" in said
    assert seconds < BOUND + MARGIN


def test_expert_parallel_ranks_with_unequal_work_give_the_tokens_of_one_process(halma_rank_pools: RankPools) -> None:
    whole = job(halma_rank_pools.backend, arithmetic="exact")
    work = [replace(whole, requests=whole.requests[:4]), replace(whole, requests=whole.requests[4:])]
    for served, mine in zip(halma_rank_pools[2].run(play_spread, work, seconds=SECONDS), work, strict=True):
        assert served.tokens == attend(mine).tokens


@pytest.mark.invariant("F14")
def test_geometries_are_compared_by_name(halma_rank_pools: RankPools) -> None:
    for said in halma_rank_pools[2].run(mismatch, job(halma_rank_pools.backend), [{}, {"max_tokens": 32}]):
        assert "max_tokens: rank 0 (" in said and " has 16, rank 1 (" in said and " has 32" in said


def test_a_batch_above_the_declared_worst_case_is_refused(halma_rank_pools: RankPools) -> None:
    (said, _), (_, seen) = halma_rank_pools[2].run(too_many, job(halma_rank_pools.backend))
    assert "does not fit the declared worst case, and nothing was sent" in said and not seen
