"""The fused norm, defined once (C1): reduced = round(sum), h = round(reduced + residual), and the norm of h.

    norm = round(float(h) * rsqrt(mean(float(h)^2) + eps) * float(weight))
"""

from __future__ import annotations

import torch

from halma.hal.collectives.contract import Operands


def fused_norm(reduced: torch.Tensor, operands: Operands) -> None:
    """Write h to ``operands.out`` and its norm to ``operands.norm_out``.

    Args:
        reduced: the rounded sum, elements of ``operands.source``'s dtype in any shape.
    """
    residual, weight, norm_out = operands.residual, operands.weight, operands.norm_out
    assert residual is not None and weight is not None and norm_out is not None
    shape = (-1, operands.row_length)
    with torch.no_grad():
        h = (reduced.view(shape).float() + residual.view(shape).float()).to(operands.source.dtype)
        wide = h.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + operands.eps)
        operands.out.view(shape).copy_(h)
        norm_out.view(shape).copy_(wide * scale * weight.float())
