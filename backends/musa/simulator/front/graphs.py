"""Graphs: signatures of torch_musa/musa_graph/graphs.py, 2.7.1. ``graph`` takes ``musa_graph``, not ``cuda_graph``."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from halma.backends.musa.simulator.chosen import musac
from halma.backends.musa.simulator.front.device import synchronize
from halma.backends.musa.simulator.front.memory import empty_cache
from halma.backends.musa.simulator.front.stream import Stream, StreamContext

_C = musac()


def is_current_stream_capturing() -> bool:
    return _C._musa_isCurrentStreamCapturing()


def graph_pool_handle() -> tuple[int, int]:
    return _C._graph_pool_handle()


class MUSAGraph(_C._MUSAGraph):
    """A capture with its template and executable."""

    _graph_instances: weakref.WeakSet[Any] = weakref.WeakSet()

    def __new__(cls) -> Any:
        made = super().__new__(cls)
        cls._graph_instances.add(made)
        return made

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        super().capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        super().capture_end()

    def replay(self) -> None:
        super().replay()

    def reset(self) -> None:
        super().reset()

    def pool(self) -> tuple[int, int]:
        return super().pool()

    def reinstantiate_graph(self) -> None:
        super().reinstantiate_graph()

    def enable_debug_mode(self) -> None:
        super().enable_debug_mode()

    def debug_dump(self, debug_path: str) -> None:
        super().debug_dump(debug_path)

    @classmethod
    def get_latest_instance(cls) -> Any:
        return cls._graph_instances


def update_musa_graph_with_profile() -> None:
    for graph in MUSAGraph.get_latest_instance():
        graph.reinstantiate_graph()


class graph:
    """Captures what is inside into ``musa_graph``."""

    default_capture_stream: Any = None

    def __init__(
        self, musa_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        if stream is None and self.__class__.default_capture_stream is None:
            self.__class__.default_capture_stream = Stream()
        self.pool = () if pool is None else (pool,)
        self.capture_stream = stream if stream is not None else self.__class__.default_capture_stream
        self.stream_ctx = StreamContext(self.capture_stream)
        self.musa_graph = musa_graph
        self.capture_error_mode = capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        empty_cache()
        self.stream_ctx.__enter__()
        self.musa_graph.capture_begin(*self.pool, capture_error_mode=self.capture_error_mode)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.musa_graph.capture_end()
        self.stream_ctx.__exit__(exc_type, exc_value, traceback)
