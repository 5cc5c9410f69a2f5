"""Capturing small programs on the CPU backend, and a toy decoder to capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from halma.backends.cpu.backend import CpuBackend
from halma.backends.cpu.tape import Template
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import POISON_BYTE, Workspace

Program = Callable[[], Any]


def planned(backend: CpuBackend, program: Program, workspace: Workspace | None = None) -> Workspace:
    """A sealed workspace that holds what ``program`` needs."""
    workspace = workspace or Workspace(checked=True)
    workspace.start()
    backend.graphs.dry_run(program, workspace)
    workspace.seal()
    return workspace


def capture(backend: CpuBackend, program: Program, workspace: Workspace | None = None) -> BreakableGraph:
    """``program``, captured; in a workspace of its own (checked) unless one is given, sealed."""
    workspace = workspace or planned(backend, program)
    graph = BreakableGraph(backend)
    workspace.start()
    with GraphCaptureScope(graph, workspace):
        graph.set_outputs(program())
    return graph


def template_of(graph: BreakableGraph) -> Template:
    """The tape of a graph with one segment."""
    (segment,) = graph.segments
    return segment.template


def poison_workspace(workspace: Workspace) -> None:
    """What a replay must not read before it writes it: all of the sealed memory."""
    assert workspace._buffer is not None
    workspace._buffer.fill_(POISON_BYTE)


class ToyDecode:
    """Eight layers of norm, linears, a key cache written by index, attention with a mask, and gathered experts.

    ``step()`` reads ``tokens`` [B, D] and ``positions`` [B], writes ``keys`` and ``values`` [layer, rows, D],
    returns [B, D]. Written the way a stranger would: results are made, not placed.
    """

    LAYERS, WIDTH, ROWS, EXPERTS = 8, 16, 12, 4

    def __init__(self, batch: int = 3) -> None:
        width = self.WIDTH
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / width**0.5

        self.inputs = [weights(3 * width, width) for _ in range(self.LAYERS)]
        self.experts = [weights(self.EXPERTS, width, width) for _ in range(self.LAYERS)]
        self.gates = [weights(self.EXPERTS, width) for _ in range(self.LAYERS)]
        self.scale = weights(width)
        self.keys = torch.zeros(self.LAYERS, self.ROWS, width)
        self.values = torch.zeros(self.LAYERS, self.ROWS, width)
        self.columns = torch.arange(self.ROWS)
        self.tokens = torch.zeros(batch, width)
        self.positions = torch.zeros(batch, dtype=torch.int64)

    def step(self) -> torch.Tensor:
        x = self.tokens
        for layer in range(self.LAYERS):
            x = x + self._layer(x, layer)
        return x

    def _layer(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        normed = functional.rms_norm(x, (self.WIDTH,), self.scale)
        q, k, v = functional.linear(normed, self.inputs[layer]).chunk(3, -1)
        keys, values = self.keys[layer], self.values[layer]
        keys[self.positions] = k
        values.index_copy_(0, self.positions, v)
        scores = q @ keys.t()
        visible = self.columns <= self.positions.unsqueeze(-1)
        shares = torch.softmax(torch.where(visible, scores, float("-inf")), -1)
        x = x + shares @ values
        chosen = functional.linear(x, self.gates[layer]).topk(2).indices
        picked = self.experts[layer][chosen.flatten()].view(*chosen.shape, self.WIDTH, self.WIDTH)
        return functional.silu(torch.einsum("bkij,bj->bi", picked, x))

    def refresh(self, seed: int) -> None:
        """New tokens at new positions, and another past."""
        generator = torch.Generator().manual_seed(seed)
        self.tokens.normal_(generator=generator)
        self.positions.copy_(torch.randperm(self.ROWS, generator=generator)[: len(self.positions)])
        self.keys.normal_(generator=generator)
        self.values.normal_(generator=generator)

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the caches."""
        return self.keys.clone(), self.values.clone()
