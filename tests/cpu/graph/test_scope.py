"""The capture scope over a scripted driver: what it refuses, and how it ends."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.scope import GraphCaptureScope, current_scope, note_failure
from halma.hal.workspace import Workspace
from tests.cpu.graph.scripted import Failure, scripted_backend


def capture(backend, program=lambda: "out", *, enabled: bool = True) -> BreakableGraph:
    graph = BreakableGraph(backend)
    with GraphCaptureScope(graph, Workspace(), enabled=enabled):
        graph.set_outputs(program())
    return graph


@pytest.mark.invariant("G1", control=True)
def test_a_capture_without_breaks_is_one_segment_and_replays_in_order():
    backend = scripted_backend()
    graph = capture(backend)
    assert graph.outcome is Outcome.CAPTURED and len(graph.segments) == 1 and not graph.breaks
    assert graph.replay() == "out" and graph.replays == 1
    assert backend.graphs.log == ["begin", "end", "instantiate", "replay"]


@pytest.mark.invariant("G1")
@pytest.mark.parametrize("extra_break", [True, False])
def test_segments_that_do_not_match_the_breaks_are_refused_at_replay(extra_break):
    graph = capture(scripted_backend())
    if extra_break:
        graph.breaks.append(lambda: None)
    else:
        graph.segments.append(graph.segments[0])
    with pytest.raises(CaptureError, match="segments do not match"):
        graph.replay()
    assert "replay" not in graph.backend.graphs.log


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
def test_nesting_is_refused_before_any_backend_call(enabled):
    outer, inner = scripted_backend(), scripted_backend()
    graph, second = BreakableGraph(outer), BreakableGraph(inner)
    with GraphCaptureScope(graph, Workspace(), enabled=enabled):
        with pytest.raises(CaptureError, match="open on this thread"), GraphCaptureScope(second, Workspace()):
            pass
        assert inner.graphs.log == []
        assert current_scope() is not None and current_scope().graph is graph
    assert current_scope() is None


@pytest.mark.invariant("G2", control=True)
def test_scopes_one_after_another_are_fine():
    backend = scripted_backend()
    assert capture(backend).captured and capture(backend).captured


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_container_that_holds_a_capture_is_refused_before_any_backend_call(enabled):
    backend = scripted_backend()
    graph = capture(backend)
    before = list(backend.graphs.log)
    with (
        pytest.raises(CaptureError, match="not empty"),
        GraphCaptureScope(graph, Workspace(), enabled=enabled),
    ):
        pass
    assert backend.graphs.log == before and graph.captured


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("where", ["begin", "end", "instantiate"])
def test_a_driver_that_throws_leaves_nothing_readable(where):
    backend = scripted_backend(fail=[where])
    graph = BreakableGraph(backend)
    with pytest.raises(Failure, match=where), GraphCaptureScope(graph, Workspace()):
        graph.set_outputs("out")
    assert current_scope() is None and backend.graphs.live == 0
    if where != "begin":
        assert graph.outcome is Outcome.FAILED and str(graph.error) == where
        with pytest.raises(CaptureError, match="failed capture"):
            graph.outputs()
    with pytest.raises(CaptureError):
        graph.replay()
    backend.graphs.fail.clear()
    with GraphCaptureScope(graph, Workspace()):
        graph.set_outputs("second")
    assert graph.captured and graph.replay() == "second" and graph.error is None


@pytest.mark.invariant("G3")
def test_a_program_that_throws_fails_the_capture_and_the_caller_sees_it():
    backend = scripted_backend()
    graph = BreakableGraph(backend)
    with pytest.raises(ZeroDivisionError), GraphCaptureScope(graph, Workspace()):
        graph.set_outputs(1 / 0)
    assert graph.outcome is Outcome.FAILED and isinstance(graph.error, ZeroDivisionError)
    assert backend.graphs.log == ["begin", "abandon"]


@pytest.mark.invariant("G3")
def test_an_exception_swallowed_inside_the_scope_still_fails_it():
    graph = BreakableGraph(scripted_backend())
    with pytest.raises(Failure, match="first"), GraphCaptureScope(graph, Workspace()):
        for message in ("first", "second"):
            note_failure(Failure(message))
        graph.set_outputs("looks fine")
    assert graph.outcome is Outcome.FAILED and str(graph.error) == "first"
    with pytest.raises(CaptureError, match="first"):
        graph.outputs()


@pytest.mark.invariant("G3", control=True)
def test_an_exception_that_no_op_saw_is_the_programs_own_business():
    graph = BreakableGraph(scripted_backend())
    with GraphCaptureScope(graph, Workspace()):
        try:
            raise KeyError("a look-up of the model's own")
        except KeyError:
            graph.set_outputs("out")
    assert graph.captured


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("kwargs", [{"enabled": False}, {"unsupported": "cannot"}])
def test_an_inert_scope_ran_once_and_cannot_be_replayed(kwargs):
    ran: list[int] = []
    enabled = kwargs.pop("enabled", True)
    backend = scripted_backend(**kwargs)
    graph = capture(backend, lambda: ran.append(1) or "out", enabled=enabled)
    assert graph.outcome is Outcome.INERT and graph.outputs() == "out" and ran == [1]
    assert backend.graphs.log == []
    with pytest.raises(CaptureError, match="inert"):
        graph.replay()


@pytest.mark.invariant("G24")
def test_replay_in_another_grad_mode_is_refused():
    with torch.no_grad():
        graph = capture(scripted_backend())
    with pytest.raises(CaptureError, match="grad mode"):
        graph.replay()
    with torch.inference_mode(), pytest.raises(CaptureError, match="grad mode"):
        graph.replay()


@pytest.mark.invariant("G24", control=True)
def test_replay_in_the_same_grad_mode_works():
    with torch.no_grad():
        graph = capture(scripted_backend())
        assert graph.replay() == "out"
