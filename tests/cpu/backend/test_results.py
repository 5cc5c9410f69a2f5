"""Memory of results: recycled, poisoned, never read too late."""

from __future__ import annotations

import gc

import pytest
import torch

from halma.hal.errors import CaptureError, WorkspaceError
from halma.hal.workspace import Workspace
from tests.cpu.backend.captured import ToyDecode, capture, planned, template_of


def test_results_share_memory_as_soon_as_they_are_dead(backend):
    x = torch.randn(1000)

    def chain(length: int) -> torch.Tensor:
        y = x
        for _ in range(length):
            y = y * 1.5
        return y

    few, many = (planned(backend, lambda n=n: chain(n)).report() for n in (3, 40))
    assert few.total == many.total == 2 * 4096 and many.fallbacks == 2


def test_results_kept_alive_have_memory_of_their_own(backend):
    x = torch.randn(1000)
    report = planned(backend, lambda: [x * factor for factor in range(5)]).report()
    assert report.fallbacks == 5 and report.total == 5 * 4096


def test_a_view_keeps_its_result_alive(backend):
    x = torch.randn(8, 8)

    def program() -> torch.Tensor:
        tail = (x * 2)[4:]
        noise = [x * factor for factor in range(3)]
        return tail + noise[2][4:]

    graph = capture(backend, program)
    assert torch.equal(graph.replay(), program())


@pytest.mark.invariant("W3")
def test_recycled_results_are_poisoned_in_checked_mode_only(backend):
    toy = ToyDecode()
    plain, checked = (
        capture(backend, toy.step, planned(backend, toy.step, Workspace(checked=on))) for on in (False, True)
    )
    names = [node.name for node in checked.nodes()]
    assert names.count("poison") > 20 and [n for n in names if n != "poison"] == [n.name for n in plain.nodes()]
    assert checked.counts() == plain.counts()


@pytest.mark.invariant("W3")
def test_a_weak_alias_to_recycled_memory_reads_nan_in_checked_mode(backend):
    x = torch.ones(64)
    workspace = Workspace(checked=True)

    def program(late: bool) -> torch.Tensor:
        out = workspace.take((64,), torch.float32)
        with workspace.scope("inner"):
            scratch = workspace.take((64,), torch.float32)
            torch.add(x, 1.0, out=scratch)
            if not late:
                torch.mul(scratch, 2.0, out=out)
        if late:  # the scope closed: this view is the alias that nobody keeps valid
            torch.mul(scratch, 2.0, out=out)
        return out

    planned(backend, lambda: program(True), workspace)
    late = capture(backend, lambda: program(True), workspace)
    assert late.replay().isnan().all()
    on_time = capture(backend, lambda: program(False), workspace)
    assert on_time.replay().tolist() == [4.0] * 64


@pytest.mark.invariant("W3", control=True)
def test_without_checks_the_alias_reads_whatever_lies_there(backend):
    """Why checked mode exists: the same mistake gives the right number here, until something else moves in."""
    x = torch.ones(64)
    workspace = Workspace()

    def program(neighbour: bool) -> torch.Tensor:
        out = workspace.take((64,), torch.float32)
        with workspace.scope("inner"):
            scratch = workspace.take((64,), torch.float32)
            torch.add(x, 1.0, out=scratch)
        if neighbour:
            with workspace.scope("other"):
                torch.mul(x, 50.0, out=workspace.take((64,), torch.float32))
        return torch.mul(scratch, 2.0, out=out)

    planned(backend, lambda: program(True), workspace)
    assert capture(backend, lambda: program(False), workspace).replay().tolist() == [4.0] * 64
    assert capture(backend, lambda: program(True), workspace).replay().tolist() == [100.0] * 64


def test_memory_that_nobody_wrote_reads_nan_in_checked_mode(backend):
    x = torch.ones(4)
    graph = capture(backend, lambda: torch.empty(4) + x)
    assert graph.replay().isnan().all()


@pytest.mark.invariant("W3")
def test_a_result_used_after_its_scope_closed_is_refused(backend):
    x = torch.ones(4)
    workspace = Workspace(checked=True)

    def program(outside: bool) -> torch.Tensor:
        with workspace.scope("inner"):
            result = x * 2
            inside = result + 1 if not outside else None
            if inside is not None:
                return torch.add(inside, 0.0, out=x)
        return result + 1

    with pytest.raises(CaptureError, match="'main/inner' is used after the scope closed"):
        backend.graphs.dry_run(lambda: program(True), workspace)
    backend.graphs.dry_run(lambda: program(False), workspace)


@pytest.mark.invariant("W1")
def test_a_result_that_was_not_planned_is_refused(backend):
    x = torch.ones(100)
    workspace = planned(backend, lambda: x[:50] * 2)
    with pytest.raises(WorkspaceError, match=r"cannot grow in 'main'[\s\S]*does not write where it is told"):
        capture(backend, lambda: x * 2, workspace)
    with pytest.raises(WorkspaceError, match="cannot grow"):
        capture(backend, lambda: (x[:50] * 2, x[:50] * 3), workspace)


@pytest.mark.invariant("W1", control=True)
@pytest.mark.invariant("W2", control=True)
def test_smaller_results_in_the_same_places_are_fine(backend):
    x = torch.ones(100)
    workspace = planned(backend, lambda: x * 2 + 1)
    for length in (100, 7, 64):
        graph = capture(backend, lambda n=length: x[:n] * 2 + 1, workspace)
        assert graph.replay().tolist() == [3.0] * length


def test_results_do_not_shift_the_places_of_takes(backend):
    x = torch.ones(16)

    def addresses(extra: bool) -> int:
        workspace = Workspace()

        def program() -> torch.Tensor:
            first = workspace.take((16,), torch.float32)
            torch.mul(x * 2 + 1 if extra else x, 1.0, out=first)
            return torch.add(first, 0.0, out=workspace.take((16,), torch.float32))

        graph = capture(backend, program, planned(backend, program, workspace))
        assert workspace.offset_of(graph.outputs()) is not None
        return workspace.offset_of(graph.outputs()) or 0

    assert addresses(True) == addresses(False) == 256


def test_outputs_stay_valid_when_everything_else_is_dropped(backend):
    x = torch.ones(16)
    graph = capture(backend, lambda: x * 3)
    out = graph.replay()
    graph.reset()
    del graph
    gc.collect()
    waste = [torch.zeros(4096) for _ in range(32)]
    assert out.tolist() == [3.0] * 16 and len(waste) == 32


def test_the_report_names_every_result_with_its_line(backend):
    x = torch.ones(10)

    def program() -> torch.Tensor:
        return (x * 2).softmax(0)

    uses = backend.graphs.fallbacks(template_of(capture(backend, program)))
    assert [(use.op, use.nbytes, use.out_variant) for use in uses] == [
        ("aten.mul.Tensor", 40, True),
        ("aten._softmax.default", 40, True),
    ]
    assert all(use.where.endswith(f"test_results.py:{program.__code__.co_firstlineno + 1}") for use in uses)
