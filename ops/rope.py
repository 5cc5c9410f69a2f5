"""Rotary positions: interleaved pairs on the last channels, forward and inverse."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.quant import accumulator


@op("rope_angles", out=lambda positions, inv_freq: Spec((*positions.shape, inv_freq.shape[0], 2), inv_freq.dtype))
def rope_angles(positions: torch.Tensor, inv_freq: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """positions [M] i64, inv_freq [r/2] (fp32, fp64) -> [M, r/2, 2]: cosine and sine of ``position * inv_freq``.

    The angle is made in the frequencies' dtype. One call serves every tensor of a layer kind.
    """
    angle = ws.take(out.shape[:-1], inv_freq.dtype)
    torch.mul(ws.take(positions.shape, inv_freq.dtype).copy_(positions).unsqueeze(-1), inv_freq, out=angle)
    torch.cos(angle, out=out.select(-1, 0))
    torch.sin(angle, out=out.select(-1, 1))


@op("rope")
def rope(x: torch.Tensor, angles: torch.Tensor, inverse: bool = False, *, ws: Workspace) -> None:
    """x [M, .., d] in place: its last r channels, as pairs (2i, 2i+1), are turned by the row's angles.

    Args:
        x: unit-strided last axis; any carrier.
        angles: [M, r/2, 2] from ``rope_angles``, in x's accumulator type.
        inverse: turn back (values carry the key's rotation, so the attention output is un-rotated).

    Raises:
        DispatchError: r is larger than d, or the angles have another dtype or row count.
    """
    rows, pairs, _ = angles.shape
    tail, width = 2 * pairs, x.shape[-1]
    if tail > width or rows != x.shape[0] or angles.dtype != accumulator(x.dtype):
        raise DispatchError(
            "these angles do not fit",
            asked=f"rope on {x.dtype} {list(x.shape)}",
            found=f"angles {angles.dtype} {list(angles.shape)}",
        )
    # A pair is a complex number and the turn one product: one call where four were.
    turn = torch.view_as_complex(angles)
    if inverse:
        turn = torch.conj_physical(turn, out=ws.take(turn.shape, turn.dtype))
    turn = turn.view(rows, *([1] * (x.dim() - 2)), pairs)
    rotated = x if tail == width else x[..., width - tail :]
    if x.dtype == angles.dtype:
        torch.view_as_complex(rotated.unflatten(-1, (pairs, 2))).mul_(turn)
        return
    wide = ws.take(rotated.shape, angles.dtype).copy_(rotated)
    torch.view_as_complex(wide.unflatten(-1, (pairs, 2))).mul_(turn)
    rotated.copy_(wide)
