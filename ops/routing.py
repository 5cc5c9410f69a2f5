"""Which experts a token goes to, and with what weight.

Every step is made of ATen kernels whose result for an element does not depend on where the element lies:
``softplus``, ``sigmoid`` and ``silu`` finish the last few elements of a vector with another exponential on
the CPU (seen with torch 2.13: 11 % of softplus values change a bit), which would break K7.
"""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.workspace import Workspace
from halma.ops.linear import product
from halma.ops.quant import accumulator
from halma.ops.weight import Weight

EXP_LIMIT = 80.0
"""exp(80) is finite in fp32, and softplus(x) = x there to the last bit of fp64."""

LEAST_SUM = 1e-20
"""Keeps the normalisation finite where every chosen score underflowed to 0; changes no other value in fp32."""


@op("route_scores", out=lambda x, gate: Spec((x.shape[0], gate.shape[0]), accumulator(x.dtype)))
def route_scores(x: torch.Tensor, gate: Weight, *, out: torch.Tensor, ws: Workspace) -> None:
    """Affinity of every token to every expert: sqrt(softplus(x . gate)).

    Args:
        x: [M, D] C.
        gate: plain [E, D]; its input is never rounded.
        out: [M, E] acc; product, softplus and root are computed in acc.
    """
    affinity = ws.take(out.shape, out.dtype)
    product(x, gate, affinity, ws)
    torch.clamp(affinity, max=EXP_LIMIT, out=out)
    out.exp_()
    out.log1p_()
    torch.maximum(out, affinity, out=out)
    out.sqrt_()


def _normalise(scores: torch.Tensor, ids: torch.Tensor, scale: float, weights: torch.Tensor, ws: Workspace) -> None:
    torch.gather(scores, 1, ids, out=weights)
    total = ws.take((weights.shape[0], 1), weights.dtype)
    torch.sum(weights, 1, keepdim=True, out=total)
    total.clamp_(min=LEAST_SUM)
    weights.div_(total)
    weights.mul_(scale)


@op(
    "select_experts",
    out=lambda scores, bias, k, scale: (
        Spec((scores.shape[0], k), torch.int64),
        Spec((scores.shape[0], k), scores.dtype),
    ),
)
def select_experts(
    scores: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """The k experts with the largest score + bias, best first; among equals the lower index.

    Args:
        scores: [M, E] acc.
        bias: [E] floating; chooses, and never enters the weights.
        k: experts per token.
        scale: what the weights of a token add up to (``routed_scaling_factor``).
        out: ids [M, k] int64, always within [0, E) even where a row of scores is NaN; weights [M, k] acc.
    """
    ids, weights = out
    rows, experts = scores.shape
    biased = ws.take((rows, experts), scores.dtype)
    ranked = ws.take((rows, experts), scores.dtype)
    order = ws.take((rows, experts), torch.int64)
    biased.copy_(bias)
    biased.add_(scores)
    torch.sort(biased, stable=True, dim=1, descending=True, out=(ranked, order))
    ids.copy_(order[:, :k])
    _normalise(scores, ids, scale, weights, ws)


@op(
    "lookup_experts",
    out=lambda scores, table, tokens, scale: (
        Spec((scores.shape[0], table.shape[1]), torch.int64),
        Spec((scores.shape[0], table.shape[1]), scores.dtype),
    ),
)
def lookup_experts(
    scores: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """The experts that a table gives to a token id; weighted by their scores as in ``select_experts``.

    Args:
        scores: [M, E] acc.
        table: [V, k] int64, values within [0, E).
        tokens: [M] int64 within [0, V); padding rows hold token 0.
        scale: what the weights of a token add up to.
        out: ids [M, k] int64, weights [M, k] acc.
    """
    ids, weights = out
    torch.index_select(table, 0, tokens, out=ids)
    _normalise(scores, ids, scale, weights, ws)
