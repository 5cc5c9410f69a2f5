"""The descriptors of a program and their graphs, chosen by whole-key equality."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from halma.hal.backend import Backend, GraphCounts
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace


@dataclass(frozen=True)
class LadderRow:
    """What became of one descriptor: ``why_not`` is empty where it was captured."""

    descriptor: Descriptor
    outcome: Outcome
    milliseconds: float
    counts: GraphCounts
    replays: int
    why_not: str


class GraphLadder:
    """Graphs of one program, by descriptor.

    Args:
        backend: captures and replays.
        workspace: sealed, holds what every descriptor needs.
        enabled: the capture switch; off means that every step runs eagerly, with that reason.
        strict: a step that would run eagerly though capture is on is an error (``HALMA_STRICT=1``).
    """

    def __init__(self, backend: Backend, workspace: Workspace, *, enabled: bool = True, strict: bool = False) -> None:
        self.backend = backend
        self.workspace = workspace
        self.enabled = enabled
        self.strict = strict
        self._graphs: dict[Descriptor, BreakableGraph] = {}
        self._times: dict[Descriptor, float] = {}
        self.eager_steps: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(graph.captured for graph in self._graphs.values())

    @property
    def replays(self) -> int:
        """Steps that were replayed, over all descriptors."""
        return sum(graph.replays for graph in self._graphs.values())

    def unavailable(self) -> str | None:
        """Why nothing at all is captured, or None."""
        return "capture is switched off" if not self.enabled else self.backend.graphs.unsupported()

    def capture(self, descriptor: Descriptor, program: Callable[[], Any]) -> BreakableGraph:
        """Capture ``program`` for ``descriptor``.

        Raises:
            CaptureError: the descriptor was captured already, the workspace is not sealed, or the capture
                itself failed.
        """
        if descriptor in self._graphs:
            raise CaptureError(
                f"{descriptor} was captured already",
                found=f"{len(self._graphs)} descriptors",
                do="every descriptor of a ladder is captured once; drop the duplicate",
            )
        if not self.workspace.sealed:
            raise CaptureError(
                "the workspace must be sealed before the first capture",
                found="its addresses may still move",
                do="dry-run the largest descriptors, then seal()",
            )
        graph = BreakableGraph(self.backend)
        begin = time.perf_counter()
        self.workspace.start()
        with GraphCaptureScope(graph, self.workspace, enabled=self.enabled):
            graph.set_outputs(program())
        self._graphs[descriptor] = graph
        self._times[descriptor] = (time.perf_counter() - begin) * 1e3
        return graph

    def capture_all(
        self,
        descriptors: Iterable[Descriptor],
        program: Callable[[Descriptor], Callable[[], Any]],
        progress: Callable[[Descriptor], None] | None = None,
    ) -> None:
        """Capture one graph a descriptor, in the order given."""
        for descriptor in descriptors:
            self.capture(descriptor, program(descriptor))
            if progress is not None:
                progress(descriptor)

    def find(self, descriptor: Descriptor) -> BreakableGraph | None:
        """The graph captured for exactly this descriptor; None is recorded with its reason.

        Raises:
            CaptureError: there is none, capture is on, and the ladder is strict.
        """
        graph = self._graphs.get(descriptor)
        if graph is not None and graph.captured:
            return graph
        reason = self.unavailable() or f"no graph: {descriptor} was not captured"
        if self.strict and self.enabled:
            raise CaptureError(
                f"{descriptor} would run eagerly, and HALMA_STRICT forbids it",
                found=(reason, f"{len(self)} descriptors are captured"),
                do="capture this descriptor, or unset HALMA_STRICT",
            )
        self.eager_steps[reason] = self.eager_steps.get(reason, 0) + 1
        decisions.record(Decision("graph", str(descriptor), "eager", (Candidate("eager", True, reason),)))
        return None

    def rows(self) -> list[LadderRow]:
        """One row a descriptor, in order of capture."""
        return [
            LadderRow(
                descriptor,
                graph.outcome,
                self._times[descriptor],
                graph.counts() if graph.captured else GraphCounts(),
                graph.replays,
                "" if graph.captured else (self.unavailable() or str(graph.error)),
            )
            for descriptor, graph in self._graphs.items()
        ]

    def reset(self) -> None:
        """Destroy every graph."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._times.clear()
