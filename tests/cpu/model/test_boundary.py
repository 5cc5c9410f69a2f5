"""Boundaries between sublayers, in parts and as a whole: one seam, two ways, the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import halma
from halma.hal.collectives.contract import StreamMix
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.boundary import AsAWhole, InParts, boundary
from halma.models.deepseek_v4.golden import occupy
from halma.models.deepseek_v4.ranks import OneRank
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from tests.cpu.model.small import small_model
from tests.cpu.ops.checks import run

ROWS = 16


class AsAWholeByOps(OneRank):
    """One rank that sums and mixes up to ``most`` rows in one call, made of the ops."""

    def __init__(self, most: int = ROWS) -> None:
        self.most = most
        self.asked: list[tuple[int, int, torch.dtype]] = []
        self.calls = 0

    def mixer(self, rows: int, width: int, carrier: torch.dtype) -> Any:
        self.asked.append((rows, width, carrier))
        return self.mixed if rows <= self.most else None

    def mixed(
        self, x: torch.Tensor, mix: StreamMix, weight: torch.Tensor, *, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        post, comb = run("hc_gates", mix.mixes, mix.base, mix.scale, mix.hc_eps, mix.iterations)
        mix.streams.copy_(run("hc_post", x, mix.streams.clone(), post, comb))
        entered, mixes = run("hc_read", mix.streams, mix.fn, mix.next_base, mix.next_scale, eps, mix.hc_eps)
        mix.mixes.copy_(mixes)
        return out.copy_(run("rms_norm", entered, weight, eps))


def logits_of(runner: V4Runner, whole: AsAWholeByOps | None, arithmetic: str) -> torch.Tensor:
    """Logits of 16 tokens fed at once, eagerly."""
    ranks = runner.model.ranks if whole is None else whole
    runner.model = replace(runner.model, arithmetic=arithmetic, ranks=ranks)
    shape = Descriptor("prefill", 1, ROWS, runner.capacities[0], "all")
    occupy(runner, 1)
    tokens = torch.randint(0, runner.config.vocab_size, (1, ROWS), generator=torch.Generator().manual_seed(4))
    runner.inputs.fill([1], [ROWS], tokens=tokens)
    return runner.step(shape)[1].clone()


@pytest.fixture
def runner() -> Iterator[V4Runner]:
    """Nothing is planned, so that its workspace grows with whatever runs."""
    made = V4Runner(*small_model("exact"), halma.backend("cpu"), RunnerOptions(chunk=ROWS, max_context=64, graph=False))
    yield made
    made.close()


def test_as_a_whole_is_the_model_in_parts(runner: V4Runner) -> None:
    """The arithmetic is called shipping, so that the seam is asked; its weights are exact, so that bounds are tight."""
    parts = logits_of(runner, None, "shipping")
    whole = AsAWholeByOps()
    found = logits_of(runner, whole, "shipping")
    config = runner.config
    assert whole.asked == [(ROWS, config.hidden_size, torch.float32)]
    assert whole.calls == 2 * config.num_hidden_layers - 1  # the last sublayer's sum has nothing to go on to
    assert float((found - parts).abs().max() / parts.std()) < 1e-4


def test_exact_arithmetic_does_not_ask(runner: V4Runner) -> None:
    parts = logits_of(runner, None, "exact")
    whole = AsAWholeByOps()
    assert torch.equal(logits_of(runner, whole, "exact"), parts)
    assert whole.asked == [] and whole.calls == 0


def test_another_number_of_streams_goes_in_parts(runner: V4Runner) -> None:
    whole, width = AsAWholeByOps(), runner.config.hidden_size
    four = replace(runner.model, arithmetic="shipping", ranks=whole)
    three = replace(four, config=replace(four.config, hc_mult=3))
    assert isinstance(boundary(four, torch.zeros(2, 4, width)), AsAWhole)
    assert isinstance(boundary(three, torch.zeros(2, 3, width)), InParts)
    assert whole.asked == [(2, width, torch.float32)]


@pytest.mark.invariant("W1")
def test_a_sealed_workspace_has_room_for_either_way() -> None:
    """Few rows go as a whole, many in parts: the largest step of all is no plan for the smaller ones."""
    whole = AsAWholeByOps(most=2)
    options = RunnerOptions(max_requests=3, batches=(1, 2, 3), chunk=8, max_context=64, graph=False)
    runner = V4Runner(*small_model("exact"), halma.backend("cpu"), options, ranks=whole)
    runner.model = replace(runner.model, arithmetic="shipping")
    runner.prepare([Descriptor("decode", n, 1, runner.capacities[0], "greedy") for n in (1, 2, 3)])
    planned = whole.calls
    occupy(runner, 3)
    made = []
    for requests in (3, 2, 1):
        before = whole.calls
        runner.inputs.fill(range(1, requests + 1), [1] * requests)
        chosen, _ = runner.step(Descriptor("decode", requests, 1, runner.capacities[0], "greedy"))
        assert chosen.shape == (requests,)
        made.append(whole.calls - before)
    runner.close()
    each = 2 * runner.config.num_hidden_layers - 1
    assert planned > 0 and made == [0, each, each]
