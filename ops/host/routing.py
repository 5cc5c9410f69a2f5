"""The routes ``host`` of ``route_scores`` and ``select_experts``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import HostArrays, plain_problem
from halma.ops.host.linear import row_products
from halma.ops.routing import EXP_LIMIT, LEAST_SUM
from halma.ops.weight import Weight


def plain_gate(call: Call) -> str | None:
    """Requirement: the gate is multiplied as it is stored, and its input is not rounded."""
    if call["gate"].activation is not None:
        return f"the input is rounded to {call['gate'].activation} first"
    return plain_problem("the gate", call["gate"], call["x"])


def route_scores(x: torch.Tensor, gate: Weight, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    """See ``route_scores`` in :mod:`halma.ops.routing`."""
    affinity = ws.take(out.shape, out.dtype)
    multiply = row_products(x, gate.data, affinity, ws)
    arrays = HostArrays(affinity, out)

    def launch() -> None:
        multiply()
        logits, scores = arrays()
        with np.errstate(all="ignore"):  # padding rows hold anything
            np.minimum(logits, EXP_LIMIT, out=scores)
            np.exp(scores, out=scores)
            np.log1p(scores, out=scores)
            np.maximum(scores, logits, out=scores)
            np.sqrt(scores, out=scores)

    return launch


def select_experts(
    scores: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> Callable[[], None]:
    """See ``select_experts`` in :mod:`halma.ops.routing`."""
    negated = ws.take(scores.shape, scores.dtype)
    arrays = HostArrays(scores, bias, negated, *out)

    def launch() -> None:
        values, biases, keys, ids, weights = arrays()
        with np.errstate(all="ignore"):
            np.add(values, biases, out=keys)
            np.negative(keys, out=keys)
            # Stable, so that among equals the lower index wins.
            ids[:] = np.argsort(keys, axis=1, kind="stable")[:, :k]
            for row, chosen, target in zip(values, ids, weights, strict=True):
                np.take(row, chosen, out=target, mode="clip")
            total = np.add.reduce(weights, axis=1, keepdims=True)
            np.maximum(total, LEAST_SUM, out=total)
            np.divide(weights, total, out=weights)
            np.multiply(weights, scale, out=weights)

    return launch
