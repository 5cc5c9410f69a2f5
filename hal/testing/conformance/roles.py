"""A toy step of every role: one descriptor, one program, and no driver of its own.

Each step reads rows of ``x``, takes what it needs in between from the session's workspace, and writes rows of
``y``. All are written with destinations, so that a capture allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from halma.hal.backend import Backend
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.session import CaptureSession, Program
from halma.hal.workspace import Workspace

WIDTH = 8
Step = Callable[[Workspace, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(workspace, x [M, WIDTH], weight [WIDTH, WIDTH], y [M, WIDTH])."""


def _decode(ws: Workspace, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    h = ws.take(x.shape, x.dtype)
    torch.mul(x, 2.0, out=h)
    torch.add(h, 1.0, out=y)


def _draft(ws: Workspace, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    h = ws.take(x.shape, x.dtype)
    torch.neg(x, out=h)
    with ws.scope("sum"):
        total = ws.take(x.shape, x.dtype)
        torch.mul(h, h, out=total)
        torch.sub(total, h, out=y)


def _verify(ws: Workspace, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    accepted = ws.take(x.shape, torch.bool)
    other = ws.take(x.shape, x.dtype)
    torch.gt(x, 0.0, out=accepted)
    torch.neg(x, out=other)
    torch.where(accepted, x, other, out=y)


def _prefill(ws: Workspace, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, weight, out=y)


def _ffn(ws: Workspace, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    gate = ws.take(x.shape, x.dtype)
    torch.mm(x, weight, out=gate)
    hidden = ws.take(x.shape, x.dtype)
    torch.sigmoid(gate, out=hidden)
    torch.mul(gate, hidden, out=y)


STEPS: dict[str, Step] = {"decode": _decode, "draft": _draft, "verify": _verify, "prefill": _prefill, "ffn": _ffn}


class Toy:
    """Inputs and outputs of toy steps with up to ``most`` rows, at fixed addresses."""

    def __init__(self, backend: Backend, most: int) -> None:
        self.most = most
        self.x = backend.memory.empty((most, WIDTH), torch.float32)
        self.y = backend.memory.empty((most, WIDTH), torch.float32)
        self.weight = backend.memory.empty((WIDTH, WIDTH), torch.float32)
        self.weight.copy_(torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH) / 64 - 0.5)
        self.fill(0)

    def fill(self, seed: int) -> None:
        """New inputs; the outputs are forgotten."""
        values = torch.arange(self.most * WIDTH, dtype=torch.float32).view(self.most, WIDTH)
        self.x.copy_((values * 7 + seed * 3) % 11 - 5)
        self.y.fill_(-77.0)

    def program(self, session: CaptureSession, descriptor: Descriptor) -> Program:
        """The step of a descriptor; its outputs are rows of ``y``."""
        x, y = self.x[: descriptor.num_tokens], self.y[: descriptor.num_tokens]
        step, weight, workspace = STEPS[descriptor.role], self.weight, session.workspace

        def program() -> Any:
            with workspace.scope("step"):
                step(workspace, x, weight, y)
            return y

        return program

    def program_of(self, session: CaptureSession) -> Callable[[Descriptor], Program]:
        """For ``capture_all``."""
        return lambda descriptor: self.program(session, descriptor)


@contextmanager
def session_on(backend: Backend, kind: str = "persistent", **options: Any) -> Generator[CaptureSession]:
    """A session on a workspace of its own; closed at the end, whatever its kind."""
    session = CaptureSession(backend, Workspace(backend.device.torch_device), kind, **options)
    try:
        with torch.no_grad(), session:
            yield session
    finally:
        session.close()
