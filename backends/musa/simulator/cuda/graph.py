"""``_MUSAGraph`` over ``torch.cuda.CUDAGraph``, with 2.7.1's state machine and misbehaviours.

``reset()`` must not give the pool back, and torch's object always does: so the object behind a graph that was reset is
kept, and with it its share of the pool, until ``_musa_releasePool`` is called once for it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Final

import torch

from halma.backends.musa.simulator.faults import EMPTY_GRAPH, executables
from halma.backends.musa.simulator.records import refuse_mode

_CUDAGraph: Any = torch.cuda.CUDAGraph
"""Taken before torch.cuda's own names are trapped (see :mod:`halma.backends.musa.simulator.cuda.traps`)."""
PoolId = tuple[int, int]
_EMPTY: Final = "Graph is empty"

_kept: dict[tuple[int, PoolId], list[Any]] = {}
"""Graphs that were reset, by device and pool: what their pool's uses stand for."""
_released: Counter[tuple[int, PoolId]] = Counter()
"""Releases of pools whose graphs were not reset yet."""


def _pool_id(given: Any) -> PoolId:
    first, second = given
    return int(first), int(second)


def release_pool(device: int, mempool_id: PoolId) -> None:
    """``_musa_releasePool``: one use of the pool less."""
    name = (device, _pool_id(mempool_id))
    kept = _kept.get(name)
    if kept:
        kept.pop().reset()
        if not kept:
            del _kept[name]
    else:
        _released[name] += 1


class SimGraph:
    """One capture, its template and at most one executable."""

    _debug = False

    def __init__(self) -> None:
        self._graph: Any = _CUDAGraph(keep_graph=True)
        self._device = torch.cuda.current_device()
        self._pool: PoolId = (0, 0)
        self._stream: Any = None
        self._begun = False
        self._template = False
        self._executable = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        refuse_mode(capture_error_mode)
        if self._executable:
            raise RuntimeError(
                "This MUSAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        self._device = torch.cuda.current_device()
        self._stream = torch._C._cuda_getCurrentStream(self._device)
        if self._stream == torch._C._cuda_getDefaultStream(self._device):
            raise RuntimeError(
                "MUSA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        self._pool = _pool_id(pool if pool is not None and any(pool) else torch._C._graph_pool_handle())
        self._begun = True
        self._graph.capture_begin(pool=self._pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        if torch._C._cuda_getCurrentStream(torch.cuda.current_device()) != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._graph.capture_end()
        self._template = True
        executables.made()
        self._graph.instantiate()
        self._executable = True
        for warning in said:
            text = str(warning.message)
            if _EMPTY in text:
                text = EMPTY_GRAPH
            warnings.warn(text, warning.category, stacklevel=3)

    def reinstantiate_graph(self) -> None:
        if not (self._template and self._executable):
            raise RuntimeError("The graph_ and graph_exec_ musa have been created in the graph capture stage")
        self._graph.instantiate()  # destroys the one before

    def replay(self) -> None:
        if not self._executable:
            raise RuntimeError("Called MUSAGraph::replay without a preceding successful capture.")
        self._graph.replay()

    def reset(self) -> None:
        if self._executable:
            executables.destroyed()
        if self._begun:
            name = (self._device, self._pool)
            if _released[name]:
                _released[name] -= 1
                self._graph.reset()
            else:
                _kept.setdefault(name, []).append(self._graph)
            self._graph = _CUDAGraph(keep_graph=True)
        self._begun = self._template = self._executable = False

    def pool(self) -> PoolId:
        if not self._executable:
            raise RuntimeError("Called MUSAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        SimGraph._debug = True

    def debug_dump(self, debug_path: str) -> None:
        if SimGraph._debug:
            raise NotImplementedError("musaGraphDebugDotPrint is not supported now!")

    def __del__(self) -> None:
        try:
            self.reset()
        except Exception:
            pass  # at the interpreter's end the standard library may be gone
