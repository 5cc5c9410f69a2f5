"""What a session captured, as plain data: it outlives the session's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halma.hal.backend import Backend, GraphCounts
from halma.hal.graph.breakable import Outcome
from halma.hal.graph.capturing import Entry
from halma.hal.graph.descriptor import Descriptor


@dataclass(frozen=True)
class SessionRow:
    """One descriptor, in order of capture.

    Attributes:
        nodes: pieces of work in its segments; 0 where it was not captured.
        milliseconds: of warm-up and capture together.
        bytes: what the graph took beyond the workspace; 0 where the backend cannot tell (see the report).
        held: bytes that the session held afterwards, workspace included.
        why_not: why it runs eagerly; empty where it was captured.
    """

    descriptor: Descriptor
    outcome: Outcome
    segments: int
    nodes: int
    milliseconds: float
    bytes: int
    held: int
    counts: GraphCounts
    replays: int
    why_not: str

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        d = self.descriptor
        return {
            "descriptor": str(d),
            "role": d.role,
            "num_tokens": d.num_tokens,
            "num_requests": d.num_requests,
            "query_len": d.query_len,
            "context_capacity": d.context_capacity,
            "variant": d.variant,
            "outcome": self.outcome.value,
            "segments": self.segments,
            "nodes": self.nodes,
            "milliseconds": round(self.milliseconds, 3),
            "bytes": self.bytes,
            "held_bytes": self.held,
            "kernels": self.counts.kernels,
            "copies": self.counts.copies,
            "allocations": self.counts.allocations,
            "fallback_bytes": self.counts.fallback_bytes,
            "replays": self.replays,
            "why_not": self.why_not,
        }


@dataclass(frozen=True)
class SessionReport:
    """A session's rows and sums.

    Attributes:
        kind: persistent or scratch.
        order: the order of the last ``capture_all``; "as called" without one.
        workspace_bytes: the one workspace that all its graphs share.
        graph_bytes: what the graphs took beyond it.
        measured: graph_bytes was read from the driver's free memory; if not, the backend's free memory is not
            this process's alone, and graphs are charged nothing.
        free_fell: by how much the device's free memory fell during captures, as the driver tells it.
        pool_bytes: what the graphs' pool holds for ops that allocate their results themselves; 0 without one.
        pool_growth: by how much it grew after it was primed with the largest descriptors: it should be 0 (G10).
        allocating: op -> results that it made in the pool, over all graphs.
        live_executables: of this process, all sessions together.
        eager_steps: reason -> steps that ran eagerly for it.
    """

    kind: str
    backend: str
    evidence: str
    order: str
    rows: tuple[SessionRow, ...]
    workspace_bytes: int
    graph_bytes: int
    measured: bool
    live_executables: int
    recycled_executables: int
    eager_steps: Mapping[str, int] = field(default_factory=dict[str, int])
    free_fell: int = 0
    pool_bytes: int = 0
    pool_growth: int = 0
    allocating: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total_bytes(self) -> int:
        """Everything that the session holds."""
        return self.workspace_bytes + self.pool_bytes + self.graph_bytes

    @property
    def captured(self) -> int:
        """Descriptors with a graph."""
        return sum(row.outcome is Outcome.CAPTURED for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind,
            "backend": self.backend,
            "evidence": self.evidence,
            "order": self.order,
            "captured": self.captured,
            "total_bytes": self.total_bytes,
            "workspace_bytes": self.workspace_bytes,
            "graph_bytes": self.graph_bytes,
            "graph_bytes_measured": self.measured,
            "free_memory_fell": self.free_fell,
            "pool_bytes": self.pool_bytes,
            "pool_growth": self.pool_growth,
            "allocating": dict(self.allocating),
            "live_executables": self.live_executables,
            "recycled_executables": self.recycled_executables,
            "eager_steps": dict(self.eager_steps),
            "descriptors": [row.as_json() for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.kind} session on {self.backend}: {self.captured} of {len(self.rows)} descriptors captured, "
            f"{self.total_bytes:,} bytes"
        ]
        for row in self.rows:
            found = f"{row.nodes} nodes, {row.milliseconds:.1f} ms, {row.bytes:,} bytes"
            lines.append(f"  {row.descriptor}: " + (f"eager: {row.why_not}" if row.why_not else found))
        return "\n".join(lines)


def allocating_ops(entries: Iterable[Entry], backend: Backend) -> dict[str, int]:
    """Op -> results that it made in the pool, over all graphs."""
    graphs = [entry.graph for entry in entries if entry.graph is not None]
    found = [use.op for graph in graphs for one in graph.segments for use in backend.graphs.pool_uses(one.template)]
    return {op: found.count(op) for op in sorted(set(found))}


def row_of(entry: Entry) -> SessionRow:
    """What is known of a descriptor, as plain data."""
    graph = entry.graph
    return SessionRow(
        descriptor=entry.descriptor,
        outcome=entry.outcome,
        segments=len(graph.segments) if graph is not None else 0,
        nodes=len(graph.nodes()) if graph is not None else 0,
        milliseconds=entry.milliseconds,
        bytes=entry.bytes,
        held=entry.held,
        counts=graph.counts() if graph is not None else GraphCounts(),
        replays=graph.replays if graph is not None else 0,
        why_not=entry.why_not,
    )
