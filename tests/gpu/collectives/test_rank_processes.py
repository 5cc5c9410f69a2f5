"""Rank processes, one a GPU, of which one dies, stands still, replays something else, or never comes.

Collected where there are two GPUs or more (see conftest.py): ranks that spin for each other on one device may keep each
other from running, and no capability says that they do not.
"""

from __future__ import annotations

import pytest
import torch

from halma.hal.collectives.contract import WORLD_SIZES
from halma.hal.testing.ranks import RankPools
from tests import rank_processes as processes


@pytest.fixture(scope="module")
def ranks() -> int:
    """As many as there are GPUs, and as channels can have."""
    return max(size for size in WORLD_SIZES if size <= torch.accelerator.device_count())


@pytest.fixture(params=["first", "last"])
def one(request: pytest.FixtureRequest, ranks: int) -> int:
    return 0 if request.param == "first" else ranks - 1


@pytest.mark.invariant("C7", control=True)
def test_nothing_goes_wrong(halma_rank_pools: RankPools, ranks: int) -> None:
    assert halma_rank_pools[ranks].run(processes.a_sum, halma_rank_pools.backend) == [True] * ranks


@pytest.mark.invariant("C7")
def test_a_rank_that_is_stopped_is_named_and_goes_on_later(halma_rank_pools: RankPools, ranks: int, one: int) -> None:
    processes.check_stopped(halma_rank_pools, ranks, one)


@pytest.mark.invariant("C7")
@pytest.mark.invariant("C15")
def test_a_graph_with_another_shape_is_an_error_at_once(halma_rank_pools: RankPools, ranks: int, one: int) -> None:
    processes.check_other_shape(halma_rank_pools, ranks, one)


@pytest.mark.invariant("C7")
@pytest.mark.parametrize("stage", ["group", "channel"])
def test_a_rank_that_never_comes_is_named_and_a_fresh_group_works(
    halma_rank_pools: RankPools, ranks: int, one: int, stage: str
) -> None:
    processes.check_never_started(halma_rank_pools, ranks, one, stage)


@pytest.mark.invariant("C7")
def test_a_rank_killed_during_a_replay_is_named(halma_rank_pools: RankPools, ranks: int, one: int) -> None:
    processes.check_killed(halma_rank_pools, ranks, one)
