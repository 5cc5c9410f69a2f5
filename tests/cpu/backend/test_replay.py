"""Capture runs nothing; a replay does what the program does, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace
from tests.cpu.backend.captured import ToyDecode, capture, planned, poison_workspace, template_of


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("checked", [True, False])
def test_a_toy_decoder_replays_its_eager_bits_for_fresh_inputs(backend, mode, checked):
    with mode():
        toy = ToyDecode()
        workspace = planned(backend, toy.step, Workspace(checked=checked))
        toy.refresh(0)
        before = toy.state()
        graph = capture(backend, toy.step, workspace)
        assert all(torch.equal(a, b) for a, b in zip(before, toy.state(), strict=True)), "capture ran something"
        for seed in range(1, 5):
            toy.refresh(seed)
            past = toy.state()
            poison_workspace(workspace)
            replayed = graph.replay().clone()
            written = toy.state()
            toy.keys.copy_(past[0])
            toy.values.copy_(past[1])
            expected = toy.step()
            assert torch.equal(replayed, expected)
            assert all(torch.equal(a, b) for a, b in zip(written, toy.state(), strict=True))
            assert not torch.equal(written[0], past[0])


def test_a_program_of_placed_results_has_no_fallbacks_and_holds_only_what_it_was_given(backend):
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    workspace = Workspace(checked=True)

    def program() -> torch.Tensor:
        out = workspace.take((2, 8), torch.float32)
        with workspace.scope("inner"):
            scratch = workspace.take((2, 8), torch.float32)
            torch.mul(x, 2.0, out=scratch)
            torch.mm(scratch, weight, out=out)
        return out

    graph = capture(backend, program, planned(backend, program, workspace))
    x.normal_()
    assert torch.equal(graph.replay(), (x * 2.0) @ weight)
    template = template_of(graph)
    held = backend.graphs.held(template)
    assert backend.graphs.fallbacks(template) == () and backend.graphs.counts(template).fallback_bytes == 0
    assert set(held.external_addresses) == {x.data_ptr(), weight.data_ptr()} and held.external == 64 + 256
    assert held.workspace == workspace.report().total


def test_weights_and_inputs_outlive_their_owner_as_long_as_the_graph_does(backend):
    def build() -> tuple[BreakableGraph, torch.Tensor]:
        weight, x = torch.full((64,), 3.0), torch.full((64,), 2.0)
        return capture(backend, lambda: x * weight), x * weight

    graph, expected = build()
    waste = [torch.full((64,), float("nan")) for _ in range(64)]  # would reuse freed memory
    assert torch.equal(graph.replay(), expected) and len(waste) == 64


def test_random_numbers_advance_at_replay_as_they_do_eagerly(backend):
    noise, weights = torch.empty(6), torch.rand(3, 9)

    def program() -> torch.Tensor:
        noise.exponential_()
        picks = torch.multinomial(weights, 4)
        return noise.sum() + torch.rand(5).sum() + picks.sum() + torch.nn.functional.dropout(weights, 0.5).sum()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    graph = capture(backend, program)
    assert torch.equal(torch.get_rng_state(), state), "capture drew numbers"
    for _ in range(3):
        start = torch.get_rng_state()
        replayed, after = graph.replay().clone(), torch.get_rng_state()
        torch.set_rng_state(start)
        assert torch.equal(program(), replayed) and torch.equal(torch.get_rng_state(), after)
        assert not torch.equal(start, after)


@torch.library.custom_op("halma_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


@torch.library.custom_op("halma_test::counted", mutates_args=("count",))
def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count += 1
    return x + count


counted.register_fake(lambda x, count: torch.empty_like(x))


@torch.library.custom_op("halma_test::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        doubled,
        lambda x: torch._unsafe_index(x, [torch.zeros(3, dtype=torch.int64)]),
    ],
    ids=["attention", "custom", "_unsafe_index"],
)
def test_ops_without_an_out_variant_are_copied_into_the_workspace(backend, make):
    x = torch.randn(2, 4, 8)
    graph = capture(backend, lambda: make(x))
    counts = graph.counts()
    uses = [use for use in backend.graphs.fallbacks(template_of(graph)) if not use.out_variant]
    assert uses and all("test_replay.py:" in use.where for use in uses)
    assert counts.allocations >= 1 and counts.fallback_bytes >= x.nbytes // 2
    address = graph.outputs().data_ptr()
    for _ in range(3):
        x.normal_()
        assert torch.equal(graph.replay(), make(x)) and graph.outputs().data_ptr() == address


def test_an_op_that_writes_and_makes_keeps_both(backend):
    x, count = torch.zeros(3), torch.zeros(())
    graph = capture(backend, lambda: counted(x, count))
    assert count.item() == 0
    assert graph.replay().tolist() == [1, 1, 1] and graph.replay().tolist() == [2, 2, 2] and count.item() == 2


def test_an_op_of_unknown_result_shape_is_refused_by_name(backend):
    x = torch.zeros(3)
    with pytest.raises(CaptureError, match="halma_test.shapeless"):
        backend.graphs.dry_run(lambda: shapeless(x), Workspace())


def test_lists_views_casts_and_numbers_written_by_index(backend):
    x, index = torch.randn(4, 6), torch.tensor([0, 2])

    def program() -> tuple[torch.Tensor, ...]:
        a, b = torch.split(x.to(torch.float64), 3, dim=1)
        grown = torch._foreach_mul([a, b], 2.0)
        sorted_, order = torch.sort(grown[0], dim=0, stable=True)
        sorted_[index] = 5.0
        sorted_[:, 1] = -1.0
        return sorted_, order, torch.cat([grown[1], a.t().contiguous().view(4, 3)]), x.view(torch.int32).clone()

    graph = capture(backend, program)
    for _ in range(3):
        x.normal_()
        for replayed, expected in zip(graph.replay(), program(), strict=True):
            assert torch.equal(replayed, expected) and replayed.dtype == expected.dtype


# -- grad mode (G24) ----------------------------------------------------------------------------------------


@pytest.mark.invariant("G24")
@pytest.mark.parametrize("other", [torch.enable_grad, torch.inference_mode])
def test_another_grad_mode_is_refused_at_replay(backend, other):
    x = torch.ones(3)
    graph = capture(backend, lambda: x + 1)
    executable, stream = graph.segments[0].executable, backend.device.current_stream()
    with other(), pytest.raises(CaptureError, match="same torch.no_grad"):
        backend.graphs.replay(executable, stream)


def test_work_that_would_record_gradients_is_refused(backend):
    weight = torch.ones(3, requires_grad=True)
    assert capture(backend, lambda: weight * 2).replay().tolist() == [2, 2, 2]  # the control: nobody asks for them
    with torch.enable_grad(), pytest.raises(CaptureError, match="record gradients"):
        backend.graphs.dry_run(lambda: weight * 2, Workspace())


# -- opaque nodes -------------------------------------------------------------------------------------------


def test_an_opaque_node_runs_at_replay_only_and_may_read_on_the_host(backend):
    from halma.hal.graph.current import current_recorder

    x, out, runs = torch.ones(3), torch.zeros(3), []

    def launch() -> None:
        runs.append(x.tolist())
        out.copy_(x)

    def program() -> torch.Tensor:
        recorder = current_recorder()
        assert recorder is not None
        recorder.record_node("copy:host", launch, reads=[x], writes=[out])
        return out * 2

    graph = capture(backend, program)
    assert runs == [] and graph.counts().kernels == 2
    (node, _) = graph.nodes()
    assert node.name == "copy:host" and [name for name, _ in node.parameters] == ["reads", "writes"]
    x.fill_(4.0)
    assert graph.replay().tolist() == [8, 8, 8] and runs == [[4.0, 4.0, 4.0]]


# -- destinations, errors, life ------------------------------------------------------------------------------


def _into(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x, out=out)


def test_a_destination_that_would_be_resized_is_refused_in_a_checked_dry_run(backend):
    x, small = torch.ones(4), torch.ones(8)[:2]
    with pytest.raises(CaptureError, match="would resize its destination"):
        backend.graphs.dry_run(partial(_into, small, x), Workspace(checked=True))
    backend.graphs.dry_run(partial(_into, torch.ones(4), x), Workspace(checked=True))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_and_else_at_the_first_replay(backend):
    x, small = torch.ones(4), torch.ones(8)[:2]
    workspace = Workspace()
    workspace.seal()
    graph = capture(backend, partial(_into, small, x), workspace)
    with pytest.raises(CaptureError, match=r"would resize its destination[\s\S]*test_replay.py:"):
        graph.replay()
    good = capture(backend, partial(_into, torch.ones(4), x), workspace)
    assert good.replay().tolist() == [2, 2, 2, 2]


@pytest.mark.skipif("not hasattr(BaseException, 'add_note')", reason="exceptions have no notes before Python 3.11")
def test_an_op_that_fails_at_replay_names_its_line(backend):
    x, index = torch.zeros(4), torch.tensor([1])
    graph = capture(backend, lambda: x[index])
    assert graph.replay().tolist() == [0]
    for _ in range(2):
        index.fill_(99)
        with pytest.raises(IndexError) as caught:
            graph.replay()
        (note,) = caught.value.__notes__
        assert "aten.index.Tensor_out" in note and "test_replay.py:" in note
        index.fill_(1)
    assert graph.replay().tolist() == [0]


def test_a_destroyed_graph_is_refused(backend):
    x = torch.ones(2)
    graph = capture(backend, lambda: x + 1)
    executable = graph.segments[0].executable
    graph.reset()
    with pytest.raises(CaptureError, match="destroyed"):
        backend.graphs.replay(executable, backend.device.current_stream())


def test_two_segments_share_results_across_the_gap(backend):
    x = torch.ones(2)
    workspace = Workspace(checked=True)

    def first() -> torch.Tensor:
        return x * 3

    def both() -> torch.Tensor:
        return first() + 1

    planned(backend, both, workspace)
    stream, graphs = backend.device.current_stream(), backend.graphs
    workspace.start()
    graphs.begin(stream, workspace)
    middle = first()
    one = graphs.instantiate(graphs.end(stream))
    graphs.begin(stream, workspace)
    result = middle + 1
    two = graphs.instantiate(graphs.end(stream))
    for value in (1.0, 2.0, 5.0):
        x.fill_(value)
        graphs.replay(one, stream)
        graphs.replay(two, stream)
        assert result.tolist() == [3 * value + 1] * 2


def test_an_unsealed_workspace_is_refused(backend):
    with pytest.raises(CaptureError, match="must be sealed"), GraphCaptureScope(BreakableGraph(backend), Workspace()):
        pass
