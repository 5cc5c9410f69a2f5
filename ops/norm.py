"""RMS norm, weighted or not."""

from __future__ import annotations

import torch

from halma.hal.dispatch import like, op
from halma.hal.workspace import Workspace
from halma.ops.quant import widened


@op("rms_norm", out=lambda x, weight, eps: like(x))
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., D] -> like x: ``weight * x / sqrt(mean(x^2) + eps)``.

    Mean, scale and weight product in fp32 (fp64 for fp64), one cast at the end; ``weight`` [D] may be None
    (the per-head norm of queries). x must be contiguous.
    """
    wide = widened(x.view(-1, x.shape[-1]), ws)
    result = out.view(wide.shape) if out.dtype == wide.dtype else ws.take(wide.shape, wide.dtype)
    torch.mul(wide, inverse_rms(wide, eps, ws), out=result)
    if weight is not None:
        result.mul_(weight)
    if out.dtype != wide.dtype:
        out.view(wide.shape).copy_(result)


def inverse_rms(x: torch.Tensor, eps: float, ws: Workspace) -> torch.Tensor:
    """x [M, D], fp32 or fp64 -> scratch [M, 1]: ``1 / sqrt(mean(x^2) + eps)``."""
    rows, width = x.shape
    length = ws.take((rows, 1), x.dtype)
    # Not sum(x * x): torch splits that over threads for a lone row of 32,768 or more. Nor a batch of dot products:
    # other bits at M = 1 than at M = 2, and summed naively (6e-6 off at 16,384). Measured with torch 2.13.
    torch.linalg.vector_norm(x, 2, 1, keepdim=True, out=length)
    return ws.take((rows, 1), x.dtype).fill_(eps).addcmul_(length, length, value=1.0 / width).rsqrt_()
