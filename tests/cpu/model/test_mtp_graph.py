"""The rules of capture, held by the steps that verify and draft; and that nothing follows a shape but memory."""

from __future__ import annotations

import pytest
import torch

import halma
from halma.hal.graph.baked import baked_values
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.scope import GraphCaptureScope
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper
from halma.models.deepseek_v4.steps import STEPS
from tests.cpu.model.mtp import RANDOM, model, plain, runner, texts

ROLES = pytest.mark.parametrize("role", ["verify", "prefill"])


def shapes(served: V4Runner, variant: str = "greedy") -> dict[str, Descriptor]:
    return {
        "verify": served.verify_descriptor(2, 3, 100, variant),
        "prefill": served.prefill_descriptor(16, 100, variant),
    }


def served_for(arithmetic: str = "exact") -> V4Runner:
    return runner(RANDOM, arithmetic, max_requests=2, mtp=3, mtp_lengths=(0, 3), max_context=512, graph=False)


def captured(served: V4Runner, shape: Descriptor) -> BreakableGraph:
    graph = BreakableGraph(served.backend)
    with torch.no_grad():
        served.workspace.start()
        with GraphCaptureScope(graph, served.workspace):
            graph.set_outputs(STEPS[shape.role](served.model, served.inputs.views(shape), shape))
    return graph


@ROLES
@pytest.mark.invariant("G10")
@pytest.mark.parametrize(("arithmetic", "variant"), [("exact", "sample"), ("shipping", "greedy")])
def test_a_step_allocates_nothing_and_is_made_of_ops_alone(role, arithmetic, variant):
    served = served_for(arithmetic)
    graph = captured(served, shapes(served, variant)[role])
    assert graph.counts().allocations == 0 and graph.counts().fallback_bytes == 0
    assert graph.counts().kernels > 300 and graph.raw_arithmetic() == []


@ROLES
@pytest.mark.invariant("G11", control=True)
def test_nothing_of_a_step_is_baked_in(role):
    served = served_for()
    shape = shapes(served)[role]
    first = captured(served, shape).nodes()
    state = served.model.state
    assert state.draft is not None
    before = [one.clone() for one in (state.lengths, state.last_token, state.end, state.stops, state.draft.tokens)]
    for tensor, value in ((state.lengths, 77), (state.last_token, 5), (state.end, 300), (state.stops, 5)):
        tensor.fill_(value)
    state.draft.tokens.fill_(9)
    second = captured(served, shape).nodes()
    now = (state.lengths, state.last_token, state.end, state.stops, state.draft.tokens)
    for tensor, value in zip(now, before, strict=True):
        tensor.copy_(value)
    assert len(first) == len(second) > 300 and baked_values(first, second) == []


@pytest.mark.invariant("G18")
@pytest.mark.parametrize("order", ["ascending", "shuffled(5)"])
def test_steps_of_fewer_drafts_and_requests_fit_what_was_planned_in_any_order(order):
    """One request, one token, fewer drafts: each takes another way through the ops, and finds its memory."""
    options = RunnerOptions(
        max_requests=3, batches=(1,), max_context=200, chunk=8, mtp=4, mtp_lengths=(0, 1, 2, 4), capture_prefill=True
    )
    served = V4Runner(*model(RANDOM, "exact"), halma.backend("cpu"), options)
    served.prepare(order=order)
    report = served.session.report()
    assert report.captured == len(report.rows) == len(served.descriptors()) == 9
    for lengths in ((3, 9, 5), (7,)):
        stepper = Stepper(served, texts(RANDOM, lengths, 12))
        stepper.prefill()
        for drafts in (4, 0, 2, 1):
            stepper.step(drafts)
        assert all(text.tokens == plain(RANDOM, text)[: len(text.tokens)] for text in stepper.texts)
    assert served.session.eager_steps == {}
    served.close()


def after_one_step(capacity: int) -> list[torch.Tensor]:
    """Choices, emitted and drafts of a step in the shape of a capacity, with more blocks than are chosen."""
    served = served_for()
    stepper = Stepper(served, texts(RANDOM, (37, 50), 30))
    stepper.prefill()
    stepper.step(3)
    slots, state = [1, 2], served.model.state
    assert state.draft is not None and capacity in served.capacities
    served.inputs.fill(slots, [4, 4])
    found = served.step(Descriptor("verify", 2, 4, capacity, "greedy"))
    return [*(one.clone() for one in found), state.draft.tokens.clone()]


@pytest.mark.invariant("M6")
def test_what_is_chosen_does_not_follow_the_capacity_of_the_shape():
    small, large = after_one_step(256), after_one_step(512)
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))


@pytest.mark.invariant("M6", control=True)
def test_the_indexer_has_more_blocks_than_it_may_choose():
    served = served_for()
    assert 37 // 4 > served.config.index_topk and served.capacities == (256, 512)
    assert served.verify_descriptor(2, 3, 100, "greedy").context_capacity == 256
