"""``_MUSAGraph`` over ``torch.cuda.CUDAGraph``, with 2.7.1's state machine and misbehaviours.

``reset()`` must not give the pool back, and torch's object always does: so the object behind a graph that was reset is
kept, and with it its share of the pool, until ``_musa_releasePool`` is called once for it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Final

import torch

from halma.backends.musa.simulator.faults import executables
from halma.backends.musa.simulator.graph_state import EMPTY_GRAPH, GraphState

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


class SimGraph(GraphState):
    """One capture, its template and at most one executable."""

    def __init__(self) -> None:
        super().__init__()
        self._graph: Any = _CUDAGraph(keep_graph=True)
        self._device = torch.cuda.current_device()
        self._begun = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch._C._cuda_getCurrentStream(self._device)
        default = torch._C._cuda_getDefaultStream(self._device)
        self._need_beginning(capture_error_mode, default_stream=self._stream == default)
        self._pool = _pool_id(pool if pool is not None and any(pool) else torch._C._graph_pool_handle())
        self._begun = True
        self._graph.capture_begin(pool=self._pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        self._need_stream(torch._C._cuda_getCurrentStream(torch.cuda.current_device()))
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
        self._need_both()
        self._graph.instantiate()  # destroys the one before

    def replay(self) -> None:
        self._need_executable("replay")
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

    def __del__(self) -> None:
        try:
            self.reset()
        except Exception:
            pass  # at the interpreter's end the standard library may be gone
