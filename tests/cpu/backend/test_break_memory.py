"""Breaks and the recorder's own memory: lent results that a break pins, and what a dry run lets host work do."""

from __future__ import annotations

import pytest
import torch

from halma.hal.dispatch import Ops
from halma.hal.errors import CaptureError, WorkspaceError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode
from halma.hal.graph.breaks import Cell, break_point
from halma.hal.graph.forks import fork
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.registry import default_registry
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines rms_norm)
from tests.cpu.backend.captured import poison_workspace


def capture(program, backend, workspace: Workspace, *, plan: bool = True) -> BreakableGraph:
    if plan:
        workspace.start()
        backend.graphs.dry_run(program, workspace)
        workspace.seal()
    graph = BreakableGraph(backend)
    workspace.start()
    with GraphCaptureScope(graph, workspace, mode=CaptureMode.PIECEWISE):
        graph.set_outputs(program())
    return graph


@pytest.mark.invariant("G7")
def test_a_lent_result_that_a_break_pins_is_planned_for(backend):
    x, out, workspace = torch.ones(8), torch.zeros(8), Workspace(checked=True)

    def program() -> torch.Tensor:
        given = x + 1.0
        with break_point(out=Cell()) as host:
            y = host(lambda t: t * 2.0, given)
        del given
        for _ in range(4):
            y = y + 1.0
        return torch.add(y, 0.0, out=out)

    graph = capture(program, backend, workspace)
    for value in (1.0, 5.0):
        poison_workspace(workspace)
        x.fill_(value)
        assert graph.replay().tolist() == [2 * (value + 1) + 4] * 8
    again = capture(program, backend, workspace, plan=False)
    assert again.replay().tolist() == [2 * (5.0 + 1) + 4] * 8


def test_host_work_of_a_break_may_read_and_wait_also_in_the_dry_run(backend):
    x, workspace, seen = torch.ones(8), Workspace(), list[float]()
    event = backend.device.new_event("host")

    def read(t: torch.Tensor) -> None:
        backend.device.current_stream().record(event)
        event.synchronize()
        backend.device.synchronize()
        seen.append(t[0].item())
        t.fill_(float(len(seen)))

    def program() -> torch.Tensor:
        y = torch.add(x, 1.0, out=workspace.take((8,), torch.float32))
        with break_point() as host:
            host(read, y)
        return torch.add(y, 1.0, out=x)

    graph = capture(program, backend, workspace)
    assert len(seen) == 2
    x.fill_(41.0)
    assert graph.replay().tolist() == [4.0] * 8 and seen[-1] == 42.0


@pytest.mark.invariant("W1")
def test_a_break_in_the_program_that_was_not_planned_takes_no_memory_beside_the_plan(backend):
    x, workspace = torch.ones(8), Workspace()

    def program(more: bool) -> torch.Tensor:
        y = torch.add(x, 1.0, out=workspace.take((8,), torch.float32))
        with break_point() as host:
            if more:
                host(lambda: workspace.take((8,), torch.float32) and None)
        return torch.add(y, 1.0, out=x)

    graph = capture(lambda: program(False), backend, workspace)
    with pytest.raises(WorkspaceError, match="cannot grow"):
        capture(lambda: program(True), backend, workspace, plan=False)
    x.fill_(1.0)
    assert graph.replay().tolist() == [3.0] * 8


def _recycled(workspace: Workspace, x: torch.Tensor, out: torch.Tensor, *, inside: bool, returned: bool):
    """A result of one scope that a break reads, or the program returns, while another scope lies in its memory."""

    def program() -> torch.Tensor:
        given = x * 2.0
        with workspace.scope("first"):
            lent = x * 3.0
            if inside:
                torch.add(lent, given, out=given)
        with workspace.scope("second"):
            other = x * 100.0
            with break_point(out=Cell()) as host:
                y = host(torch.clone, given if inside or returned else lent)
            torch.add(y, other, out=out)
        return out if inside or not returned else lent

    return program


@pytest.mark.invariant("G7")
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("returned", [False, True], ids=["read by a break", "returned"])
def test_a_lent_result_whose_scope_closed_is_refused(backend, checked, returned):
    x, out, workspace = torch.ones(8), torch.zeros(8), Workspace(checked=checked)
    program = _recycled(workspace, x, out, inside=False, returned=returned)
    with pytest.raises(CaptureError, match=r"a result made in the scope 'main/first' is used after the scope closed"):
        capture(program, backend, workspace)


@pytest.mark.invariant("G7", control=True)
@pytest.mark.parametrize("checked", [False, True])
def test_a_lent_result_that_is_read_in_its_scope_is_fine(backend, checked):
    x, out, workspace = torch.ones(8), torch.zeros(8), Workspace(checked=checked)
    graph = capture(_recycled(workspace, x, out, inside=True, returned=True), backend, workspace)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert graph.replay().tolist() == [105.0 * value] * 8


@pytest.mark.parametrize("checked", [False, True])
def test_a_lent_result_that_dies_on_a_side_stream_is_no_race(backend, checked):
    x, side, workspace = torch.ones(8), backend.device.new_stream("side"), Workspace(checked=checked)

    def program() -> torch.Tensor:
        first, second = workspace.take((8,), torch.float32), workspace.take((8,), torch.float32)
        with fork(side, workspace) as branch:
            with branch:
                lent = x * 2.0
                torch.add(lent, 1.0, out=second)
                del lent
            lent = x * 3.0
            torch.add(lent, 1.0, out=first)
            del lent
            branch.join()
            return torch.add(first, second, out=first)

    graph = capture(program, backend, workspace)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert graph.replay().tolist() == [5 * value + 2] * 8


def test_an_opaque_node_is_told_by_the_line_that_called_its_op(backend):
    default_registry().load_routes()
    x, side, workspace = torch.ones(2, 8), backend.device.new_stream("side"), Workspace()
    ops = Ops(workspace)

    def program() -> None:
        with fork(side, workspace) as branch, branch:
            first = ops.rms_norm(x, None, 1e-6)
        ops.rms_norm(first, None, 1e-6)
        ops.rms_norm(first, None, 1e-6)

    graph = capture(program, backend, workspace)
    lines = [node.where.rpartition(":")[0].endswith("test_break_memory.py") for node in graph.nodes()]
    assert lines == [True] * 3
