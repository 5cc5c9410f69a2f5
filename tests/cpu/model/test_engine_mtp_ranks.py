"""Drafting on ranks, in real processes: they choose the same numbers of drafts though each has a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as distributed

import halma
from halma.hal.collectives.contract import Kind
from halma.hal.errors import HalmaError
from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4 import engine_costs
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks, divided
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import occupy
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from tests.cpu.model.parallel import EIGHT_GROUPS

SECONDS = 300.0
REQUESTS = [Request((5, 9, 2), 9), Request(tuple(range(20)), 5, temperature=0.8, top_p=0.9, seed=3)]
OPTIONS = RunnerOptions(max_requests=2, batches=(1, 2), max_context=256, chunk=16, graph=False, mtp=2)


def runner_of(ranks: Ranks, lengths: tuple[int, ...]) -> V4Runner:
    config = small_config(**EIGHT_GROUPS)
    load = LoadOptions(rank=ranks.rank, world=ranks.size, drafter=bool(lengths))
    loaded = load_source(config, SyntheticSource(config, seed=3), load)
    options = RunnerOptions(**{**vars(OPTIONS), "mtp": max(lengths, default=0), "mtp_lengths": lengths})
    runner = V4Runner(loaded.config, loaded.weights, halma.backend("cpu"), options, ranks=ranks)
    runner.prepare(runner.descriptors(("greedy", "sample")))
    return runner


def served(ranks: Ranks, drafts: int | str | None) -> tuple[list[list[int]], dict[str, Any] | None]:
    """Tokens, and what the engine says of its drafts; None is a runner without MTP."""
    runner = runner_of(ranks, (1, 2) if drafts is not None else ())
    engine = Engine(runner, ahead=2, drafts=drafts)
    found = [generation.tokens for generation in engine.run(REQUESTS)]
    runner.close()
    return found, engine.drafting()


def serve_by_own_clock(unlike: bool) -> tuple[list[list[int]], dict[str, Any] | None] | str:
    """One rank's part. ``unlike``: a long draft seems cheap to rank 0 and dear to the others."""
    config = small_config(**EIGHT_GROUPS)
    members = halma.collectives(world=distributed.group.WORLD, backend="cpu")
    measured = engine_costs.step_seconds
    try:
        with divided(config, members, tokens=OPTIONS.most_rows, carrier=torch.float32) as ranks:
            ranks._communicator.set_bound(20.0)

            def by_own_clock(runner, arms) -> list[float]:
                seconds = measured(runner, arms)
                power = 1.0 if ranks.rank else -1.0
                return [10.0 ** (power * arm.descriptor.query_len) for arm in arms] if unlike else seconds

            engine_costs.step_seconds = by_own_clock
            return served(ranks, "auto")
    except HalmaError as error:
        return str(error)
    finally:
        engine_costs.step_seconds = measured


def calls_of_a_verify() -> list[str]:
    """What a step that verifies two drafts of each of two requests sends, by the channel's flight recorder."""
    config = small_config(**EIGHT_GROUPS)
    members = halma.collectives(world=distributed.group.WORLD, backend="cpu")
    with divided(config, members, tokens=OPTIONS.most_rows, carrier=torch.float32) as ranks:
        runner = runner_of(ranks, (2,))
        occupy(runner, 2)
        runner.inputs.fill([1, 2], [3, 3])
        runner.step(runner.verify_descriptor(2, 2, 8, "greedy"))
        calls = [Kind(entry.kind).name.lower() for entry in ranks._communicator.flight()]
        runner.close()
    return calls


@pytest.mark.timeout(600)
def test_a_verify_makes_three_all_reduces_and_a_gather_more_for_each_draft(all_ranks: RankPools):
    layers, drafts = 4, 2
    for calls in all_ranks[2].run(calls_of_a_verify, seconds=SECONDS):
        assert calls.count("all_reduce") == 2 * layers + 1 + 3 * drafts
        assert calls.count("all_gather") == 1 + drafts


@pytest.mark.invariant("G27")
@pytest.mark.timeout(600)
def test_rank_0_measures_for_all_so_that_ranks_draft_alike(all_ranks: RankPools):
    first, second = all_ranks[2].run(serve_by_own_clock, True, seconds=SECONDS)
    assert not isinstance(first, str) and first == second
    tokens, drafting = first
    assert tokens == served(ONE_RANK, None)[0]
    assert drafting is not None and {choice["drafts"] for choice in drafting["choices"]} == {2}
    assert [cost["milliseconds"] for cost in drafting["step_costs"]] == pytest.approx([10.0, 1.0] * 2)


@pytest.mark.invariant("G27", control=True)
@pytest.mark.timeout(600)
def test_with_clocks_as_they_are_ranks_draft_alike_too(all_ranks: RankPools):
    first, second = all_ranks[2].run(serve_by_own_clock, False, seconds=SECONDS)
    assert not isinstance(first, str) and first == second
    assert first[0] == served(ONE_RANK, "auto")[0]
