"""Expert parallelism on GPUs, with MTP and with tensor parallelism on the same ranks: the tokens of one GPU.

Collected where there are two GPUs or more; see conftest.py. Groups of ranks want four.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4.engine import Request
from tests.expert_processes import play, served
from tests.role_processes import Job, prompts

SECONDS = 400.0
pytestmark = pytest.mark.timeout(900)
UNEVEN = {"vocab_size": 200, "n_routed_experts": 7, "index_topk": 4}
WAYS = [(2, 1), (2, 2)] + ([(4, 2)] if torch.accelerator.device_count() >= 4 else [])
"""(ranks of the experts, ranks that share attention)."""


def job(backend: str, count: int, *, graph: bool = True, mtp: int = 0, uneven: bool = False) -> Job:
    """Exact arithmetic, in which ranks change the order of sums and nothing else."""
    given = prompts(count, 40, vocabulary=200 if uneven else 1024)
    requests = [Request(one, 8 + 3 * (n % 4), temperature=0.7 * (n % 3 == 2), seed=n) for n, one in enumerate(given)]
    return Job(tuple(requests), graph, changes=UNEVEN if uneven else None, options={"mtp": mtp}, backend=backend)


@pytest.mark.invariant("M1")
@pytest.mark.invariant("M11")
@pytest.mark.parametrize(
    ("count", "mtp", "graph", "uneven"),
    [
        (5, 0, True, False),
        (1, 4, True, False),
        (5, 2, False, False),
        (8, 3, True, False),
        (5, 2, True, True),
        (3, 0, False, True),
    ],
)
@pytest.mark.parametrize(("ep", "tp"), WAYS)
def test_every_way_gives_the_tokens_of_one_rank_without_drafts(
    halma_rank_pools: RankPools, ep: int, tp: int, count: int, mtp: int, graph: bool, uneven: bool
) -> None:
    name, groups = halma_rank_pools.backend, ep // tp
    wanted = job(name, count, graph=graph, mtp=mtp, uneven=uneven)
    expected = served(job(name, count, uneven=uneven))
    shares = [replace(wanted, requests=wanted.requests[n::groups]) for n in range(groups)]
    found = halma_rank_pools[ep].run(play, shares, tp, seconds=SECONDS)
    for rank, one in enumerate(found):
        mine = slice(rank // tp, None, groups)
        assert one.tokens == expected.tokens[mine] and one.finish == expected.finish[mine]
        assert (one.replayed > 0) == (graph and bool(one.tokens))
    assert uneven or (sum(one.drafted for one in found) > 0) == (mtp > 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_shipping_arithmetic_ends_and_is_the_same_on_all_that_share_attention(
    halma_rank_pools: RankPools, tp: int
) -> None:
    """Not the tokens of one rank: roundings differ (tests/cpu/model/test_tensor_parallel.py says where)."""
    whole = replace(job(halma_rank_pools.backend, 4, mtp=3), arithmetic="shipping")
    shares = [replace(whole, requests=whole.requests[n :: 2 // tp]) for n in range(2 // tp)]
    found = halma_rank_pools[2].run(play, shares, tp, seconds=SECONDS)
    assert all(one.replayed > 0 for one in found) and (tp == 1 or found[0] == found[1])
    tokens = found[0].tokens if tp == 2 else [found[n % 2].tokens[n // 2] for n in range(4)]
    assert [len(one) for one in tokens] == [request.max_tokens for request in whole.requests]
