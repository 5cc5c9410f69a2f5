"""Drivers that run out: of device memory, or of live executables."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from halma.hal.backend import Backend, MemoryInfo
from halma.hal.capabilities import Capabilities
from tests.cpu.graph.scripted import ScriptedGraphs


class DriverLimit(RuntimeError):
    """What a driver says when it has no more."""


class Driver(ScriptedGraphs):
    """A graph driver with memory that falls at each executable, and a ceiling of live ones.

    Args:
        free: bytes at the start.
        cost: bytes of the n-th executable made.
        ceiling: live executables that may be.
    """

    def __init__(self, *, free: int = 1 << 30, cost: Callable[[int], int] = lambda _: 0, ceiling: int = 1 << 30):
        super().__init__()
        self.free = free
        self.cost = cost
        self.ceiling = ceiling
        self.made = 0
        self.replayed: list[Any] = []
        self._costs: dict[int, int] = {}

    def end(self, stream: Any) -> Any:
        super().end(stream)
        return SimpleNamespace(number=self.log.count("end"))

    def instantiate(self, template: Any) -> Any:
        if self.live >= self.ceiling:
            raise DriverLimit("too many graph executables")
        super().instantiate(template)
        executable = SimpleNamespace(template=template)
        self._costs[id(executable)] = cost = self.cost(self.made)
        self.made += 1
        self.free -= cost
        return executable

    def replay(self, executable: Any, stream: Any) -> None:
        super().replay(executable, stream)
        self.replayed.append(executable.template.number)

    def destroy(self, executable: Any) -> None:
        super().destroy(executable)
        self.free += self._costs.pop(id(executable))


def backend_of(driver: Driver, **capabilities: Any) -> Backend:
    """A backend of which graphs, capabilities and a device's memory exist."""
    device = SimpleNamespace(
        current_stream=lambda: "stream",
        synchronize=lambda: None,
        torch_device=torch.device("cpu"),
        memory_info=lambda: MemoryInfo(driver.free, 1 << 40),
    )
    facts = Capabilities(**{"graph_reinstantiate": True, "memory_info_exact": True, **capabilities})
    return SimpleNamespace(name="driver", evidence="simulated", graphs=driver, device=device, capabilities=facts)  # type: ignore[return-value]
