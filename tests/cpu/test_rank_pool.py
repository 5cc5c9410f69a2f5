"""The pool of rank processes that tests of collectives draw from."""

from __future__ import annotations

import operator
import os
import time

import pytest

from halma.hal.testing.ranks import Lost, RankFailure, RankPool, RankPools


def test_results_come_by_rank_and_processes_stay(halma_rank_pools: RankPools) -> None:
    pool = halma_rank_pools[2]
    first, starts = pool.run(os.getpid), pool.starts
    assert pool.run(os.getpid) == first and len(set(first)) == 2 and os.getpid() not in first
    assert pool.run(operator.add, each=[(1, 2), (3, 4)]) == [3, 7]
    assert pool.run(operator.mul, 5, each=[(1,), (2,)]) == [5, 10] and pool.starts == starts
    assert halma_rank_pools[2] is pool


def test_every_ranks_traceback_is_shown(halma_rank_pools: RankPools) -> None:
    with pytest.raises(RankFailure, match="2 of 2 ranks failed in truediv") as caught:
        halma_rank_pools[2].run(operator.truediv, 1, 0)
    assert sorted(caught.value.stories) == [0, 1]
    assert all("ZeroDivisionError" in story for story in caught.value.stories.values())
    assert halma_rank_pools[2].run(operator.add, 1, 1) == [2, 2], "the pool starts anew"


def test_a_rank_that_ends_is_named_and_only_its_pool_suffers(halma_rank_pools: RankPools) -> None:
    other = halma_rank_pools[1].run(os.getpid)
    with pytest.raises(RankFailure) as caught:
        halma_rank_pools[2].run(_end, each=[(0,), (7,)])
    assert "exit status 7" in caught.value.stories[1] and 0 not in caught.value.stories
    assert halma_rank_pools[1].run(os.getpid) == other
    found = halma_rank_pools[2].run(_end, each=[(0,), (7,)], lost=[1])
    assert found[0] == "alive" and isinstance(found[1], Lost)


def test_a_rank_that_hangs_is_named_within_the_bound() -> None:
    pool = RankPool(2)
    pool.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 did not come back within 1 s"):
        pool.run(time.sleep, each=[(0.0,), (3600.0,)], seconds=1.0)
    assert time.monotonic() - began < 30
    pool.close()


def test_a_rank_that_may_hang_is_not_waited_for_once_the_others_are_back() -> None:
    pool = RankPool(2)
    began = time.monotonic()
    found = pool.run(time.sleep, each=[(0.0,), (3600.0,)], seconds=600.0, lost=[1])
    assert found[0] is None and isinstance(found[1], Lost) and time.monotonic() - began < 300
    pool.close()


def _end(status: int) -> str:
    if status:
        os._exit(status)
    return "alive"
