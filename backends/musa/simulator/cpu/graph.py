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
from halma.backends.musa.simulator.graph_state import EMPTY_GRAPH, GraphState
from halma.backends.musa.simulator.records import new_pool_id


class SimGraph(GraphState):
    """One capture, its template and at most one executable."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = driver.current_stream()
        self._tape: list[Callable[[], object]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        stream = driver.current_stream()
        self._need_beginning(capture_error_mode, default_stream=not stream.number)
        self._stream = stream
        self._pool = tuple(pool) if pool is not None and any(pool) else new_pool_id(of_a_graph=True)
        allocator = placing.allocators[stream.index]
        opened: list[driver.Capture] = []
        allocator.begin(self._pool, lambda target: bool(opened) and target.capture is opened[0])
        opened.append(driver.begin(stream, capture_error_mode))

    def capture_end(self) -> None:
        stream = driver.current_stream()
        self._need_stream(stream)
        self._tape = driver.end(stream).tape  # where this raises the allocator goes on recording, as there
        self._template = True
        placing.allocators[stream.index].end(self._pool)
        executables.made()
        self._executable = True
        if not self._tape:
            warnings.warn(EMPTY_GRAPH, stacklevel=3)

    def reinstantiate_graph(self) -> None:
        self._need_both()
        self._executable = False
        executables.destroyed()
        executables.made()
        self._executable = True

    def replay(self) -> None:
        self._need_executable("replay")
        stream = driver.current_stream(self._stream.index)
        if stream.capture is not None:
            stream.capture.failed = True
            raise SimulatedError(faults.UNSUPPORTED)
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for call in self._tape:
                call()

    def reset(self) -> None:
        self._tape, self._template = [], False
        if self._executable:
            self._executable = False
            executables.destroyed()

    def __del__(self) -> None:
        self.reset()
