"""Counted work: of eager code, of graphs, and of a backend that cannot capture (G4, G10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halma.backends.cpu.backend import CpuBackend
from halma.hal.backend import GraphCounts
from halma.hal.dispatch import Ops, OpTable, RouteSpec, bind, like
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.current import current_recorder, one_time_work
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace
from tests.cpu.backend.captured import ToyDecode, capture, planned

TABLE = OpTable()


@TABLE.define("scale_add", out=lambda x, y: like(x))
def scale_add(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    scratch = ws.take(x.shape, x.dtype)
    torch.mul(x, 2.0, out=scratch)
    torch.add(scratch, y, out=out)


def _host_loop(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    def launch() -> None:
        for row, factor in enumerate(y[:, 0].tolist()):
            out[row].copy_(x[row])
            out[row].mul_(2.0).add_(factor)

    return launch


TABLE.add_route(RouteSpec("scale_add", "rows", lambda: _host_loop, backends=("cpu",), opaque=True))


def program_of(ops: Ops, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        z = ops.scale_add(x, y)
        z = ops.scale_add(z, y)
        out = ops.workspace.take(z.shape, z.dtype)
        return out.copy_(z)

    return program


def eager_counts(backend: CpuBackend, program: Callable[[], object]) -> GraphCounts:
    with backend.graphs.counting() as counts:
        program()
    return counts()


@pytest.mark.invariant("G10", control=True)
def test_results_that_nobody_placed_are_counted(backend):
    x = torch.ones(2, 3)

    def program() -> torch.Tensor:
        return (x * 2).clone().to(torch.float64)[0] + torch.empty(3)

    assert eager_counts(backend, program) == GraphCounts(kernels=2, copies=2, allocations=5)
    graph = capture(backend, program).counts()
    assert (graph.kernels, graph.copies, graph.allocations) == (2, 2, 0)
    assert graph.fallback_bytes == 24 + 24 + 48 + 12 + 24


def test_views_and_queries_are_no_work_and_counting_ends_with_its_block(backend):
    x = torch.ones(4, 4)
    with backend.graphs.counting() as counts:
        assert x.view(-1)[1:].unsqueeze(0).shape and not x.is_pinned()
        assert counts() == GraphCounts()
        x.add_(1)
        assert counts() == GraphCounts(kernels=1)
    x.add_(1)
    assert counts() == GraphCounts(kernels=1)
    with torch.inference_mode():
        assert eager_counts(backend, lambda: torch.nn.functional.linear(x, x)) == GraphCounts(1, 0, 1)


@pytest.mark.invariant("G4")
def test_a_backend_that_cannot_capture_does_the_same_work_as_one_that_may_not():
    counts = []
    for backend, enabled in ((CpuBackend(graph_capture=False), True), (CpuBackend(), False)):
        toy, workspace, graph = ToyDecode(), Workspace(), BreakableGraph(backend)
        toy.refresh(1)
        workspace.seal()
        with backend.graphs.counting() as counted, GraphCaptureScope(graph, workspace, enabled=enabled):
            graph.set_outputs(toy.step())
        assert graph.outcome is Outcome.INERT
        counts.append((counted(), graph.outputs()))
    assert counts[0][0] == counts[1][0] and counts[0][0].kernels > 100
    assert torch.equal(counts[0][1], counts[1][1])


def test_the_incapable_backend_says_why_and_refuses_to_begin():
    backend = CpuBackend(graph_capture=False)
    assert "graph_capture=False" in (backend.graphs.unsupported() or "")
    assert backend.capabilities.graph_capture is False and CpuBackend().graphs.unsupported() is None
    workspace = Workspace()
    workspace.seal()
    with pytest.raises(CaptureError, match="cannot capture"):
        backend.graphs.begin(backend.device.current_stream(), workspace)


def test_an_opaque_route_is_one_node_with_the_references_results(backend):
    workspace = Workspace(checked=True)
    ops = bind(workspace, ops=TABLE)
    x, y = torch.randn(3, 2), torch.randn(3, 1).expand(3, 2).contiguous()
    program = program_of(ops, x, y)
    graph = capture(backend, program, planned(backend, program, workspace))
    names = [node.name for node in graph.nodes()]
    assert names.count("scale_add:rows") == 2 and "aten.mul.out" not in names
    for _ in range(3):
        x.normal_()
        y.copy_(torch.randn(3, 1))
        assert torch.equal(graph.replay(), (x * 2 + y) * 2 + y)


@pytest.mark.invariant("G4")
def test_a_launch_that_calls_no_torch_is_counted_when_it_runs_eagerly(backend):
    table = OpTable()

    @table.define("bump", out=None)
    def bump(x: torch.Tensor, *, ws: Workspace) -> None:
        x.add_(1.0)

    def on_the_host(x: torch.Tensor, *, ws: Workspace) -> Callable[[], None]:
        values = x.numpy()
        return lambda: values.__iadd__(1.0) and None

    table.add_route(RouteSpec("bump", "host", lambda: on_the_host, backends=("cpu",), opaque=True))
    ops, x = bind(Workspace(), ops=table), torch.zeros(1)
    assert eager_counts(backend, lambda: ops.bump(x)).kernels == 1
    assert eager_counts(backend, lambda: (ops.bump(x), ops.bump(x))).kernels == 2
    assert x.item() == 3.0


def test_first_time_work_runs_in_a_dry_run_and_is_refused_in_a_capture(backend):
    x, tried = torch.ones(3), []

    def program() -> torch.Tensor:
        with one_time_work() as allowed:
            if allowed:
                tried.append((x.sum().item(), current_recorder()))
            else:
                tried.append("not now")
        return x + 1

    graph = capture(backend, program)
    program()
    assert tried == [(3.0, None), "not now", (3.0, None)]
    assert graph.counts().kernels == 1 and graph.replay().tolist() == [2, 2, 2]
