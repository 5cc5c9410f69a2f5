"""The fused norm, defined once (C1): reduced = round(sum), h = round(reduced + residual), and the norm of h.

    norm = round(float(h) * rsqrt(mean(float(h)^2) + eps) * float(weight))

Where it is given as fp8, each 128 columns share a scale, the power of two from max(amax(norm), 1e-4) / 448 up, and the
values are norm / scale in e4m3fn, to nearest, ties to even: the input of DeepSeek-V4's fp8 products, as in ops.quant.
"""

from __future__ import annotations

from typing import Final

import torch

from halma.hal.collectives.contract import Operands

FP8_GROUP: Final = 128
"""Columns that share a scale."""
E4M3_LIMIT: Final = 448.0
E4M3_FLOOR: Final = 1e-4


def fused_norm(reduced: torch.Tensor, operands: Operands) -> None:
    """Write h to ``operands.out`` and its norm to ``operands.norm_out``, and its scales to ``operands.scale_out``.

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
        norm = wide * scale * weight.float()
        if operands.scale_out is None:
            norm_out.view(shape).copy_(norm)
        else:
            _quantised(norm.to(operands.source.dtype).float(), norm_out, operands.scale_out)


def _quantised(norm: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor) -> None:
    groups = norm.view(norm.shape[0], norm.shape[1] // FP8_GROUP, FP8_GROUP)
    largest = groups.abs().amax(-1)
    scales = largest.clamp_min(E4M3_FLOOR) * (1.0 / E4M3_LIMIT)
    # Up to a power of two: carry any mantissa into the exponent, then drop the mantissa.
    scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(largest.isnan(), largest, scales)
    scale_out.view(scales.shape).copy_(scales)
    out.view(norm.shape).copy_((groups / scales.unsqueeze(-1)).view(norm.shape).to(out.dtype))
