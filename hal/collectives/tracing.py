"""What torch.compile takes in place of a communicator's calls while it traces Python code.

It cannot follow a call into a driver, but it knows the ops of :mod:`halma.hal.collectives.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch


def traced(method: str, communicator: int, *args: Any, **kwargs: Any) -> Any:
    """The call as an op. Arguments are looked at when the op runs.

    Raises:
        RuntimeError: there is no op for it. (torch.compile cannot trace the making of an error of ours.)
    """
    if method not in OPS:
        raise RuntimeError(
            f"Communicator.{method}() cannot be part of what torch.compile traces: call it outside of the compiled "
            f"function. There are ops for {', '.join(OPS)}: torch.ops.halma.all_reduce and so on"
        )
    return OPS[method](communicator, *args, **kwargs)


def _all_reduce(communicator: int, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        return x.copy_(torch.ops.halma.all_reduce(x, communicator))
    torch.ops.halma.all_reduce_out(x, communicator, out)
    return out


def _all_reduce_rmsnorm(
    communicator: int,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    torch.ops.halma.all_reduce_rmsnorm_out(x, residual, weight, eps, communicator, out, scale)
    return out


def _all_gather(communicator: int, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    torch.ops.halma.all_gather_out(x, communicator, out)
    return out


def _broadcast(communicator: int, x: torch.Tensor, root: int) -> torch.Tensor:
    torch.ops.halma.broadcast_(x, root, communicator)
    return x


OPS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_rmsnorm": _all_reduce_rmsnorm,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}
