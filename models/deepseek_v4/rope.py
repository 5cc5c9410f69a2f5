"""Rope frequencies: plain for window layers, YaRN for layers with compressed rows."""

from __future__ import annotations

import math

import numpy as np
import torch

from halma.models.deepseek_v4.config import V4Config


def rope_inv_freq(config: V4Config, kind: str) -> torch.Tensor:
    """Angle per position of each rotated pair, float64 [r/2] on the CPU.

    Args:
        kind: ``main`` or ``compress`` (see :attr:`LayerKind.rope`).

    The values are float32 numbers in a float64 tensor: trained weights belong to the frequencies of the
    published float32 code, and a float64 program that computed better ones would be off by 1e-7 of the
    angle, a thousand times its own error. The power alone is taken in float64 and rounded, so that the bits
    do not depend on a CPU's vector library.
    """
    rope = config.qk_rope_head_dim
    theta = config.rope_theta if kind == "main" else config.compress_rope_theta
    exponents = np.arange(0, rope, 2, dtype=np.float32) / np.float32(rope)
    plain = np.float32(1) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    if kind == "main":
        return torch.from_numpy(plain.astype(np.float64))
    scaling = config.rope_scaling

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns this often over the original context."""
        return rope * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), rope - 1)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(rope // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1).astype(np.float32)
    keep = np.float32(1) - ramp
    stretched = plain / np.float32(scaling.factor) * (np.float32(1) - keep)
    return torch.from_numpy((stretched + plain * keep).astype(np.float64))


def rope_frequencies(
    config: V4Config, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """The tables that the model's layers use, by :attr:`LayerKind.rope`, [r/2] each.

    Args:
        dtype: the carrier; tables are float64 with a float64 carrier, else float32 (no bits are lost).
    """
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32
    kinds = sorted({kind.rope for kind in (*config.layers, *config.mtp_layers)}, reverse=True)
    return {kind: rope_inv_freq(config, kind).to(device=device, dtype=accumulator) for kind in kinds}
