"""Planning and capturing small programs on any backend.

A program takes its memory from the workspace it is given and writes with ``out=``: a graph that is recorded by
stream has no other place for results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halma.hal.backend import Backend
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace

Program = Callable[[Workspace], Any]
Make = Callable[..., Workspace]
F32 = torch.float32


def planned(backend: Backend, *programs: Program, checked: bool = False) -> Workspace:
    """A sealed workspace that holds what every one of ``programs`` needs."""
    workspace = Workspace(backend.device.torch_device, checked=checked)
    for program in programs:
        workspace.start()
        backend.graphs.dry_run(lambda program=program: program(workspace), workspace)
    workspace.start()
    workspace.seal()
    return workspace


def captured(
    backend: Backend, program: Program, workspace: Workspace | None = None, *, into: BreakableGraph | None = None
) -> BreakableGraph:
    """``program``, captured; in a workspace planned for it alone unless one is given, sealed."""
    workspace = workspace or planned(backend, program)
    graph = into or BreakableGraph(backend)
    workspace.start()
    with GraphCaptureScope(graph, workspace):
        graph.set_outputs(program(workspace))
    return graph


def numbers(backend: Backend, *shape: int, start: float = 0.0) -> torch.Tensor:
    """float32 ``shape`` on the backend's device, counting up from ``start``."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=F32) + start).view(shape).to(backend.device.torch_device)


def like(workspace: Workspace, tensor: torch.Tensor) -> torch.Tensor:
    """Workspace memory of a tensor's shape and dtype."""
    return workspace.take(tensor.shape, tensor.dtype)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a contiguous tensor begins and ends."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def empty(backend: Backend) -> Workspace:
    """A sealed workspace that holds nothing, for programs that take nothing."""
    workspace = Workspace(backend.device.torch_device)
    workspace.seal()
    return workspace
