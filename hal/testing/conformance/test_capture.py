"""A capture on its own: no nesting (G2), three ends (G3), counted work (G4, G10), one grad mode (G24)."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halma.hal.backend import Backend, GraphCounts
from halma.hal.dispatch import OpTable, bind, like
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.conformance.capturing import F32, captured, empty, numbers, planned
from halma.hal.workspace import Workspace

TABLE = OpTable()


@TABLE.define("scale_add", out=lambda x, y: like(x))
def scale_add(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    scratch = ws.take(x.shape, x.dtype)
    torch.mul(x, 2.0, out=scratch)
    torch.add(scratch, y, out=out)


@TABLE.define("failing", out=like)
def failing(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    raise ValueError("the op's own error")


class Toy:
    """``step(workspace)``: two op calls and a copy; [2, 3] from ``x`` and ``y``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.x, self.y = numbers(backend, 2, 3), numbers(backend, 2, 3, start=5.0)

    def step(self, workspace: Workspace) -> torch.Tensor:
        ops = bind(workspace, ops=TABLE, routes={"scale_add": "reference"})
        z = ops.scale_add(ops.scale_add(self.x, self.y), self.y)
        return workspace.take((2, 3), F32).copy_(z)

    def expected(self) -> list[list[float]]:
        return ((self.x * 2 + self.y) * 2 + self.y).tolist()

    def eager(self, workspace: Workspace) -> GraphCounts:
        workspace.start()
        with self.backend.graphs.counting() as counts:
            self.step(workspace)
        return counts()


def test_capture_runs_nothing_and_every_replay_follows_its_inputs(capturing: Backend) -> None:
    toy = Toy(capturing)
    state = numbers(capturing, 3)

    def program(workspace: Workspace) -> torch.Tensor:
        state.add_(1.0)
        return toy.step(workspace)

    workspace = planned(capturing, program, checked=True)
    before = state.tolist()
    graph = captured(capturing, program, workspace)
    assert state.tolist() == before
    for step in range(3):
        toy.x.fill_(float(step))
        assert graph.replay().tolist() == toy.expected()
    assert state.tolist() == [value + 3.0 for value in before]


# -- G2 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_container_that_holds_a_capture_is_refused_and_keeps_it(capturing: Backend, enabled: bool) -> None:
    toy = Toy(capturing)
    workspace = planned(capturing, toy.step)
    graph = captured(capturing, toy.step, workspace)
    workspace.start()
    with pytest.raises(CaptureError, match="not empty"):
        with GraphCaptureScope(graph, workspace, enabled=enabled):
            pass
    assert graph.replay().tolist() == toy.expected()


@pytest.mark.invariant("G2", control=True)
def test_captures_one_after_another_are_fine(capturing: Backend) -> None:
    toy = Toy(capturing)
    workspace = planned(capturing, toy.step)
    graph = captured(capturing, toy.step, workspace)
    other = captured(capturing, toy.step, workspace)
    graph.reset()
    captured(capturing, toy.step, workspace, into=graph)
    assert graph.replay().tolist() == other.replay().tolist() == toy.expected()


# -- G3 -------------------------------------------------------------------------------------------------


def swallowing(toy: Toy, *, fails: bool) -> Callable[[Workspace], torch.Tensor]:
    """A program that calls an op which raises and goes on as if nothing had happened."""

    def program(workspace: Workspace) -> torch.Tensor:
        try:
            if fails:
                bind(workspace, ops=TABLE).failing(toy.x)
        except ValueError:
            pass
        return toy.step(workspace)

    return program


@pytest.mark.invariant("G3")
def test_an_error_that_the_program_swallows_fails_the_capture(capturing: Backend) -> None:
    toy = Toy(capturing)
    graph = BreakableGraph(capturing)
    workspace = planned_with_failing(toy)
    with pytest.raises(ValueError, match="the op's own error"):
        captured(capturing, swallowing(toy, fails=True), workspace, into=graph)
    assert graph.outcome is Outcome.FAILED
    with pytest.raises(CaptureError, match="failed capture cannot be read[\\s\\S]*the op's own error"):
        graph.outputs()
    with pytest.raises(CaptureError, match="failed capture"):
        graph.replay()
    captured(capturing, swallowing(toy, fails=False), workspace, into=graph)
    assert graph.replay().tolist() == toy.expected(), "the next capture is fine"


def planned_with_failing(toy: Toy) -> Workspace:
    """A workspace that also holds the place of the failing op's output."""

    def place(workspace: Workspace) -> None:
        with workspace.scope("failing"):
            pass

    def step_behind_an_output(workspace: Workspace) -> None:
        workspace.take((2, 3), F32)
        toy.step(workspace)

    return planned(toy.backend, toy.step, step_behind_an_output, place)


@pytest.mark.invariant("G3", control=True)
def test_an_error_of_the_programs_own_that_it_handles_is_its_business(capturing: Backend) -> None:
    toy = Toy(capturing)

    def program(workspace: Workspace) -> torch.Tensor:
        try:
            raise KeyError("a look-up of the program's own")
        except KeyError:
            return toy.step(workspace)

    assert captured(capturing, program).replay().tolist() == toy.expected()


@pytest.mark.invariant("G3")
def test_an_inert_capture_ran_once_and_is_no_graph(halma_backend: Backend) -> None:
    toy, graph = Toy(halma_backend), BreakableGraph(halma_backend)
    workspace = Workspace(halma_backend.device.torch_device)
    toy.step(workspace)  # plans
    workspace.seal()
    with GraphCaptureScope(graph, workspace, enabled=False):
        graph.set_outputs(toy.step(workspace))
    assert graph.outcome is Outcome.INERT and graph.outputs().tolist() == toy.expected()
    with pytest.raises(CaptureError, match="inert"):
        graph.replay()


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_an_unsealed_workspace_is_refused_whether_or_not_capture_is_on(halma_backend: Backend, enabled: bool) -> None:
    """A switch makes no program legal: what would be refused with capture on is refused with it off."""
    graph = BreakableGraph(halma_backend)
    with pytest.raises(CaptureError, match="must be sealed"):
        with GraphCaptureScope(graph, Workspace(halma_backend.device.torch_device), enabled=enabled):
            pytest.fail("the program must not run")


# -- G4, G10 --------------------------------------------------------------------------------------------


@pytest.mark.invariant("G4")
def test_a_scope_that_is_switched_off_does_the_work_of_the_bare_program(halma_backend: Backend) -> None:
    toy = Toy(halma_backend)
    workspace = Workspace(halma_backend.device.torch_device)
    toy.step(workspace)  # plans
    workspace.seal()
    bare = toy.eager(workspace)
    graph = BreakableGraph(halma_backend)
    workspace.start()
    with halma_backend.graphs.counting() as counts:
        with GraphCaptureScope(graph, workspace, enabled=False):
            graph.set_outputs(toy.step(workspace))
    assert counts() == bare and bare.kernels == 4 and graph.outcome is Outcome.INERT


@pytest.mark.invariant("G4", control=True)
def test_work_done_twice_shows_in_the_counts(halma_backend: Backend) -> None:
    toy = Toy(halma_backend)
    workspace = Workspace(halma_backend.device.torch_device)
    toy.step(workspace)
    once = toy.eager(workspace)
    with halma_backend.graphs.counting() as counts:
        for _ in range(2):
            workspace.start()
            toy.step(workspace)
    assert counts().kernels == 2 * once.kernels and counts().copies == 2 * once.copies


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("checked", [True, False])
def test_a_program_of_ops_allocates_nothing_and_counts_the_same_as_eagerly(capturing: Backend, checked: bool) -> None:
    toy = Toy(capturing)
    workspace = planned(capturing, toy.step, checked=checked)
    eager = toy.eager(workspace)
    found = captured(capturing, toy.step, workspace).counts()
    assert (found.allocations, found.fallback_bytes, eager.allocations) == (0, 0, 0)
    assert found == eager and found.kernels >= 4 and found.copies == 1


@pytest.mark.invariant("G10")
def test_results_that_nobody_placed_are_counted_eagerly(halma_backend: Backend) -> None:
    x = numbers(halma_backend, 2, 3)
    with halma_backend.graphs.counting() as counts:
        (x * 2).add_(1.0)
    assert counts().allocations == 1 and counts().kernels == 2


@pytest.mark.invariant("G10")
def test_a_host_read_inside_a_capture_fails_it(capturing: Backend) -> None:
    x, graph = numbers(capturing, 4), BreakableGraph(capturing)
    with pytest.raises(Exception) as caught:
        captured(capturing, lambda _: x[1].item(), empty(capturing), into=graph)
    assert graph.outcome is Outcome.FAILED and graph.error is caught.value


@pytest.mark.invariant("G10", control=True)
def test_the_same_read_after_the_replay_is_fine(capturing: Backend) -> None:
    x = numbers(capturing, 4)
    graph = captured(capturing, lambda ws: torch.add(x, 1.0, out=ws.take((4,), F32)))
    assert graph.replay()[1].item() == 2.0 and x[1].item() == 1.0


# -- G24 ------------------------------------------------------------------------------------------------


@pytest.mark.invariant("G24")
@pytest.mark.parametrize("other", [torch.enable_grad, torch.inference_mode])
def test_a_replay_in_another_grad_mode_is_refused_before_the_driver_is_asked(
    capturing: Backend, other: Callable[[], torch.no_grad], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, asked = Toy(capturing), list[object]()
    graph = captured(capturing, toy.step)
    monkeypatch.setattr(capturing.graphs, "replay", lambda executable, stream: asked.append(executable))  # pyright: ignore
    with other(), pytest.raises(CaptureError, match="same torch.no_grad"):
        graph.replay()
    assert asked == []


@pytest.mark.invariant("G24", control=True)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_the_same_grad_mode_replays_and_is_restored(capturing: Backend, mode: Callable[[], torch.no_grad]) -> None:
    toy = Toy(capturing)
    with mode():
        before = torch.is_grad_enabled()
        graph = captured(capturing, toy.step)
        assert graph.replay().tolist() == toy.expected() and torch.is_grad_enabled() is before
