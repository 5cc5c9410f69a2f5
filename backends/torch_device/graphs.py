"""The graph part that families share: torch captures; how a template becomes an executable is the family's own.

Torch's graph object begins and ends a capture, because torch's allocator and random number generators must know of
it. What differs between families is in :class:`Recipe`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halma.backends.cpu.counting import Counter
from halma.backends.cpu.modes import entered
from halma.backends.torch_device.device import DeviceStream, ThreadState, TorchDevice
from halma.backends.torch_device.faults import translated
from halma.backends.torch_device.pools import GraphPool, bury, clear_graveyard, forget_pool, pool_bytes, pool_of
from halma.backends.torch_device.watch import CaptureWatch
from halma.hal.backend import GraphCounts, GraphNode, PoolUse, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import (
    close_capture,
    current_recorder,
    note_failure,
    open_capture,
    open_captures,
    refuse_other_thread,
    set_current_recorder,
)
from halma.hal.workspace import Workspace


class Recipe(Protocol):
    """What a family does in its own way. ``graph`` is what :meth:`new_graph` made."""

    @property
    def mode(self) -> str:
        """``capture_error_mode`` of captures."""
        ...

    def new_graph(self, pool: GraphPool) -> Any:
        """An object with ``capture_begin(pool=, capture_error_mode=)``, ``capture_end()`` and ``replay()``.

        Raises:
            CaptureError: the driver has no room for another.
        """
        ...

    def new_pool(self) -> GraphPool:
        """A pool for the captures of a workspace."""
        ...

    def stop_recording(self, graph: Any, pool: GraphPool) -> None:
        """Stop the allocator's recording into the pool, after a begin or end that failed."""
        ...

    def counts(self, graph: Any, watch: CaptureWatch) -> GraphCounts:
        """What a finished capture does."""
        ...

    def instantiate(self, template: Template) -> Any:
        """The driver's executable, with its memory taken; None: torch replays the graph.

        Raises:
            RuntimeError: there is none.
        """
        ...

    def launch(self, handle: Any, stream: int) -> None:
        """Queue the driver's executable on the stream of this handle."""
        ...

    def destroy(self, handle: Any) -> None:
        """Give the driver's executable back; its work is over."""
        ...

    def retire(self, template: Template) -> None:
        """The template's executable was destroyed: give back what torch keeps for it, where it keeps any."""
        ...


@dataclass(eq=False)
class Template:
    """A finished capture. ``random``: it uses torch's generators, so torch must replay it."""

    graph: Any
    pool: GraphPool
    nodes: list[GraphNode]
    uses: list[PoolUse]
    counts: GraphCounts
    random: bool

    def __post_init__(self) -> None:
        weakref.finalize(self, bury, self.graph).atexit = False


class Executable:
    """What the driver launches. ``handle`` is None where torch replays, and once it was destroyed."""

    __slots__ = ("__weakref__", "_finalizer", "handle", "last", "template")

    def __init__(self, template: Template, handle: Any) -> None:
        self.template: Template | None = template
        self.handle = handle
        self.last: DeviceStream | None = None
        """The stream of the last replay."""


class _Segment:
    """An open capture of a thread, and what to undo when it ends, in order."""

    def __init__(self, home: DeviceStream, workspace: Workspace, device: TorchDevice, recipe: Recipe) -> None:
        self.home = home
        self.workspace = workspace
        self.pool = pool_of(workspace, recipe.new_pool)
        self.graph = recipe.new_graph(self.pool)
        self.failure: BaseException | None = None
        self.streams: set[int] = set()
        self.watch = CaptureWatch(workspace, self.fail, device.family.on_device)
        self.modes = contextlib.ExitStack()
        self.undo = contextlib.ExitStack()

    def fail(self, error: BaseException) -> None:
        """Make the capture invalid, whether or not the program catches ``error``."""
        if self.failure is None:
            self.failure = error
        note_failure(error)


class TorchGraphs:
    """See :class:`halma.hal.backend.GraphPart`.

    Args:
        device: its streams.
        state: what is current on each thread.
        recipe: what the family does in its own way.
        reason: why this instance cannot capture, or None.
    """

    def __init__(self, device: TorchDevice, state: ThreadState, recipe: Recipe, reason: str | None) -> None:
        self._device = device
        self._family = device.family
        self._state = state
        self._recipe = recipe
        self._reason = reason

    def unsupported(self) -> str | None:
        """What is missing for captures."""
        return self._reason

    def is_capturing(self) -> bool:
        """Whether this thread captures, through us or through torch.

        Raises:
            CaptureError: the driver does not answer (G25).
        """
        if self._state.segment is not None:
            return True
        try:
            return self._family.module.is_current_stream_capturing()
        except RuntimeError as error:
            raise CaptureError(
                "the driver does not say whether this thread captures", found=str(error).splitlines()[0]
            ) from error

    # -- recording ----------------------------------------------------------------------------------

    def dry_run(self, program: Callable[[], Any], workspace: Workspace) -> None:
        """Run ``program``, for real, on the stream that a capture would use: the workspace sees every take, kernels
        are loaded, and libraries make their workspaces there, outside the graphs' pool.

        Raises:
            CaptureError: a capture is open.
        """
        self._refuse_open("a dry run")
        home = self._device.current_stream()
        self._family.ensure_context(self._device.index)
        try:
            with self._device.standing_in(home) as queue:
                if queue != home.torch:
                    queue.wait_stream(home.torch)
                program()
                if queue != home.torch:
                    home.torch.wait_stream(queue)
        except BaseException:
            workspace.reset()
            raise

    def _refuse_open(self, asked: str) -> None:
        if open_captures:
            refuse_other_thread("a recording")
        if self._state.segment is not None or self._state.stand_in is not None or current_recorder() is not None:
            raise CaptureError(
                "a recording is open on this thread already",
                asked=asked,
                do="end() or abandon() it first; recordings do not nest",
            )

    def begin(self, stream: Stream, workspace: Workspace) -> None:
        """Start recording; ``stream`` is current until :meth:`end`. The default stream, which the driver cannot
        capture, is recorded through a stream that stands in for it.

        Raises:
            CaptureError: not supported, a capture is open, the workspace is not sealed, or the driver refuses.
        """
        home = self._device.own_stream(stream)
        if self._reason is not None:
            raise CaptureError("this backend cannot capture", found=self._reason, do="run the program eagerly")
        if not workspace.sealed:
            raise CaptureError(
                "the workspace must be sealed before a capture",
                found="its addresses may still move",
                do="dry-run the program with this workspace, then seal()",
            )
        self._refuse_open(f"a capture of stream {home.name!r}")
        self._family.ensure_context(self._device.index)
        clear_graveyard()
        segment = _Segment(home, workspace, self._device, self._recipe)
        with contextlib.ExitStack() as undo:  # undoes what was done if a later step fails
            open_capture(f"stream {home.name!r} of the {self._family.name} backend")
            undo.callback(close_capture)
            queue = undo.enter_context(self._device.standing_in(home))
            try:
                segment.pool.hold()
                segment.graph.capture_begin(pool=segment.pool.id, capture_error_mode=self._recipe.mode)
            except RuntimeError as error:
                self._condemn(segment)
                raise translated(error, f"begin() on stream {home.name!r}") from error
            segment.streams.add(self._family.raw(queue))
            self._state.segment = segment
            undo.callback(self._forget_segment)
            set_current_recorder(segment.watch)
            segment.modes.callback(set_current_recorder, None)
            segment.modes.enter_context(entered(segment.watch))
            segment.undo = undo.pop_all()

    def _forget_segment(self) -> None:
        self._state.segment = None

    def end(self, stream: Stream) -> Template:
        """Stop recording and return the template.

        Raises:
            CaptureError: no capture of ``stream`` is open on this thread, or the driver found it invalid.
            BaseException: the first error inside the capture, even one that the program caught.
        """
        home = self._device.own_stream(stream)
        segment = self._state.segment
        if not isinstance(segment, _Segment) or segment.home != home:
            raise CaptureError(
                f"no capture of stream {home.name!r} is open on this thread",
                asked="end()",
                do="end a capture on the stream and the thread that began it",
            )
        try:
            self._close(segment)
        except RuntimeError as error:
            raise segment.failure or translated(error, f"end() on stream {home.name!r}") from error
        if segment.failure is not None:
            bury(segment.graph)
            raise segment.failure
        watch = segment.watch
        counts = self._recipe.counts(segment.graph, watch)
        return Template(segment.graph, segment.pool, watch.nodes, watch.uses, counts, watch.random)

    def _close(self, segment: _Segment) -> None:
        """Stop the capture, whatever state it is in; the stream is usable afterwards."""
        with segment.undo:
            segment.modes.close()
            # An error inside `with side:` of torch's own may have left another stream current.
            self._device.set_current(segment.home.queue)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", self._family.empty_graph)  # the layer has its own rule (G23)
                    segment.graph.capture_end()
            except BaseException:
                self._condemn(segment)
                raise

    def abandon(self, stream: Stream) -> None:
        """Stop recording and forget it; nothing happens if no capture of ``stream`` is open on this thread."""
        segment = self._state.segment
        if not isinstance(segment, _Segment) or segment.home != stream:
            return
        with contextlib.suppress(Exception):
            self._close(segment)
        bury(segment.graph)
        with contextlib.suppress(Exception):
            clear_graveyard()

    def _condemn(self, segment: _Segment) -> None:
        """After a begin or end that failed: torch's allocators may go on recording into the pool.

        torch 2.11 stops neither of them then, and refuses a second capture into the pool ("already recording"). So the
        device's is stopped here, and the pool and the graph, which both allocators go on asking whether a stream is
        theirs, are kept for ever; later captures on the workspace get a pool of their own.
        """
        _condemned.append((segment.graph, segment.pool))
        forget_pool(segment.workspace)
        with contextlib.suppress(Exception):
            self._recipe.stop_recording(segment.graph, segment.pool)

    # -- running ------------------------------------------------------------------------------------

    def instantiate(self, template: Template) -> Executable:
        """An executable, uploaded at once, so that the driver takes its memory now; may be done several times."""
        self._family.ensure_context(self._device.index)
        try:
            handle = self._recipe.instantiate(template)
        except CaptureError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                "the graph cannot be instantiated",
                found=str(error).splitlines()[0],
                do="free device memory (budget, reserve), or capture fewer descriptors",
            ) from error
        executable = Executable(template, handle)
        if handle is not None:
            executable._finalizer = weakref.finalize(executable, _bury_handle, self._recipe, handle)
            executable._finalizer.atexit = False
        return executable

    def replay(self, executable: Executable, stream: Stream) -> None:
        """Queue the graph's work on ``stream``.

        Raises:
            CaptureError: destroyed, a capture is open on this thread, or the driver refuses.
        """
        template = executable.template
        if template is None:
            raise CaptureError("a destroyed graph cannot be replayed", do="capture it again")
        if open_captures:
            refuse_other_thread("a replay")
        if self._state.segment is not None:
            raise CaptureError("a graph cannot be replayed inside a capture", do="close the capture first")
        own = self._device.own_stream(stream)
        self._family.ensure_context(self._device.index)
        executable.last = own
        try:
            if executable.handle is None:
                with own:
                    template.graph.replay()
            else:
                self._recipe.launch(executable.handle, own.handle)
        except RuntimeError as error:
            raise translated(error, f"a replay on stream {own.name!r}") from error

    def destroy(self, executable: Executable) -> None:
        """Destroy the executable once its last replay is over: what it reads may be freed next.

        Raises:
            CaptureError: a capture is open.
        """
        if open_captures:
            raise CaptureError("a graph cannot be destroyed while a capture is open", do="defer it until the end")
        if executable.template is None:
            return
        self._family.ensure_context(self._device.index)
        template, executable.template = executable.template, None
        last, executable.last = executable.last, None
        if last is not None:
            last.torch.synchronize()
        handle, executable.handle = executable.handle, None
        if handle is not None:
            executable._finalizer.detach()
            self._recipe.destroy(handle)
        self._recipe.retire(template)
        clear_graveyard()

    # -- looking ------------------------------------------------------------------------------------

    def nodes(self, template: Template) -> Sequence[GraphNode]:
        """The calls that were recorded, with their baked values, in the program's order; not the driver's nodes,
        of which one call may make several."""
        return template.nodes

    def counts(self, template: Template) -> GraphCounts:
        """The driver's nodes, counted; ``allocations`` are results that ops made in the pool."""
        return template.counts

    def pool_bytes(self, workspace: Workspace) -> int | None:
        """Bytes of the pool that captures on ``workspace`` share."""
        return pool_bytes(workspace)

    def pool_uses(self, template: Template) -> Sequence[PoolUse]:
        """Results that ops made in the pool, with the line that asked."""
        return template.uses

    @contextlib.contextmanager
    def counting(self) -> Generator[Callable[[], GraphCounts]]:
        """Count this thread's eager work: what reaches the dispatcher, and opaque launches."""
        with Counter() as counter:
            yield counter.counts


_condemned: list[tuple[Any, GraphPool]] = []


def _bury_handle(recipe: Recipe, handle: Any) -> None:
    bury(_Handle(recipe, handle))


class _Handle:
    """An executable whose owner was dropped without destroy(); destroyed when it leaves the graveyard."""

    def __init__(self, recipe: Recipe, handle: Any) -> None:
        self._recipe = recipe
        self._handle = handle

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._recipe.destroy(self._handle)
