"""Expert parallelism without roles, in real processes: every rank the tokens that one process gives its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from tests.role_processes import Job, attend, play_spread, prompts, spread_until_one_dies

SECONDS = 300.0
pytestmark = pytest.mark.timeout(600)


def jobs(*shares: slice, **changes: object) -> list[Job]:
    """Jobs with their share of seven requests each."""
    requests = tuple(Request(prompt, 4 + 2 * (n % 3)) for n, prompt in enumerate(prompts(7, 30)))
    return [replace(Job(requests[share]), **changes) for share in shares]  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["graph", "eager"])
def test_ranks_with_unequal_work_give_the_tokens_of_one_process(all_ranks: RankPools, graph: bool) -> None:
    work = jobs(slice(0, 5), slice(5, 7), graph=graph)
    found = all_ranks[2].run(play_spread, work, seconds=SECONDS)
    for served, job in zip(found, work, strict=True):
        alone = attend(job)
        assert served.tokens == alone.tokens and (served.replayed > 0) == graph
        # Half of the routed experts, and all of the rest.
        assert alone.weights / 3 < served.weights < alone.weights
    steps = [one.replayed + one.eager for one in found]
    assert steps[0] > steps[1] > 0, "the second rank went along with steps that were not its own"


@pytest.mark.invariant("F4")
def test_a_rank_without_requests_goes_along(all_ranks: RankPools) -> None:
    nothing, everything = jobs(slice(0, 0), slice(0, 4))
    idle, busy = all_ranks[2].run(play_spread, [nothing, everything], seconds=SECONDS)
    assert idle.tokens == [] and busy.tokens == attend(everything).tokens


@pytest.mark.nightly
def test_experts_that_do_not_divide_are_spread_unevenly(all_ranks: RankPools) -> None:
    """Three ranks, which share no channel, of seven experts, in float64."""
    changes = {"n_routed_experts": 7, "num_experts_per_tok": 3}
    requests = tuple(Request(prompt, 4) for prompt in prompts(5, 20, vocabulary=200))
    work = [Job(requests[n::3], changes=changes, carrier=torch.float64) for n in range(3)]
    found = all_ranks[3].run(play_spread, work, seconds=SECONDS)
    for served, job in zip(found, work, strict=True):
        assert served.tokens == attend(job).tokens


@pytest.mark.invariant("F16")
def test_a_rank_that_dies_ends_the_other_with_its_name(all_ranks: RankPools) -> None:
    work = jobs(slice(0, 4), slice(4, 7))
    found = all_ranks[2].run(spread_until_one_dies, work, 3.0, seconds=SECONDS, lost=[1])
    assert isinstance(found[1], Lost) and "exit status 9" in found[1].why
    assert "RankError" in found[0] or "ChannelFault" in found[0]
    assert "rank 1 (global rank 1 on " in found[0], found[0]
