"""A captured program: its segments, how its capture ended, and replay.

``segments = breaks + 1`` always. A full capture has one segment; the container is built for several, since
a break is a property of the program and not of the driver.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from halma.hal.backend import Backend, GraphCounts, GraphNode, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.inputs import InputSet
from halma.hal.graph.outputs import Generation, guard
from halma.hal.workspace import Workspace


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
    """One begin/end pair of the driver: the template it returned and the executable made of it."""

    template: Any
    executable: Any


@dataclass
class CaptureCounters:
    """What captures and replays of this process did; tests and ``--json`` read them."""

    scopes_full: int = 0
    scopes_inert: int = 0
    scopes_failed: int = 0
    segments_captured: int = 0
    replays: int = 0
    by_descriptor: dict[Any, int] = field(default_factory=dict[Any, int])

    def clear(self) -> None:
        """Back to zero."""
        self.__init__()


counters = CaptureCounters()


class BreakableGraph:
    """The container that one :class:`GraphCaptureScope` fills.

    It owns executables, never tensors: outputs lie in the workspace, inputs and state belong to whoever
    made them and must outlive it. Replaying after any of them was freed is the caller's error; the CPU
    backend keeps them alive, a GPU does not.

    Args:
        backend: the backend whose graph part captured it.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.segments: list[Segment] = []
        self.breaks: list[Callable[[], None]] = []
        self.outcome = Outcome.EMPTY
        self.error: BaseException | None = None
        self.replays = 0
        self.grad_mode: tuple[bool, bool] | None = None
        self.inputs = InputSet()
        """What a replay reads and must find fresh (G12); the caller's to set, a reset leaves it."""
        self.workspace: Workspace | None = None
        self._outputs: Any = None
        self._generation: Generation | None = None

    @property
    def captured(self) -> bool:
        """Whether it can be replayed."""
        return self.outcome is Outcome.CAPTURED

    @property
    def empty(self) -> bool:
        """Whether a scope may fill it: after a failed or inert scope it holds nothing and may be used again."""
        return not self.segments and not self.breaks

    def set_outputs(self, outputs: Any) -> None:
        """What the program returned, for :meth:`outputs`."""
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
            CaptureError: not captured; the segments do not match the breaks (G1); another grad mode (G24).
            StaleInputError: an input was not refreshed since its last replay (G12).
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
        graphs = self.backend.graphs
        stream = stream or self.backend.device.current_stream()
        self.inputs.check()
        self.inputs.consume(stream)
        if self.workspace is not None:
            generation = self.workspace.generations.next(self)
            self._generation = generation if self.workspace.checked else None
        graphs.replay(self.segments[0].executable, stream)
        for segment, between in zip(self.segments[1:], self.breaks, strict=True):
            between()
            graphs.replay(segment.executable, stream)
        self.replays += 1
        counters.replays += 1
        return self.outputs()

    def nodes(self) -> list[GraphNode]:
        """Nodes of all segments in order, with their baked parameters."""
        return [node for segment in self.segments for node in self.backend.graphs.nodes(segment.template)]

    def raw_arithmetic(self) -> list[GraphNode]:
        """Nodes that the program made itself instead of calling an op (W5): they have no contract and no routes."""
        return [node for node in self.nodes() if node.raw]

    def counts(self) -> GraphCounts:
        """Work of one replay, summed over the segments."""
        parts = [self.backend.graphs.counts(segment.template) for segment in self.segments]
        return GraphCounts(
            kernels=sum(p.kernels for p in parts),
            copies=sum(p.copies for p in parts),
            allocations=sum(p.allocations for p in parts),
            fallback_bytes=sum(p.fallback_bytes for p in parts),
        )

    def reset(self) -> None:
        """Destroy the executables; the container is as new."""
        for segment in self.segments:
            self.backend.graphs.destroy(segment.executable)
        self.segments.clear()
        self.breaks.clear()
        self.outcome = Outcome.EMPTY
        self.error = None
        self.replays = 0
        self.grad_mode = None
        self.workspace = None
        self._outputs = None
        self._generation = None
