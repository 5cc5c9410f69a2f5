"""Live executables, counted against the driver's ceiling (G21).

Some drivers allow a fixed number of executables in a process (about 2,048 on MUSA) and fail in ways of their own
beyond it; a ladder of breakable graphs gets there quickly. The pool stands between :mod:`halma.hal.graph` and
the backend's graph part: the handle that a graph keeps is the pool's, so that its executable may be destroyed
and made again from its template unseen.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from halma.hal.backend import Backend, GraphCounts, GraphNode, GraphPart, PoolUse, Stream
from halma.hal.errors import CaptureError
from halma.hal.workspace import Workspace


class PooledExecutable:
    """What a graph holds instead of an executable; ``live`` is None while it is recycled."""

    __slots__ = ("__weakref__", "live", "template")

    def __init__(self, template: Any) -> None:
        self.template = template
        self.live: Any = None


class ExecutablePool:
    """The executables of one driver in this process, the least recently replayed first.

    Args:
        limit: most that may live at once; None: they are counted, nothing more.
        again: whether a template can be instantiated again after its executable was destroyed. If not, nothing
            can be recycled and the pool refuses what is beyond its limit.
    """

    def __init__(self, *, limit: int | None, again: bool) -> None:
        self.limit = limit
        self.again = again
        self.recycled = 0
        self.instantiated = 0
        # Weak: a graph that was dropped without reset() takes its executables with it.
        self._live: OrderedDict[int, weakref.ref[PooledExecutable]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def refusal(self, wanted: int) -> str | None:
        """Why ``wanted`` more executables cannot be had, or None. Ask before a capture."""
        if self.limit is None or self.again or len(self._live) + wanted <= self.limit:
            return None
        return (
            f"the driver allows {self.limit:,} live executables in a process, {len(self._live):,} live, {wanted:,} "
            "more are wanted, and its templates cannot be instantiated again, so none can be recycled"
        )

    def instantiate(self, graphs: GraphPart, template: Any) -> PooledExecutable:
        """A new executable; the least recently replayed ones make room.

        Raises:
            CaptureError: there is no room and nothing may be recycled.
        """
        handle = PooledExecutable(template)
        self._revive(graphs, handle)
        return handle

    def replay(self, graphs: GraphPart, handle: PooledExecutable, stream: Stream) -> None:
        """Replay; a recycled executable is made again first."""
        if handle.live is None:
            self._revive(graphs, handle)
        elif self.limit is not None:
            self._live.move_to_end(id(handle))
        graphs.replay(handle.live, stream)

    def destroy(self, graphs: GraphPart, handle: PooledExecutable) -> None:
        """Destroy the executable and forget its template."""
        if handle.live is not None:
            graphs.destroy(handle.live)
        self._forget(id(handle))
        handle.live = handle.template = None

    def _revive(self, graphs: GraphPart, handle: PooledExecutable) -> None:
        if handle.template is None:
            raise CaptureError("a destroyed graph cannot be replayed", do="capture it again")
        while self.limit is not None and len(self._live) >= self.limit:
            reason = self.refusal(1)
            if reason is not None:
                raise CaptureError(
                    "no more graph executables can be made",
                    found=reason,
                    do="capture fewer descriptors, or programs with fewer breaks",
                )
            self._recycle_oldest(graphs)
        handle.live = graphs.instantiate(handle.template)
        self.instantiated += 1
        key = id(handle)
        self._live[key] = weakref.ref(handle, lambda _: self._forget(key))

    def _recycle_oldest(self, graphs: GraphPart) -> None:
        key, reference = next(iter(self._live.items()))
        oldest = reference()
        if oldest is not None:
            graphs.destroy(oldest.live)
            oldest.live = None
            self.recycled += 1
        self._forget(key)

    def _forget(self, key: int) -> None:
        self._live.pop(key, None)


class PooledGraphs:
    """A backend's graph part whose executables are the pool's; everything else is the part's own."""

    def __init__(self, graphs: GraphPart, pool: ExecutablePool) -> None:
        self._graphs = graphs
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)  # what a backend offers beyond the contract

    def unsupported(self) -> str | None:
        return self._graphs.unsupported()

    def is_capturing(self) -> bool:
        return self._graphs.is_capturing()

    def dry_run(self, program: Callable[[], Any], workspace: Workspace) -> None:
        self._graphs.dry_run(program, workspace)

    def begin(self, stream: Stream, workspace: Workspace) -> None:
        self._graphs.begin(stream, workspace)

    def end(self, stream: Stream) -> Any:
        return self._graphs.end(stream)

    def abandon(self, stream: Stream) -> None:
        self._graphs.abandon(stream)

    def instantiate(self, template: Any) -> Any:
        return self._pool.instantiate(self._graphs, template)

    def replay(self, executable: Any, stream: Stream) -> None:
        self._pool.replay(self._graphs, executable, stream)

    def destroy(self, executable: Any) -> None:
        self._pool.destroy(self._graphs, executable)

    def nodes(self, template: Any) -> Sequence[GraphNode]:
        return self._graphs.nodes(template)

    def counts(self, template: Any) -> GraphCounts:
        return self._graphs.counts(template)

    def pool_bytes(self, workspace: Workspace) -> int | None:
        return self._graphs.pool_bytes(workspace)

    def pool_uses(self, template: Any) -> Sequence[PoolUse]:
        return self._graphs.pool_uses(template)

    def counting(self) -> AbstractContextManager[Callable[[], GraphCounts]]:
        return self._graphs.counting()


class PooledBackend:
    """A backend with :class:`PooledGraphs`; the rest is the backend's own."""

    def __init__(self, backend: Backend, pool: ExecutablePool) -> None:
        self._backend = backend
        self.graphs = PooledGraphs(backend.graphs, pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


_pools: dict[str, ExecutablePool] = {}


def process_pool(backend: Backend) -> ExecutablePool:
    """The pool of this process for a backend's driver; sessions share it, because the driver counts for all."""
    pool = _pools.get(backend.name)
    if pool is None:
        capabilities = backend.capabilities
        limit = capabilities.graph_executable_limit
        pool = ExecutablePool(
            limit=limit if isinstance(limit, int) else None, again=capabilities.graph_reinstantiate is True
        )
        _pools[backend.name] = pool
    return pool
