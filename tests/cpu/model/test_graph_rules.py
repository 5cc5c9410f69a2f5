"""The rules of capture, held by the real decode program and not only by toys."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import halma
from halma.hal.errors import CaptureError, StaleInputError
from halma.hal.graph.baked import baked_values
from halma.hal.graph.breakable import BreakableGraph, counters
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.forks import Fork
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.forks import script
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.steps import decode_step
from tests.cpu.model.small import small_runner


def captured(runner: V4Runner, program=None) -> BreakableGraph:
    """One more capture of a decode step, or of ``program(model, inputs, descriptor)``."""
    descriptor = runner.decode_descriptor(1, 100, "greedy")
    graph = BreakableGraph(runner.backend)
    with torch.no_grad():
        runner.workspace.start()
        with GraphCaptureScope(graph, runner.workspace):
            graph.set_outputs((program or decode_step)(runner.model, runner.inputs.views(descriptor), descriptor))
    return graph


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
def test_a_captured_step_allocates_nothing(arithmetic):
    graph = captured(small_runner(arithmetic))
    assert graph.counts().allocations == 0 and graph.counts().fallback_bytes == 0
    assert graph.counts().kernels > 200


@pytest.mark.invariant("G10", control=True)
def test_a_functional_op_in_the_step_is_counted():
    def program(model, inputs, descriptor):
        chosen, logits = decode_step(model, inputs, descriptor)
        return chosen, logits + 1.0

    runner = small_runner("exact", fresh=True, max_context=257)  # its plan must hold the program's own sum
    runner = V4Runner(runner.config, runner.model.weights, runner.backend, runner.options)
    descriptor = runner.decode_descriptor(1, 100, "greedy")
    with torch.no_grad():
        runner.backend.graphs.dry_run(
            lambda: program(runner.model, runner.inputs.views(descriptor), descriptor), runner.workspace
        )
    runner.workspace.seal()
    assert captured(runner, program).counts().fallback_bytes >= 199 * 4


@pytest.mark.invariant("W5", control=True)
def test_the_decode_program_is_made_of_ops_alone():
    assert captured(small_runner("exact")).raw_arithmetic() == []


@pytest.mark.invariant("W5")
def test_raw_arithmetic_is_reported_with_its_line():
    def program(model, inputs, descriptor):
        chosen, logits = decode_step(model, inputs, descriptor)
        logits.mul_(0.5)
        return chosen, logits

    raw = captured(small_runner("exact"), program).raw_arithmetic()
    assert [node.name for node in raw] == ["aten.mul_.Tensor"] and "test_graph_rules.py" in raw[0].where


@pytest.mark.invariant("G11", control=True)
def test_nothing_of_a_step_is_baked_in():
    runner = small_runner("exact")
    first = captured(runner).nodes()
    state, inputs = runner.model.state, runner.inputs
    state.lengths.fill_(77)
    state.last_token.fill_(5)
    inputs.fill([1], [1])
    second = captured(runner).nodes()
    state.lengths.zero_()
    runner.inputs.fill([], [])
    assert len(first) == len(second) > 200 and baked_values(first, second) == []


@pytest.mark.invariant("G11")
def test_a_host_value_in_the_program_is_found():
    length = 10

    def program(model, inputs, descriptor):
        narrowed = replace(model, config=replace(model.config, sliding_window=length))
        return decode_step(narrowed, inputs, descriptor)

    runner = small_runner("exact")
    first = captured(runner, program).nodes()
    length = 11
    found = baked_values(first, captured(runner, program).nodes())
    assert found and any(str(value.first) != str(value.second) for value in found)


COUNT_A_STEP = """
import json, sys, torch
import halma
from halma.hal.settings import settings
from tests.cpu.model import small
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner

backend = halma.backend("cpu")
if sys.argv[1] == "incapable":
    from halma.backends.cpu.backend import CpuBackend
    backend = CpuBackend(graph_capture=False)
options = RunnerOptions(max_context=256, chunk=16, graph=settings().graph)
runner = V4Runner(*small.small_model("exact"), backend, options)
runner.prepare()
engine = Engine(runner)
generation = engine.submit(Request((5, 9, 2), 6))
engine.step()
steps = []
while engine.busy:
    with backend.graphs.counting() as counts:
        engine.step()
    found = counts()
    steps.append([found.kernels, found.copies, found.allocations])
print(json.dumps({"steps": steps, "tokens": generation.tokens, "replayed": engine.counters.replayed}))
"""


def count(kind: str, switch: str) -> dict:
    done = script(COUNT_A_STEP, kind, environment={**os.environ, "HALMA_GRAPH": switch}).end(120)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.invariant("G4")
def test_switched_off_does_the_work_of_a_backend_that_cannot():
    off, cannot = count("capable", "0"), count("incapable", "1")
    assert off["steps"] == cannot["steps"] and off["tokens"] == cannot["tokens"]
    assert off["replayed"] == cannot["replayed"] == 0 and off["steps"][0][0] > 200


@pytest.mark.invariant("G4", control=True)
def test_switched_on_it_replays():
    on = count("capable", "1")
    assert on["replayed"] == 5 and on["tokens"] == count("incapable", "1")["tokens"]


@pytest.mark.invariant("W1")
def test_a_step_that_was_not_planned_is_refused_by_name():
    from halma.hal.errors import WorkspaceError

    runner = small_runner("exact", graph=False, fresh=True, max_requests=2)
    descriptor = replace(runner.decode_descriptor(2, 100, "greedy"), num_requests=2, query_len=9)
    big = replace(runner.inputs.views(descriptor), tokens=torch.zeros(2, 9, dtype=torch.int64))
    with torch.no_grad(), pytest.raises(WorkspaceError, match="sealed workspace cannot grow"):
        runner.workspace.start()
        from halma.models.deepseek_v4.steps import prefill_step

        prefill_step(runner.model, big, descriptor)
    runner.workspace.reset()


@pytest.mark.invariant("W1", control=True)
def test_a_planned_step_runs():
    runner = small_runner("exact", graph=False)
    runner.inputs.fill([], [])
    chosen, logits = runner.step(runner.decode_descriptor(1, 100, "greedy"))
    assert chosen.shape == (1,) and logits.shape == (1, runner.config.vocab_size)
    assert halma.backend("cpu").graphs.unsupported() is None


# -- inputs (G12, G13) -----------------------------------------------------------------------------------


@pytest.mark.invariant("G12")
@pytest.mark.parametrize("graph", [True, False])
def test_a_step_whose_inputs_nobody_filled_is_refused(graph):
    runner = small_runner("exact", graph=graph)
    descriptor = runner.decode_descriptor(1, 100, "greedy")
    runner.inputs.fill([], [])
    runner.step(descriptor)
    with pytest.raises(StaleInputError, match="'slot', 'count'"):
        runner.step(descriptor)


@pytest.mark.invariant("G12", control=True)
@pytest.mark.parametrize("graph", [True, False])
def test_a_step_that_keeps_its_inputs_runs(graph):
    runner = small_runner("exact", graph=graph)
    descriptor = runner.decode_descriptor(1, 100, "greedy")
    runner.inputs.fill([], [])
    runner.step(descriptor)
    runner.inputs.keep()
    runner.step(descriptor)


@pytest.mark.invariant("G13")
def test_padding_requests_belong_to_the_null_slot_whatever_lay_there():
    inputs = small_runner("exact", fresh=True, max_requests=4).inputs
    inputs.fill([3, 2, 1, 4], [1, 1, 1, 1], temperature=[2.0] * 4, top_p=[0.5] * 4, seed=[9] * 4)
    inputs.fill([2], [1])
    views = inputs.views(Descriptor("decode", 4))
    assert views.slot.tolist() == [2, 0, 0, 0] and views.count.tolist() == [1, 0, 0, 0]
    assert views.top_p.tolist() == [1.0] * 4 and views.seed.tolist() == [0] * 4
    inputs.slot.tensor[1:] = 77  # somebody wrote where only padding may be
    inputs.keep()
    assert views.slot.tolist() == [2, 0, 0, 0]


@pytest.mark.invariant("G13", control=True)
def test_real_requests_are_kept_as_they_were_given():
    inputs = small_runner("exact", fresh=True, max_requests=4).inputs
    inputs.fill([3, 2], [1, 1], seed=[5, 6])
    inputs.keep()
    views = inputs.views(Descriptor("decode", 4))
    assert views.slot.tolist() == [3, 2, 0, 0] and views.seed.tolist() == [5, 6, 0, 0]


# -- the shared expert beside the routed ones (G8) ----------------------------------------------------------


class Undeclared:
    """A fork that tells nobody: entering it a second time just moves to the stream and its lane."""

    def __init__(self, stream, workspace):
        self.stream, self.workspace, self.undo, self.depth = stream, workspace, ExitStack(), 0

    def __enter__(self):
        self.depth += 1
        if self.depth == 2:
            self.undo.enter_context(self.workspace.lane(self.stream.name))
            self.undo.enter_context(self.stream)
        return self

    def __exit__(self, *exc):
        self.depth -= 1
        self.undo.close()
        if self.depth == 0:
            self.workspace.release_lane(self.stream.name)

    def join(self):
        return None


class NeverJoined(Fork):
    """A fork whose join does nothing until the block is over."""

    def join(self):
        return None


@pytest.mark.invariant("G8")
def test_a_fork_of_the_model_that_nobody_declared_is_found_by_the_clocks(monkeypatch):
    runner = small_runner("exact")  # captures its ladder when it is first asked for
    monkeypatch.setattr("halma.models.deepseek_v4.experts.fork", Undeclared)
    with pytest.raises(CaptureError, match=r"work on stream 'side', which never joined the capture"):
        captured(runner)
    monkeypatch.undo()
    assert captured(runner).captured


@pytest.mark.invariant("G8")
def test_a_model_that_reads_the_shared_expert_before_its_join_is_a_race(monkeypatch):
    runner = small_runner("exact")  # captures its ladder when it is first asked for
    monkeypatch.setattr("halma.models.deepseek_v4.experts.fork", NeverJoined)
    with pytest.raises(CaptureError, match=r"two streams touch the same memory in no order[\s\S]*stream 'side'"):
        captured(runner)  # the scope joins what is out at the end, which is too late for the sum
    monkeypatch.undo()
    assert captured(runner).captured


@pytest.mark.invariant("G8", control=True)
def test_the_shared_expert_of_every_layer_runs_beside_the_routed_ones():
    runner = small_runner("exact")
    counters.clear()
    graph = captured(runner)
    assert counters.forks_tracked == runner.config.num_hidden_layers and counters.forks_auto_joined == 0
    (segment,) = graph.segments
    streams = {node.stamp.stream.name for node in segment.template.nodes}
    assert streams == {"main", "side"} and set(runner.workspace.report().lanes) == {"main", "side"}
    beside = [node for node in segment.template.nodes if node.stamp.stream.name == "side"]
    assert len(beside) >= 3 * runner.config.num_hidden_layers
