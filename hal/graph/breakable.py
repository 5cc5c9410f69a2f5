"""A captured program: its segments, how its capture ended, and replay.

``segments = breaks + 1`` always. A full capture has one segment, a piecewise one a segment more than breaks.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from halma.hal.backend import Backend, GraphCounts, GraphNode, GraphPart, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.cells import leaves
from halma.hal.graph.current import note_failure, refuse_step_in_scope
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import InputSet
from halma.hal.graph.outputs import Generation, guard
from halma.hal.graph.retire import drain, follow_last_use, lease, retire
from halma.hal.workspace import Workspace


class CaptureMode(enum.Enum):
    """What a break does to a capture (G5)."""

    FULL = "full"
    """One segment; a break is refused."""
    PIECEWISE = "piecewise"
    """Every break ends a segment and begins another."""


class Outcome(enum.Enum):
    """How a scope ended. Three that never look alike (G3), and the state before any."""

    EMPTY = "empty"
    INERT = "inert"
    """Capture was off or unsupported: the program ran once, eagerly, and its outputs are real."""
    CAPTURED = "captured"
    """Nothing ran; outputs hold data after a replay."""
    FAILED = "failed"
    """Nothing may be read; the error was raised to the caller and is kept."""


@dataclass
class Segment:
    """One begin/end pair of the driver: the template it returned, the executable made of it, and a census.

    ``workspace_bytes`` are those of the workspace scopes that were open when it closed.
    """

    template: Any
    executable: Any
    counts: GraphCounts
    workspace_bytes: int

    @property
    def empty(self) -> bool:
        """Whether a replay of it does nothing."""
        return not (self.counts.kernels or self.counts.copies)


class BreakFn(Protocol):
    """What runs between two segments; see :class:`halma.hal.graph.breaks.Break`."""

    name: str

    @property
    def marker(self) -> bool:
        """Whether it only splits."""
        ...

    def __call__(self) -> None:
        """Run it for a replay."""
        ...

    def described(self) -> GraphNode:
        """As a node, with the host values that it was filed with (G11)."""
        ...


class GraphUser(Protocol):
    """Who takes part in every replay of a graph without being asked by the program, such as a communicator."""

    def captured(self, graph: BreakableGraph) -> None:
        """The capture is about to end as done; raises what speaks against it."""
        ...

    def before_replay(self, stream: Stream) -> None:
        """A replay will be queued on ``stream``; raises what speaks against it."""
        ...


@dataclass
class CaptureCounters:
    """What captures and replays of this process did; tests and ``--json`` read them."""

    scopes_full: int = 0
    scopes_piecewise: int = 0
    scopes_inert: int = 0
    scopes_failed: int = 0
    segments_captured: int = 0
    breaks_reached: int = 0
    """Breaks that a program came to, in a capture or not."""
    breaks_registered: int = 0
    """Breaks that were filed in a graph."""
    forks_tracked: int = 0
    forks_auto_joined: int = 0
    """Forks that the scope joined itself, because the program had not when the segment closed."""
    replays: int = 0

    def clear(self) -> None:
        """Back to zero."""
        self.__init__()


counters = CaptureCounters()


class BreakableGraph:
    """The container that one :class:`GraphCaptureScope` fills.

    It owns executables, and what the program's breaks need: their inputs and destinations. All other tensors
    lie in the workspace or belong to whoever made them, who must keep them until the graph is reset. The CPU
    backend keeps them alive, a GPU does not. Dropped or reset, its executables are destroyed as soon as no
    capture is open (G22).

    Args:
        backend: the backend whose graph part captured it.
        name: what it stands for in messages, such as its descriptor.
    """

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend = backend
        self.name = name
        self.segments: list[Segment] = []
        self.breaks: list[BreakFn] = []
        self.outcome = Outcome.EMPTY
        self.error: BaseException | None = None
        self.replays = 0
        self.mode: CaptureMode | None = None
        self.workspace: Workspace | None = None
        self.grad_mode: tuple[bool, bool] | None = None
        self.descriptor: Descriptor | None = None
        """What a session captured it for: the rows of its inputs are checked against it."""
        self.inputs = InputSet()
        """What a replay reads and must find fresh (G12); the caller's to set, a reset leaves it."""
        self.users: dict[object, GraphUser] = {}
        """Told of the capture's end and of each replay; a reset forgets them."""
        self.refuse_replay: Callable[[], None] | None = None
        """Raises while the graph may not be replayed for reasons of whoever captured it, such as an arena that the
        ranks have not settled (A5)."""
        self._outputs: Any = None
        self._generation: Generation | None = None
        weakref.finalize(self, _retire_all, backend.graphs, self.segments).atexit = False

    def __str__(self) -> str:
        return self.name or f"graph {id(self):#x}"

    @property
    def captured(self) -> bool:
        """Whether it can be replayed."""
        return self.outcome is Outcome.CAPTURED

    @property
    def empty(self) -> bool:
        """Whether a scope may fill it: after a failed or inert scope it holds nothing and may be used again."""
        return not self.segments and not self.breaks

    def set_outputs(self, outputs: Any) -> None:
        """What the program returned, for :meth:`outputs`.

        Raises:
            CaptureError: a result whose scope closed: its memory is another's by now.
        """
        try:
            if self.workspace is not None:
                for tensor in leaves(outputs):
                    self.workspace.refuse_recycled(tensor)
        except CaptureError as error:
            note_failure(error)
            raise
        self._outputs = outputs

    def outputs(self) -> Any:
        """What the captured program returned; real data only after a replay (or when inert).

        Raises:
            CaptureError: the capture failed, or there was none.
        """
        if self.outcome is Outcome.FAILED:
            raise CaptureError(
                "outputs of a failed capture cannot be read",
                found=f"the capture ended with {type(self.error).__name__}: {self.error}",
                do="run the program eagerly, or mend the error and capture again",
            ) from self.error
        if self.outcome is Outcome.EMPTY:
            raise CaptureError("nothing was captured yet", do="open a GraphCaptureScope on this graph first")
        return self._outputs if self._generation is None else guard(self._outputs, self._generation)

    def replay(self, stream: Stream | None = None) -> Any:
        """Queue the program's work once and return its outputs, valid until the next replay on their workspace.

        Raises:
            CaptureError: not captured; the segments do not match the breaks (G1); another grad mode (G24); the
                workspace is in use (G22); a break's result does not fit its destination (G6).
            StaleInputError: an input was not refreshed since its last replay (G12).
            ArenaError: the ranks have not settled what its calls took from an arena (A5).
        """
        if self.outcome is not Outcome.CAPTURED:
            self.outputs()  # raises for failed and empty
            raise CaptureError(
                "an inert graph cannot be replayed",
                found="capture was switched off or is not supported, so the program ran eagerly",
                do="call the program itself",
            )
        if len(self.segments) != len(self.breaks) + 1:
            raise CaptureError(
                "the graph's segments do not match its breaks",
                found=f"{len(self.segments)} segments, {len(self.breaks)} breaks; segments must be breaks + 1",
                do="capture it again: the container was changed behind the scope's back",
            )
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if mode != self.grad_mode:
            raise CaptureError(
                "a graph must be replayed in the grad mode it was captured in",
                asked=f"replay with grad={mode[0]}, inference={mode[1]}",
                found=f"captured with grad={self.grad_mode and self.grad_mode[0]}, "
                f"inference={self.grad_mode and self.grad_mode[1]}",
                do="wrap capture and replay in the same torch.no_grad()",
            )
        assert self.workspace is not None
        refuse_step_in_scope(f"{self} cannot be replayed")
        if self.refuse_replay is not None:
            self.refuse_replay()
        drain()
        device = self.backend.device
        stream = stream or device.current_stream()
        self.inputs.check(self.descriptor or self)
        for user in self.users.values():
            user.before_replay(stream)
        with lease(self.workspace, f"a replay of {self}"):
            follow_last_use(self.workspace, stream, device)
            self.inputs.consume(stream)
            generation = self.workspace.generations.next(self)
            self._generation = generation if self.workspace.checked else None
            self._replay(stream)
        self.replays += 1
        counters.replays += 1
        return self.outputs()

    def _replay(self, stream: Stream) -> None:
        graphs = self.backend.graphs
        graphs.replay(self.segments[0].executable, stream)
        for segment, between in zip(self.segments[1:], self.breaks, strict=True):
            with made_current(stream, self.backend):
                between()
            graphs.replay(segment.executable, stream)

    def nodes(self) -> list[GraphNode]:
        """Nodes of all segments in order, with their baked parameters, and a node for each break between them."""
        found: list[GraphNode] = []
        for position, segment in enumerate(self.segments):
            found += self.backend.graphs.nodes(segment.template)
            if position < len(self.breaks):
                found.append(self.breaks[position].described())
        return found

    def raw_arithmetic(self) -> list[GraphNode]:
        """Nodes that the program made itself instead of calling an op (W5): they have no contract and no routes."""
        return [node for node in self.nodes() if node.raw]

    def counts(self) -> GraphCounts:
        """Work of one replay, summed over the segments."""
        parts = [segment.counts for segment in self.segments]
        return GraphCounts(
            kernels=sum(p.kernels for p in parts),
            copies=sum(p.copies for p in parts),
            allocations=sum(p.allocations for p in parts),
            fallback_bytes=sum(p.fallback_bytes for p in parts),
        )

    def reset(self) -> None:
        """Give up the executables and all that breaks pinned; the container is as new.

        The executables are destroyed now or, while any capture is open, after it.
        """
        _retire_all(self.backend.graphs, self.segments)
        self.breaks.clear()
        self.users.clear()
        self.outcome = Outcome.EMPTY
        self.error = None
        self.replays = 0
        self.mode = None
        self.workspace = None
        self.grad_mode = None
        self._outputs = None
        self._generation = None
        drain()


def _retire_all(graphs: GraphPart, segments: list[Segment]) -> None:
    while segments:
        retire(graphs, segments.pop(0).executable)


@contextmanager
def made_current(stream: Stream, backend: Backend) -> Generator[None]:
    """``stream`` as the current one, for host work that belongs between two pieces of its work."""
    if backend.device.current_stream() == stream:
        yield
    else:
        with stream:
            yield
