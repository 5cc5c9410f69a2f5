"""Collectives as ops that torch.compile, make_fx and FakeTensor can trace.

Tracers keep integers, not objects: the communicator is looked up by :attr:`Communicator.id` when the op runs, and a
dead id is an error. ``halma::all_reduce`` has two forms: one with a new result, and one with a destination, which
allocates nothing and is the one for programs that are captured. torch.compile takes these ops for a communicator's
calls (:mod:`halma.hal.collectives.tracing`). Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.collectives.communicator import Communicator, live
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder


def find(communicator: int) -> Communicator:
    """The communicator with that id.

    Raises:
        CollectiveError: there is none, or it is closed.
    """
    found = live.get(communicator)
    if found is None:
        raise CollectiveError(
            f"communicator {communicator} is gone",
            asked="an op of halma",
            found=f"open communicators: {sorted(live) or 'none'}",
            do="keep the communicator open as long as what was traced with its id, and trace again with a new one",
        )
    return found


@torch.library.custom_op("halma::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, communicator: int) -> torch.Tensor:
    return find(communicator).all_reduce(x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format))


@_all_reduce.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, communicator: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("halma::all_reduce_out", mutates_args=("out",))
def _all_reduce_out(x: torch.Tensor, communicator: int, out: torch.Tensor) -> None:
    find(communicator).all_reduce(x, out)


@_all_reduce_out.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, communicator: int, out: torch.Tensor) -> None:
    return None


@torch.library.custom_op("halma::all_reduce_rmsnorm_out", mutates_args=("residual", "out", "scale"))
def _all_reduce_rmsnorm_out(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    communicator: int,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    find(communicator).all_reduce_rmsnorm(x, residual, weight, eps=eps, out=out, scale=scale)


@torch.library.custom_op("halma::all_gather_out", mutates_args=("out",))
def _all_gather_out(x: torch.Tensor, communicator: int, out: torch.Tensor) -> None:
    find(communicator).all_gather(x, out=out)


@torch.library.custom_op("halma::broadcast_", mutates_args=("x",))
def _broadcast_(x: torch.Tensor, root: int, communicator: int) -> None:
    find(communicator).broadcast(x, root)


def _nothing_to_say(*_: Any) -> None:
    """What an op with destinations gives."""


for _op in (_all_reduce_rmsnorm_out, _all_gather_out, _broadcast_):
    _op.register_fake(_nothing_to_say)  # pyright: ignore[reportUnknownMemberType]


def all_reduce(x: torch.Tensor, communicator: Communicator, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of every rank's ``x``, through the op where somebody may be tracing.

    A recorder takes the call itself, so that it is filed as a call of the channel and not as an unknown op.

    Raises:
        As :meth:`Communicator.all_reduce`.
    """
    if out is not None and current_recorder() is not None:
        return communicator.all_reduce(x, out)
    if out is None:
        return torch.ops.halma.all_reduce(x, communicator.id)
    torch.ops.halma.all_reduce_out(x, communicator.id, out)
    return out
