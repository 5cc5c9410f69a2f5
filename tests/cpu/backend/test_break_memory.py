"""Breaks and the recorder's own memory: lent results that a break pins, and what a dry run lets host work do."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import WorkspaceError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode
from halma.hal.graph.breaks import Cell, break_point
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace
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
