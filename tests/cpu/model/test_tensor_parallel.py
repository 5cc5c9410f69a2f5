"""A model divided among ranks, in real processes: the same tokens on all of them, and as on one rank.

Where arithmetic is exact, ranks change the order of sums and nothing else: in float64 by some 1e-15 of the logits'
standard deviation, in float32 by some 1e-6. In shipping arithmetic there are two differences more:

* a rounding to fp8 takes its scale from a block of 128 values; where a rank's part of the experts' intermediate width
  or of the output's latent is no multiple of 128, the blocks that are cut have scales of their own (not so in V4-Flash
  and V4-Pro up to 8 ranks);
* a bfloat16 carrier rounds each rank's partial sum before they are added.
"""

from __future__ import annotations

import functools

import pytest
import torch

from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from tests.cpu.model.parallel import (
    EIGHT_GROUPS,
    Job,
    Served,
    count_calls,
    decode_until_one_dies,
    differ,
    fail_on_one_rank,
    logits,
    logits_on_ranks,
    serve,
    serve_on_ranks,
)

SECONDS = 300.0
WHOLE_BLOCKS = {**EIGHT_GROUPS, "moe_intermediate_size": 256}
"""Every part of two ranks is a multiple of 128, as in the published models at 8."""


def traffic(vocabulary: int, heat: float) -> tuple[tuple[Request, int], ...]:
    """Unequal requests that come and go: three slots, four requests, greedy and drawn rows in one batch."""
    found = []
    for number, (length, tokens, arrives) in enumerate([(3, 9, 0), (37, 5, 0), (18, 6, 1), (1, 7, 4)]):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        warm = heat * (number % 2 == 0)
        top_p = (1.0, 1.0, 0.8)[number % 3]
        found.append((Request(tuple(prompt), tokens, temperature=warm, top_p=top_p, seed=number), arrives))
    return tuple(found)


@functools.cache
def served_alone(model: str, heat: float, arithmetic: str = "exact") -> Served:
    return serve(job_of(model, heat, True, arithmetic))


def job_of(model: str, heat: float, graph: bool, arithmetic: str = "exact") -> Job:
    changes = None if model == "tiny-v4" else EIGHT_GROUPS
    return Job(traffic(1024 if changes is None else 200, heat), changes, graph=graph, arithmetic=arithmetic)


def check_tokens(pools: RankPools, world: int, model: str, heat: float, graph: bool) -> None:
    expected = served_alone(model, heat)
    found = pools[world].run(serve_on_ranks, job_of(model, heat, graph), seconds=SECONDS)
    assert all(one.tokens == expected.tokens and one.finish == expected.finish for one in found)
    steps = {(one.replayed, one.eager) for one in found}
    assert steps == {(expected.replayed, expected.eager) if graph else (0, expected.replayed + expected.eager)}
    assert expected.replayed > 5 and all(one.weights < expected.weights for one in found)


# Pairwise over (ranks, model, greedy or drawn, graph); the full product is the nightly row's.
@pytest.mark.invariant("M11")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "model", "heat", "graph"),
    [(2, "tiny-v4", 0.0, True), (2, "eight groups", 0.8, False), (4, "eight groups", 0.8, True)],
)
def test_ranks_generate_what_one_rank_generates(all_ranks: RankPools, world, model, heat, graph):
    check_tokens(all_ranks, world, model, heat, graph)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize(("world", "model"), [(2, "tiny-v4"), *((world, "eight groups") for world in (2, 4, 8))])
def test_ranks_generate_what_one_rank_generates_in_full(all_ranks: RankPools, world, model, heat, graph):
    check_tokens(all_ranks, world, model, heat, graph)


@pytest.mark.invariant("M11", control=True)
def test_requests_are_not_so_easy_that_any_model_would_agree():
    greedy, drawn = served_alone("eight groups", 0.0), served_alone("eight groups", 0.8)
    assert greedy.tokens[0] != drawn.tokens[0] and greedy.tokens[1] == drawn.tokens[1]
    assert len({token for tokens in greedy.tokens for token in tokens}) > 10


# -- how far ranks may be apart from one rank -----------------------------------------------------------


@functools.cache
def text(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, 40), generator=torch.Generator().manual_seed(5))


def deviations(pools: RankPools, world: int, job: Job) -> torch.Tensor:
    """Differences to one rank's logits of every position, in units of their standard deviation."""
    tokens = text(1024 if job.changes is None else 200)
    whole = logits(job, tokens).double()
    parts = pools[world].run(logits_on_ranks, job, tokens, seconds=SECONDS)
    return (torch.cat(parts, -1).double() - whole) / whole.std()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("carrier", "graph", "bound"), [(torch.float64, False, 1e-12), (torch.float32, True, 1e-5)], ids=str
)
def test_in_exact_arithmetic_ranks_change_the_order_of_sums_alone(all_ranks: RankPools, carrier, graph, bound):
    apart = deviations(all_ranks, 4, Job((), EIGHT_GROUPS, carrier=carrier, graph=graph))
    assert float(apart.abs().max()) < bound


@pytest.mark.timeout(600)
def test_in_shipping_arithmetic_whole_blocks_round_alike(all_ranks: RankPools):
    job = Job((), WHOLE_BLOCKS, arithmetic="shipping", carrier=torch.float64, graph=False)
    assert float(deviations(all_ranks, 2, job).abs().max()) < 1e-9


@pytest.mark.timeout(600)
def test_in_shipping_arithmetic_cut_blocks_differ_within_bounds(all_ranks: RankPools):
    """tiny-v4's experts are 128 wide: each of two ranks has half a block."""
    apart = deviations(all_ranks, 2, Job((), None, arithmetic="shipping", graph=False))
    assert 1e-6 < float(apart.square().mean().sqrt()) < 0.15


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [None, EIGHT_GROUPS], ids=["tiny-v4", "eight groups"])
def test_a_bfloat16_carrier_is_as_near_on_two_ranks_as_on_one(all_ranks: RankPools, model):
    """Its roundings are larger than what ranks add to them: both are compared with one rank in float64."""
    tokens = text(1024 if model is None else 200)
    job = Job((), model, arithmetic="shipping", carrier=torch.bfloat16, graph=False)
    exact = logits(Job((), model, arithmetic="shipping", carrier=torch.float64, graph=False), tokens)
    parts = all_ranks[2].run(logits_on_ranks, job, tokens, seconds=SECONDS)
    found = (logits(job, tokens), torch.cat(parts, -1))
    one, two = (float((each.double() - exact).square().mean().sqrt()) for each in found)
    assert 0 < two < 1.3 * one


# -- what a step exchanges ------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["greedy", "sample"])
def test_a_step_makes_two_all_reduces_a_layer_one_more_and_one_gather(all_ranks: RankPools, variant: str):
    config_layers, requests, width, vocabulary = 4, 3, 128, 200
    for calls in all_ranks[2].run(count_calls, Job((), EIGHT_GROUPS, graph=False), variant, seconds=SECONDS):
        reduced = [nbytes for kind, nbytes in calls if kind == "all_reduce"]
        gathered = [nbytes for kind, nbytes in calls if kind == "all_gather"]
        assert reduced == [requests * width * 4] * (2 * config_layers + 1)
        # Greedy rows send a logit and a token; for drawn ones all logits come together.
        assert gathered == [requests * (8 if variant == "greedy" else vocabulary // 2 * 4)]


# -- what may go wrong ----------------------------------------------------------------------------------


@pytest.mark.invariant("M11")
@pytest.mark.timeout(300)
def test_tokens_that_differ_between_ranks_are_an_error_on_all(all_ranks: RankPools):
    for rank, message in enumerate(all_ranks[2].run(differ, True)):
        assert "ranks differ in their tokens" in message
        assert "rank 1 differs from rank 0 first at 1, of 3 and 3" in message
        assert f"rank {rank} has [4, {5 + rank}]" in message
    assert all_ranks[2].run(differ, False) == ["", ""]


@pytest.mark.invariant("G26")
@pytest.mark.timeout(300)
def test_a_capture_that_fails_on_one_rank_fails_on_all(all_ranks: RankPools):
    first, second = all_ranks[2].run(fail_on_one_rank, Job((), EIGHT_GROUPS), seconds=SECONDS)
    assert "rank 1 failed at" in first and "ValueError: no memory for layer 2" in first
    assert second == "ValueError: no memory for layer 2"


@pytest.mark.invariant("C7")
@pytest.mark.timeout(300)
def test_a_rank_that_dies_ends_the_others_steps_with_its_name(all_ranks: RankPools):
    """Replays go on over a dead peer, with NaN: the engine looks before it believes a token."""
    arrivals = ((Request((5, 9, 2), max_tokens=40), 0),)
    job = Job(arrivals, EIGHT_GROUPS, options={"max_requests": 1, "batches": (1,)})
    expected = serve(job).tokens[0]
    (kind, message, tokens), lost = all_ranks[2].run(decode_until_one_dies, job, lost=[1], seconds=SECONDS)
    assert kind == "ChannelFault" and "rank 1" in message and isinstance(lost, Lost)
    assert len(tokens) > 3 and tokens == expected[: len(tokens)] and len(tokens) < 12
