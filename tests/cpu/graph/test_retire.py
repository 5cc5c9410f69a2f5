"""The queue of executables over a scripted driver: errors of the driver, other threads, a workspace's user."""

from __future__ import annotations

import threading

import pytest

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.current import close_capture, open_capture
from halma.hal.graph.retire import drain, lease, retire, waiting
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace
from tests.cpu.graph.scripted import Failure, scripted_backend


def sealed() -> Workspace:
    workspace = Workspace()
    workspace.seal()
    return workspace


def capture(backend, workspace: Workspace | None = None) -> BreakableGraph:
    graph = BreakableGraph(backend, "toy")
    with GraphCaptureScope(graph, workspace or sealed()):
        graph.set_outputs("out")
    return graph


@pytest.mark.invariant("G22")
def test_a_capture_that_no_scope_knows_of_defers_destroys_too():
    backend = scripted_backend()
    graph = capture(backend)
    open_capture("a stream of a driver")
    try:
        graph.reset()
        assert "destroy" not in backend.graphs.log and waiting() == 1
    finally:
        close_capture()
    kept = capture(backend)
    assert kept.captured and backend.graphs.log[3:] == ["destroy", "begin", "end", "instantiate"] and waiting() == 0


@pytest.mark.invariant("G22", control=True)
def test_without_a_capture_nothing_waits():
    backend = scripted_backend()
    capture(backend).reset()
    assert backend.graphs.log[-1] == "destroy" and waiting() == 0


def test_a_destroy_that_fails_is_raised_after_the_others_were_tried():
    backend = scripted_backend(fail=["destroy"])
    for name in ("one", "two"):
        retire(backend.graphs, name)
    with pytest.raises(Failure, match="destroy"):
        drain()
    assert backend.graphs.log == ["destroy", "destroy"] and waiting() == 0


@pytest.mark.invariant("G3")
def test_a_destroy_that_fails_does_not_hide_why_the_capture_failed():
    backend = scripted_backend(fail=["destroy", "end"])
    old, graph = BreakableGraph(backend), BreakableGraph(backend)
    retire(backend.graphs, "queued while the capture is open")
    with pytest.raises(Failure, match="destroy"):
        drain()
    with pytest.raises(Failure, match="end"), GraphCaptureScope(graph, sealed()):
        retire(backend.graphs, "queued while the capture is open")
    assert graph.outcome is Outcome.FAILED and str(graph.error) == "end" and waiting() == 0 and old.empty


@pytest.mark.invariant("G22")
def test_a_workspace_has_one_user_and_the_refusal_names_both():
    workspace, other = sealed(), sealed()
    with lease(workspace, "a profiler"):
        with pytest.raises(CaptureError, match=r"a capture of toy on thread[\s\S]*a profiler on thread"):
            capture(scripted_backend(), workspace)
        capture(scripted_backend(), other)
    assert capture(scripted_backend(), workspace).captured


@pytest.mark.invariant("G22")
def test_a_scope_waits_for_a_drain_of_another_thread():
    """A destroy that has begun is over before the driver's begin."""
    backend = scripted_backend()
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def destroy(self, executable: object) -> None:
            begun.set()
            assert go_on.wait(10)
            backend.graphs.log.append("destroyed")

    retire(Slow(), "executable")  # type: ignore[arg-type]
    drainer = threading.Thread(target=drain)
    drainer.start()
    assert begun.wait(10)
    capturer = threading.Thread(target=capture, args=(backend,))
    capturer.start()
    go_on.set()
    drainer.join()
    capturer.join()
    assert backend.graphs.log == ["destroyed", "begin", "end", "instantiate"]
