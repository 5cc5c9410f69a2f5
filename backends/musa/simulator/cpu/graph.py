"""``_MUSAGraph`` of the CPU simulator: a tape of CPU calls behind torch_musa 2.7.1's state machine.

What differs from ``torch.cuda.CUDAGraph`` is kept (torch_musa/csrc/aten/musa/MUSAGraph.cpp of that tag): the template
lives until ``reset()``, which does not give the pool back; ``capture_end`` instantiates; the default stream is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from halma.backends.musa.simulator import faults
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu import placing
from halma.backends.musa.simulator.faults import SimulatedError, executables
from halma.backends.musa.simulator.records import new_pool_id, refuse_mode


class SimGraph:
    """One capture, its template and at most one executable."""

    _debug = False

    def __init__(self) -> None:
        self._stream = driver.current_stream()
        self._pool = (0, 0)
        self._tape: list[Callable[[], object]] | None = None
        self._executable = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        refuse_mode(capture_error_mode)
        if self._executable:
            raise RuntimeError(
                "This MUSAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        stream = driver.current_stream()
        if not stream.number:
            raise RuntimeError(
                "MUSA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        self._stream = stream
        self._pool = tuple(pool) if pool is not None and any(pool) else new_pool_id(of_a_graph=True)
        allocator = placing.allocators[stream.index]
        opened: list[driver.Capture] = []
        allocator.begin(self._pool, lambda target: bool(opened) and target.capture is opened[0])
        opened.append(driver.begin(stream, capture_error_mode))

    def capture_end(self) -> None:
        stream = driver.current_stream()
        if stream is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._tape = driver.end(stream).tape  # where this raises the allocator goes on recording, as there
        placing.allocators[stream.index].end(self._pool)
        executables.made()
        self._executable = True
        if not self._tape:
            warnings.warn(faults.EMPTY_GRAPH, stacklevel=3)

    def reinstantiate_graph(self) -> None:
        if self._tape is None or not self._executable:
            raise RuntimeError("The graph_ and graph_exec_ musa have been created in the graph capture stage")
        self._executable = False
        executables.destroyed()
        executables.made()
        self._executable = True

    def replay(self) -> None:
        if self._tape is None or not self._executable:
            raise RuntimeError("Called MUSAGraph::replay without a preceding successful capture.")
        stream = driver.current_stream(self._stream.index)
        if stream.capture is not None:
            stream.capture.failed = True
            raise SimulatedError(faults.UNSUPPORTED)
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for call in self._tape:
                call()

    def reset(self) -> None:
        self._tape = None
        if self._executable:
            self._executable = False
            executables.destroyed()

    def pool(self) -> tuple[int, int]:
        if not self._executable:
            raise RuntimeError("Called MUSAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        SimGraph._debug = True

    def debug_dump(self, debug_path: str) -> None:
        if SimGraph._debug:
            raise NotImplementedError("musaGraphDebugDotPrint is not supported now!")

    def __del__(self) -> None:
        self.reset()
