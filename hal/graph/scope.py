"""The one place where a capture begins and ends."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from halma.hal.backend import Backend, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome, Segment, counters
from halma.hal.graph.breaks import IN_PLACE, Break, BreakPoint, Out, break_point
from halma.hal.graph.current import allow_work, current_scope, forbid_work, note_failure, open_scopes, set_current_scope
from halma.hal.graph.forks import Fork, OpenForks, fork
from halma.hal.graph.retire import drain, drain_quietly, end_lease, guard, take_lease
from halma.hal.workspace import Workspace

if TYPE_CHECKING:
    from halma.hal.graph.cells import Cell


def why_unsupported(backend: Backend, mode: CaptureMode) -> str | None:
    """Why ``backend`` cannot capture in ``mode``, or None."""
    why = backend.graphs.unsupported()
    if why is None and mode is CaptureMode.PIECEWISE and not backend.capabilities.graph_segments:
        why = f"a piecewise capture needs graph_segments, which is {backend.capabilities.graph_segments} here"
    return why


class GraphCaptureScope:
    """Everything run inside goes into ``graph`` instead of running.

    ``with GraphCaptureScope(graph, workspace, enabled=...) as scope: graph.set_outputs(program())``

    On entry, in this order: a scope that is open on this thread or another, a graph that holds something and a
    workspace in use are refused, before any call to the backend and whether or not capture is on, so that the
    switch cannot change which programs are legal (G2). If capture is switched off or the backend cannot, the
    scope is *inert*: no backend calls, the program runs eagerly. Otherwise the first segment begins.

    On exit the outcome is set. A capture fails if anything raised inside that the layer or the backend saw, also
    if the program swallowed it (G3): the graph is reset, nothing can be read, the first error is kept and raised.
    Once a segment could not be followed by the next, ops, streams and breaks refuse to go on eagerly.

    Args:
        graph: an empty container.
        workspace: what the program takes its memory from.
        stream: what is captured; the current stream by default.
        enabled: the switch, normally ``settings().graph``.
        why_off: the reason to give when it is off.
        mode: ``FULL`` refuses breaks, ``PIECEWISE`` splits at each (G5) and needs the capability
            ``graph_segments``.
        allow_empty: a segment may record no work. Otherwise that is an error (G23), except beside a bare marker
            and before a break that begins the program or after one that ends it.
    """

    def __init__(
        self,
        graph: BreakableGraph,
        workspace: Workspace,
        *,
        stream: Stream | None = None,
        enabled: bool = True,
        why_off: str | None = None,
        mode: CaptureMode = CaptureMode.FULL,
        allow_empty: bool = False,
    ) -> None:
        self.graph = graph
        self.workspace = workspace
        self.stream = stream
        self.enabled = enabled
        self.why_off = why_off
        self.mode = mode
        self.allow_empty = allow_empty
        self.active = False
        self.why_inert: str | None = None
        self.first_error: BaseException | None = None
        self.segment_open = False
        self.in_break = False
        self.forks = OpenForks()
        self._home: Stream | None = None  # current where the program's own work runs, outside forks
        self._unentered: list[BreakPoint] = []
        self._claimed: dict[int, tuple[Cell, str]] = {}

    # -- for programs -------------------------------------------------------------------------------

    def break_point(self, out: Out = IN_PLACE, name: str = "") -> BreakPoint:
        """As :func:`halma.hal.graph.breaks.break_point`."""
        return break_point(out, name)

    def fork(self, stream: Stream) -> Fork:
        """As :func:`halma.hal.graph.forks.fork`, in this capture's workspace."""
        return fork(stream, self.workspace)

    def poison(self, error: BaseException) -> None:
        """Remember the first error raised inside, even one that the program catches."""
        if self.first_error is None:
            self.first_error = error

    # -- entry --------------------------------------------------------------------------------------

    def __enter__(self) -> GraphCaptureScope:
        self._refuse_nesting()
        if not self.graph.empty:
            raise CaptureError(
                "the graph is not empty",
                found=f"outcome {self.graph.outcome.value}, {len(self.graph.segments)} segments",
                do="reset() it, or capture into a new BreakableGraph",
            )
        drain()
        with guard:  # nobody destroys an executable between this and the driver's begin
            self._refuse_other_threads()
            take_lease(self.workspace, f"a capture of {self.graph}")
            open_scopes[threading.get_ident()] = f"{self.graph}"
        set_current_scope(self)
        try:
            self._open()
        except BaseException as error:
            self._fail(error)
            self._withdraw()
            raise
        return self

    def _open(self) -> None:
        self.graph.reset()  # an earlier failure is forgotten
        if not self.workspace.sealed:  # also where nothing is captured: a switch makes no program legal (G2)
            raise CaptureError(
                "the workspace must be sealed before a capture",
                found="its addresses may still move",
                do="dry-run the program with this workspace, then seal()",
            )
        self.graph.mode, self.graph.workspace = self.mode, self.workspace
        self.why_inert = self._why_inert()
        self.active = self.why_inert is None
        if not self.active:
            counters.scopes_inert += 1
            self._home = self.graph.backend.device.current_stream()
            return
        if self.mode is CaptureMode.FULL:
            counters.scopes_full += 1
        else:
            counters.scopes_piecewise += 1
        self.graph.grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if self.stream is None:
            self.stream = self.graph.backend.device.current_stream()
        self._begin_segment()

    def _why_inert(self) -> str | None:
        if not self.enabled:
            return self.why_off or "capture is switched off"
        return why_unsupported(self.graph.backend, self.mode)

    def _refuse_nesting(self) -> None:
        outer = current_scope()
        if outer is None:
            return
        error = CaptureError(
            "a capture is open on this thread already",
            found=f"it captures {outer.graph}",
            do="close it first; a capture inside a capture would record the inner program into the outer graph",
        )
        note_failure(error)
        raise error

    def _refuse_other_threads(self) -> None:
        if open_scopes:
            raise CaptureError(
                "a capture is open on another thread",
                asked=f"to capture {self.graph}",
                found=[f"thread {thread} captures {what}" for thread, what in open_scopes.items()],
                do="one thread captures at a time: wait until it is done",
            )

    # -- segments -----------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        assert self.stream is not None
        graphs = self.graph.backend.graphs
        try:
            graphs.begin(self.stream, self.workspace)
        except BaseException:
            graphs.abandon(self.stream)
            raise
        self.segment_open = True
        self._home = self.graph.backend.device.current_stream()

    def _end_segment(self) -> None:
        assert self.stream is not None
        graphs = self.graph.backend.graphs
        self.forks.join_all(self.stream, self.graph.backend.device)
        # Cleared first, so that an end that throws is never tried again.
        self.segment_open = False
        try:
            template = graphs.end(self.stream)
        except BaseException:
            graphs.abandon(self.stream)
            raise
        counts = graphs.counts(template)
        self.graph.segments.append(
            Segment(template, graphs.instantiate(template), counts, self.workspace.bytes_in_use())
        )
        counters.segments_captured += 1

    # -- breaks -------------------------------------------------------------------------------------

    def note_break(self, point: BreakPoint) -> None:
        """For breaks only: ``point`` was made and must be entered before the scope ends."""
        self._unentered.append(point)

    def forget_break(self, point: BreakPoint) -> None:
        """For breaks only: it was entered."""
        self._unentered.remove(point)

    def enter_break(self, point: BreakPoint) -> None:
        """For breaks only: end the segment.

        Raises:
            CaptureError: full mode, a capture that failed already, or a side stream that is current.
            BaseException: what the driver raised.
        """
        self.forget_break(point)
        try:
            self._refuse_break(point)
            if self.active:
                self._end_segment()
            self.in_break = True
        except BaseException as error:
            self._stop(error)
            raise

    def _refuse_break(self, point: BreakPoint) -> None:
        if self.first_error is not None:
            raise CaptureError(
                f"{point.name} comes after the capture failed",
                found=f"{type(self.first_error).__name__}: {self.first_error}",
                do="let the first error through: nothing of this capture can be used",
            ) from self.first_error
        if self.mode is CaptureMode.FULL:
            raise CaptureError(
                f"{point.name} cannot be part of a full capture",
                asked=f"mode FULL for {self.graph}",
                found="its host work would run at the capture only",
                do="capture with mode=CaptureMode.PIECEWISE, or keep the step free of breaks",
            )
        current = self.graph.backend.device.current_stream()
        if current != self._home:
            raise CaptureError(
                f"{point.name} was reached on a side stream",
                found=f"the capture is of another stream than the current one, {current}",
                do="leave the branch of the fork before the break",
            )

    def leave_break(self, record: Break | None, error: BaseException | None) -> None:
        """For breaks only: file it and begin the next segment, unless something raised in it.

        Raises:
            BaseException: what was raised inside and swallowed there, or what the driver raises.
        """
        if not self.in_break:
            return
        self.in_break = False
        if not self.active or record is None:
            return
        swallowed = self.first_error if error is None else None
        try:
            if swallowed is not None:
                raise swallowed
            if error is None:
                self.graph.breaks.append(record)
                self._begin_segment()
                counters.breaks_registered += 1
            else:
                self._stop(error)
        except BaseException as failure:
            self._stop(failure)
            raise

    def claim(self, cell: Cell, name: str) -> None:
        """For breaks only: ``cell`` is the destination of the break ``name``.

        Raises:
            CaptureError: another break of this capture has it.
        """
        known = self._claimed.get(id(cell))
        if known is not None:
            raise CaptureError(
                f"{name}: {cell} is the destination of another break of this capture",
                found=f"{known[1]} writes into it",
                do="give each break a cell of its own: replays would overwrite what captured work still reads",
            )
        self._claimed[id(cell)] = (cell, name)

    def _stop(self, error: BaseException) -> None:
        """After an error with no segment open: what the program does next must not run for real."""
        self.poison(error)
        if self.active and not self.segment_open:
            forbid_work(f"the capture of {self.graph} failed with {type(error).__name__}: {error}")

    # -- exit ---------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = self.first_error or error
        try:
            if first is None:
                self._close()
        except BaseException as failure:
            first = failure
        if first is not None:
            self._fail(first)
        else:
            self.graph.outcome = Outcome.CAPTURED if self.active else Outcome.INERT
        self._withdraw()
        # The program's own exception is on its way; one that it swallowed, or hid behind a later one, is raised here.
        if first is not None and not _shows(error, first):
            raise first

    def _close(self) -> None:
        if self._unentered:
            raise CaptureError(
                f"{self._unentered[0].name} was made and never entered",
                found="a break does nothing until its block is entered",
                do="write `with break_point(...) as host:`, or break_here() for a bare marker",
            )
        if not self.active:
            return
        self._end_segment()
        segments, breaks = self.graph.segments, self.graph.breaks
        if len(segments) != len(breaks) + 1:
            raise CaptureError(
                "the capture's segments do not match its breaks",
                found=f"{len(segments)} segments, {len(breaks)} breaks",
                do="this is a defect of the scope: report it with the program",
            )
        if not self.allow_empty:
            self._refuse_empty_segments()
        for user in self.graph.users.values():
            user.captured(self.graph)

    def _refuse_empty_segments(self) -> None:
        breaks, last = self.graph.breaks, len(self.graph.breaks)
        for position, segment in enumerate(self.graph.segments):
            beside = breaks[max(position - 1, 0) : position + 1]
            at_an_end = bool(breaks) and position in (0, last)
            if segment.empty and not at_an_end and not any(between.marker for between in beside):
                raise CaptureError(
                    f"segment {position} of {self.graph} recorded no work",
                    found=[f"it lies beside {between.name}" for between in beside] or "the program has no breaks",
                    do="see that the program runs on the captured stream, or declare it with allow_empty=True",
                )

    def _fail(self, error: BaseException) -> None:
        counters.scopes_failed += 1
        if self.segment_open and self.stream is not None:
            self.segment_open = False
            self.graph.backend.graphs.abandon(self.stream)
        allow_work()
        self.workspace.reset()
        self.graph.reset()
        self.graph.outcome = Outcome.FAILED
        self.graph.error = error

    def _withdraw(self) -> None:
        allow_work()
        set_current_scope(None)
        open_scopes.pop(threading.get_ident(), None)
        end_lease(self.workspace)
        drain_quietly()


def _shows(error: BaseException | None, first: BaseException) -> bool:
    """Whether who sees ``error`` sees ``first`` too; a request to stop outranks both."""
    if error is not None and not isinstance(error, Exception):
        return True
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if error is first:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
