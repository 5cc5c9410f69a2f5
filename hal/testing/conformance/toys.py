"""A toy program's tools: buffers on the device, a plan, a capture, values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.graph.breakable import BreakableGraph, CaptureMode
from halma.hal.graph.breaks import Cell, break_point
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.conformance.recording import RecordedBackend
from halma.hal.workspace import Workspace

Program = Callable[[], Any]
PIECEWISE = CaptureMode.PIECEWISE
SIZE = 8


class Toy:
    """A recorded backend with a checked workspace and an input ``x`` [8] float32 that holds 5.

    Programs are functions without arguments over ``toy.plus`` and ``toy.times``, which take their results from
    the workspace.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = RecordedBackend(backend)
        self.device = self.backend.device
        self.log = self.backend.log
        self.workspace = Workspace(self.device.torch_device, checked=True)
        self.x = self.full(5.0)

    def full(self, value: float, size: int = SIZE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A buffer of its own."""
        return torch.full((size,), value, dtype=dtype, device=self.device.torch_device)

    def plus(self, x: torch.Tensor, number: float) -> torch.Tensor:
        """x + number, in the workspace."""
        return torch.add(x, number, out=self.workspace.take(tuple(x.shape), x.dtype))

    def times(self, x: torch.Tensor, number: float) -> torch.Tensor:
        """x * number, in the workspace."""
        return torch.mul(x, number, out=self.workspace.take(tuple(x.shape), x.dtype))

    def plan(self, *programs: Program) -> None:
        """Dry-run the programs and seal the workspace."""
        for program in programs:
            self.workspace.start()
            self.backend.graphs.dry_run(program, self.workspace)
        self.workspace.seal()
        self.log.clear()

    def scope(self, graph: BreakableGraph, mode: CaptureMode = PIECEWISE, **options: Any) -> GraphCaptureScope:
        """A scope on the toy's workspace, at the start of a program."""
        self.workspace.start()
        return GraphCaptureScope(graph, self.workspace, mode=mode, **options)

    def graph(self) -> BreakableGraph:
        """An empty container."""
        return BreakableGraph(self.backend, "toy")

    def capture(self, program: Program, mode: CaptureMode = PIECEWISE, **options: Any) -> BreakableGraph:
        """Plan if that was not done yet, and capture."""
        if not self.workspace.sealed:
            self.plan(program)
        graph = self.graph()
        with self.scope(graph, mode, **options):
            graph.set_outputs(program())
        return graph

    def replay(self, graph: BreakableGraph, x: float) -> list[float]:
        """The first element of every output after a replay with ``x`` filled in."""
        self.x.fill_(x)
        return self.first(graph.replay())

    def first(self, outputs: Any) -> list[float]:
        """The first element of each tensor, once the device is done."""
        self.device.synchronize()
        tensors: list[torch.Tensor] = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return [float(tensor.flatten()[0]) for tensor in tensors]


def needs_capture(backend: Backend, *, segments: bool = False) -> None:
    """Skip, with the backend's own reason, where it cannot capture (or not in several segments)."""
    why = backend.graphs.unsupported()
    if why is None and segments and not backend.capabilities.graph_segments:
        why = f"graph_segments is {backend.capabilities.graph_segments}"
    if why is not None:
        pytest.skip(why)


def double(x: torch.Tensor) -> torch.Tensor:
    """The host's work."""
    return x * 2


def one_break(toy: Toy) -> Callable[[], torch.Tensor]:
    """x + 1, a break that doubles, + 3; with a cell of its own for each capture."""

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=Cell(), name="double") as host:
            doubled = host(double, x)
        return toy.plus(doubled, 3.0)

    return program


def in_a_thread(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` raises on a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


class Doubling:
    """x + 1, a break that doubles into ``cell``, + 3."""

    def __init__(self, toy: Toy, cell: Cell | None = None, fn: Callable[[torch.Tensor], Any] = double) -> None:
        self.toy = toy
        self.cell = cell or Cell(name="doubled")
        self.fn = fn
        self.runs = 0

    def __call__(self) -> torch.Tensor:
        x = self.toy.plus(self.toy.x, 1.0)
        with break_point(out=self.cell, name="double") as host:
            y = host(self._run, x)
        return self.toy.plus(y if isinstance(y, torch.Tensor) else self.tensor_of(y), 3.0)

    def _run(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return self.fn(x)

    def tensor_of(self, value: Any) -> torch.Tensor:
        """The tensor to go on with."""
        if isinstance(value, Mapping):
            return cast("Mapping[str, torch.Tensor]", value)["a"]
        return getattr(value, "rows", value)


def copies_of(toy: Toy, work: Callable[[], Any]) -> int:
    """Copies that ``work`` makes eagerly, between the segments of a replay."""
    with toy.backend.graphs.counting() as counts:
        work()
    return counts().copies
