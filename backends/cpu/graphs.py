"""The graph part of the CPU backend: records ATen calls and replays them on the same addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch

from halma.backends.cpu.counting import Counter
from halma.backends.cpu.device import CpuDevice
from halma.backends.cpu.recorder import Recorder, recording, resized
from halma.backends.cpu.results import FallbackUse
from halma.backends.cpu.streams import CpuStream, StreamState, own_stream
from halma.backends.cpu.tape import Executable, Held, Template
from halma.hal.backend import GraphCounts, GraphNode, PoolUse, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import (
    close_capture,
    current_recorder,
    open_capture,
    open_captures,
    refuse_other_thread,
    set_current_recorder,
)
from halma.hal.workspace import Workspace


class _Open:
    """An open recording of a thread: the recorder, and what to undo when it ends, in order."""

    def __init__(self, recorder: Recorder, undo: contextlib.ExitStack) -> None:
        self.recorder = recorder
        self.undo = undo


class CpuGraphs:
    """See :class:`halma.hal.backend.GraphPart`.

    Args:
        device: its streams.
        state: what is current on each thread.
        reason: why this instance cannot capture, or None.
    """

    def __init__(self, device: CpuDevice, state: StreamState, reason: str | None) -> None:
        self._device = device
        self._state = state
        self._reason = reason
        self._open: dict[CpuStream, _Open] = {}

    def unsupported(self) -> str | None:
        """The reason given when this backend was made."""
        return self._reason

    def is_capturing(self) -> bool:
        """Whether this thread captures; a dry run is none."""
        return self._state.clock is not None and isinstance(r := current_recorder(), Recorder) and not r.planning

    # -- recording ----------------------------------------------------------------------------------

    def dry_run(self, program: Callable[[], Any], workspace: Workspace) -> None:
        """Record ``program`` on a tape that is thrown away: nothing runs, the workspace sees every take.

        Raises:
            CaptureError: the program cannot be captured, or a capture is open.
        """
        stream = self._device.current_stream()
        opened = self._start(stream, workspace, planning=True)
        try:
            program()
        except BaseException:
            opened.undo.close()
            workspace.reset()
            raise
        opened.undo.close()
        opened.recorder.finish()

    def begin(self, stream: Stream, workspace: Workspace) -> None:
        """Start recording this thread's work; ``stream`` becomes its current stream until :meth:`end`.

        Raises:
            CaptureError: not supported, a capture is open, or the workspace is not sealed.
        """
        own = own_stream(stream)
        if self._reason is not None:
            raise CaptureError("this backend cannot capture", found=self._reason, do="run the program eagerly")
        if not workspace.sealed:
            raise CaptureError(
                "the workspace must be sealed before a capture",
                found="its addresses may still move",
                do="dry-run the program with this workspace, then seal()",
            )
        self._open[own] = self._start(own, workspace, planning=False)

    def _start(self, stream: CpuStream, workspace: Workspace, *, planning: bool) -> _Open:
        if open_captures:
            refuse_other_thread("a recording")
        if self._state.clock is not None or current_recorder() is not None:
            raise CaptureError(
                "a recording is open on this thread already",
                asked="a dry run" if planning else f"a capture of stream {stream.name!r}",
                do="end() or abandon() it first; recordings do not nest",
            )
        recorder = Recorder(stream, self._device, workspace, planning=planning)
        with contextlib.ExitStack() as undo:  # undoes what was done if a later step fails
            if not planning:
                open_capture(f"stream {stream.name!r} of the cpu backend")
                undo.callback(close_capture)
            undo.enter_context(stream)
            self._state.clock = recorder.clock
            undo.callback(self._forget_clock)
            set_current_recorder(recorder, aside=partial(self._aside, recorder) if planning else None)
            undo.callback(set_current_recorder, None)
            undo.enter_context(recording(recorder))
            return _Open(recorder, undo.pop_all())

    def _forget_clock(self) -> None:
        self._state.clock = None

    @contextlib.contextmanager
    def _aside(self, recorder: Recorder) -> Generator[None]:
        self._state.clock = None  # host work may wait for streams and events
        try:
            with recorder.aside():
                yield
        finally:
            self._state.clock = recorder.clock

    def end(self, stream: Stream) -> Template:
        """Stop recording and return the tape.

        Raises:
            CaptureError: no capture of ``stream`` is open on this thread, work was not joined, or it races.
            BaseException: the first error inside the capture, even one that the program caught.
        """
        own = own_stream(stream)
        opened = self._open.get(own)
        if opened is None or self._state.clock is not opened.recorder.clock:
            raise CaptureError(
                f"no capture of stream {own.name!r} is open on this thread",
                asked="end()",
                do="end a capture on the stream and the thread that began it",
            )
        del self._open[own]
        opened.undo.close()
        return opened.recorder.finish()

    def abandon(self, stream: Stream) -> None:
        """Stop recording and forget it; nothing happens if no capture of ``stream`` is open on this thread."""
        opened = self._open.get(stream) if isinstance(stream, CpuStream) else None
        if opened is not None and self._state.clock is opened.recorder.clock:
            del self._open[opened.recorder.clock.origin]
            opened.undo.close()

    # -- running ------------------------------------------------------------------------------------

    def instantiate(self, template: Template) -> Executable:
        """A flat list of calls; may be done several times."""
        return Executable(template)

    def replay(self, executable: Executable, stream: Stream) -> None:
        """Run the tape in recorded order. The first run also checks that no op resizes its destination.

        Raises:
            CaptureError: destroyed, a capture is open, another grad mode than the capture's (G24), or an op
                failed, with its line.
        """
        template = executable.template
        if template is None:
            raise CaptureError("a destroyed graph cannot be replayed", do="capture it again")
        if open_captures:
            refuse_other_thread("a replay")
        if self._state.clock is not None:
            raise CaptureError("a graph cannot be replayed inside a capture", do="close the capture first")
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if mode != executable.grad_mode:
            raise CaptureError(
                "a graph must be replayed in the grad mode it was captured in",
                asked=f"replay with grad={mode[0]}, inference={mode[1]}",
                found=f"captured with grad={executable.grad_mode[0]}, inference={executable.grad_mode[1]}",
                do="wrap capture and replay in the same torch.no_grad()",
            )
        calls: Any = iter(executable.calls)
        torch._C._set_grad_enabled(False)
        try:
            if executable.proven:
                for call in calls:
                    call()
            else:
                self._prove(executable, template)
        except CaptureError:
            raise
        except Exception as error:
            _explain(error, template, len(executable.calls) - calls.__length_hint__() - 1)
            raise
        finally:
            torch._C._set_grad_enabled(mode[0])

    def _prove(self, executable: Executable, template: Template) -> None:
        for position, node in enumerate(template.nodes):
            written = [(tensor, tensor.shape) for _, tensor, writes in node.tensors() if writes]
            try:
                node.call()
            except Exception as error:
                _explain(error, template, position)
                raise
            for tensor, shape in written:
                if tensor.shape != shape:
                    raise resized(node.name, shape, tensor.shape, node.where)
        executable.proven = True

    def destroy(self, executable: Executable) -> None:
        """Forget the calls and with them every reference.

        Raises:
            CaptureError: a capture is open.
        """
        if open_captures:
            raise CaptureError("a graph cannot be destroyed while a capture is open", do="defer it until the end")
        executable.template = None
        executable.calls = []

    # -- looking ------------------------------------------------------------------------------------

    def nodes(self, template: Template) -> Sequence[GraphNode]:
        """The nodes with their baked values, in order."""
        return template.described()

    def edges(self, template: Template) -> Sequence[tuple[int, int]]:
        """(earlier, later) positions in :meth:`nodes` that streams and events order; what follows is left out."""
        return template.edges()

    def counts(self, template: Template) -> GraphCounts:
        """Work of one replay."""
        return template.counts()

    def fallbacks(self, template: Template) -> Sequence[FallbackUse]:
        """Results that the program did not place, each with the line that made it."""
        return tuple(template.fallbacks)

    def held(self, template: Template) -> Held:
        """Memory that the template keeps alive."""
        return template.held()

    def pool_bytes(self, workspace: Workspace) -> int | None:
        """None: results that nobody placed lie in the workspace."""
        return None

    def pool_uses(self, template: Template) -> Sequence[PoolUse]:
        """None at all."""
        return ()

    @contextlib.contextmanager
    def counting(self) -> Generator[Callable[[], GraphCounts]]:
        """Count this thread's eager work: what reaches the dispatcher, inside opaque launches too."""
        with Counter() as counter:
            yield counter.counts


def _explain(error: Exception, template: Template, position: int) -> None:
    """Add the node and its line to an error of torch's (3.10 has no notes: then it goes without)."""
    node = template.nodes[position]
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(f"node {position} of the graph: {node.name}, recorded at {node.where}")
