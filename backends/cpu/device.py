"""The CPU as a device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from halma.backends.cpu.memory_limits import memory_info
from halma.backends.cpu.streams import CpuEvent, CpuStream, StreamState, refuse_on_host
from halma.hal.backend import MemoryInfo


class CpuDevice:
    """Properties, memory and streams.

    Args:
        state: the threads' current streams, shared with the graph part.
    """

    def __init__(self, state: StreamState) -> None:
        self._state = state
        self._main = CpuStream(state, "main", self)

    @property
    def torch_device(self) -> torch.device:
        """``cpu``."""
        return torch.device("cpu")

    def properties(self) -> Mapping[str, str]:
        """Model, cores, threads and vector instructions, for reports."""
        return {
            "name": _model(),
            "machine": platform.machine(),
            "cores": str(os.cpu_count() or 1),
            "threads": str(torch.get_num_threads()),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        }

    def memory_info(self) -> MemoryInfo:
        """What the machine and the control groups allow."""
        return memory_info()

    def current_stream(self) -> CpuStream:
        """The innermost entered stream of this thread, ``main`` if none."""
        entered = self._state.entered
        return entered[-1] if entered else self._main

    def new_stream(self, name: str) -> CpuStream:
        """A stream of its own."""
        return CpuStream(self._state, name, self)

    def new_event(self, name: str = "") -> CpuEvent:
        """An event that counts as done until it is recorded."""
        return CpuEvent(self._state, name)

    def synchronize(self) -> None:
        """Nothing to wait for; raises while a capture is open."""
        refuse_on_host(self._state, "synchronize() of the device")


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
