"""Rank processes on the CPU of which one dies, stands still, replays something else, or never comes."""

from __future__ import annotations

import pytest

from halma.hal.testing.ranks import RankPools
from tests import rank_processes as processes


@pytest.mark.invariant("C7")
def test_a_rank_killed_during_a_replay_is_named(halma_rank_pools: RankPools) -> None:
    processes.check_killed(halma_rank_pools, 2, 1)


@pytest.mark.invariant("C7")
@pytest.mark.parametrize(("size", "victim"), [(2, 0), pytest.param(4, 2, marks=pytest.mark.nightly)])
def test_a_rank_that_is_stopped_is_named_and_goes_on_later(halma_rank_pools: RankPools, size: int, victim: int) -> None:
    processes.check_stopped(halma_rank_pools, size, victim)


@pytest.mark.invariant("C7")
@pytest.mark.invariant("C15")
def test_a_graph_with_another_shape_is_an_error_at_once(halma_rank_pools: RankPools) -> None:
    processes.check_other_shape(halma_rank_pools, 2, 1)


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("stage", ["group", "channel"])
def test_a_rank_that_never_comes_is_named_and_a_fresh_group_works(halma_rank_pools: RankPools, stage: str) -> None:
    processes.check_never_started(halma_rank_pools, 2, 1, stage)


@pytest.mark.nightly
@pytest.mark.invariant("C7")
def test_a_rank_of_four_killed_during_a_replay_is_named(halma_rank_pools: RankPools) -> None:
    processes.check_killed(halma_rank_pools, 4, 0)
