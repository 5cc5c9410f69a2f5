"""The one place where a capture begins and ends."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from halma.hal.backend import Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome, Segment, counters
from halma.hal.workspace import Workspace


class _Current(threading.local):
    scope: GraphCaptureScope | None = None


_current = _Current()


def current_scope() -> GraphCaptureScope | None:
    """The scope that is open on this thread, inert ones included."""
    return _current.scope


def note_failure(error: BaseException) -> None:
    """Tell the open scope, if any, that something inside it raised.

    Whoever catches the exception inside the scope cannot hide it: the scope ends as failed (G3).
    """
    scope = _current.scope
    if scope is not None:
        scope.poison(error)


class GraphCaptureScope:
    """Everything run inside goes into ``graph`` instead of running.

    ``with GraphCaptureScope(graph, workspace, enabled=...) as scope: graph.set_outputs(program())``

    On entry, in this order: nesting on this thread and a graph that holds something are refused, before any
    call to the backend and whether or not capture is on, so that the switch cannot change which programs are
    legal (G2). If capture is switched off or the backend cannot, the scope is *inert*: no backend calls, the
    program runs eagerly. Otherwise the first segment begins.

    On exit the outcome is set; a failed capture resets the graph, keeps the first error and raises it.

    Args:
        graph: an empty container.
        workspace: what the program takes its memory from.
        stream: what is captured; the current stream by default.
        enabled: the switch, normally ``settings().graph``.
    """

    def __init__(
        self,
        graph: BreakableGraph,
        workspace: Workspace,
        *,
        stream: Stream | None = None,
        enabled: bool = True,
    ) -> None:
        self.graph = graph
        self.workspace = workspace
        self.stream = stream
        self.enabled = enabled
        self.active = False
        self.why_inert: str | None = None
        self.first_error: BaseException | None = None
        self._segment_open = False

    def __enter__(self) -> GraphCaptureScope:
        if _current.scope is not None:
            raise CaptureError(
                "a capture is open on this thread already",
                found=f"it captures {_current.scope.graph!r}",
                do="close it first; a capture inside a capture would record the inner program into the outer graph",
            )
        if not self.graph.empty:
            raise CaptureError(
                "the graph is not empty",
                found=f"outcome {self.graph.outcome.value}, {len(self.graph.segments)} segments",
                do="reset() it, or capture into a new BreakableGraph",
            )
        self.graph.reset()  # an earlier failure is forgotten
        graphs = self.graph.backend.graphs
        self.why_inert = "capture is switched off" if not self.enabled else graphs.unsupported()
        self.active = self.why_inert is None
        if not self.active:
            counters.scopes_inert += 1
            _current.scope = self
            return self
        if self.stream is None:
            self.stream = self.graph.backend.device.current_stream()
        graphs.begin(self.stream, self.workspace)
        self._segment_open = True
        counters.scopes_full += 1
        self.graph.grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self.graph.workspace = self.workspace
        _current.scope = self
        return self

    def poison(self, error: BaseException) -> None:
        """Remember the first error raised inside, even one that the program catches."""
        if self.first_error is None:
            self.first_error = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.scope = None
        if not self.active:
            self.graph.outcome = Outcome.INERT if error is None else Outcome.FAILED
            self.graph.error = error
            return
        if error is not None or self.first_error is not None:
            self._abandon()
            self._fail(self.first_error or error)
            # The program's own exception is on its way already; one that it swallowed is raised here.
            if error is None and self.first_error is not None:
                raise self.first_error
            return
        try:
            self._close_segment()
        except BaseException as failure:
            self._abandon()
            self._fail(failure)
            raise
        self.graph.outcome = Outcome.CAPTURED

    def _close_segment(self) -> None:
        graphs = self.graph.backend.graphs
        assert self.stream is not None
        # Cleared first, so that an end that throws is never tried again.
        self._segment_open = False
        template = graphs.end(self.stream)
        self.graph.segments.append(Segment(template, graphs.instantiate(template)))
        counters.segments_captured += 1
        if len(self.graph.segments) != len(self.graph.breaks) + 1:
            raise CaptureError(
                "the capture's segments do not match its breaks",
                found=f"{len(self.graph.segments)} segments, {len(self.graph.breaks)} breaks",
                do="this is a defect of the scope: report it with the program",
            )

    def _abandon(self) -> None:
        assert self.stream is not None
        self._segment_open = False
        self.graph.backend.graphs.abandon(self.stream)

    def _fail(self, error: BaseException | None) -> None:
        counters.scopes_failed += 1
        self.workspace.reset()
        self.graph.reset()
        self.graph.outcome = Outcome.FAILED
        self.graph.error = error
