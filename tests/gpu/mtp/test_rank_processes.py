"""MTP on two GPUs: the tokens of one GPU without it, whatever is drafted, and the same acceptance (M1, M2, M11).

Collected where there are two GPUs or more; see conftest.py.
"""

from __future__ import annotations

import pytest
import torch

from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4.stepper import Text
from tests.mtp_processes import tokens_of, tokens_on_ranks

SECONDS = 300.0
pytestmark = pytest.mark.timeout(600)


def texts(count: int) -> list[Text]:
    """Unequal prompts, every second one drawn."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1024, (1 + 7 * n % 40,), generator=generator).tolist() for n in range(count)]
    return [Text(prompt, 24 - n % 5, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts)]


@pytest.mark.invariant("M1")
@pytest.mark.invariant("M2")
@pytest.mark.invariant("M11")
@pytest.mark.parametrize(
    ("count", "drafts", "graph"), [(1, 4, True), (4, 4, True), (4, 8, False), (16, 2, True), (64, 4, True)]
)
def test_two_ranks_give_the_tokens_of_one_without_drafts(
    halma_rank_pools: RankPools, count: int, drafts: int, graph: bool
) -> None:
    name, given = halma_rank_pools.backend, texts(count)
    plain, _ = tokens_of(name, given, 0, graph)
    _, accepted = tokens_of(name, given, drafts, graph)
    assert sum(map(sum, accepted)) > 0
    found = halma_rank_pools[2].run(tokens_on_ranks, name, given, drafts, graph, seconds=SECONDS)
    assert found == [(plain, accepted)] * 2
