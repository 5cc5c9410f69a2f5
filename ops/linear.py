"""Products with stored weights, one row at a time in effect: a row's bits do not depend on its neighbours (K7).

On the CPU a BLAS matrix product changes its kernel with the number of rows, and with it the bits of each row.
``torch.mv`` on one row and a batch of one-row products give the same bits (measured with MKL), so these two are
used, and only where a check on this machine finds them equal; otherwise rows are done one by one.
"""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.errors import DispatchError
from halma.hal.graph.current import one_time_work
from halma.hal.workspace import Workspace
from halma.ops.quant import accumulator, decode_weight, round_fp8_blocks, unscale
from halma.ops.weight import FP8_BLOCK, PLAIN, Weight

ROW_ALIGNMENT = 64
"""Bytes. BLAS peels unaligned heads, so a row's bits can depend on its address; rows start at this alignment."""

_TILE_ELEMENTS = 1 << 24
"""Largest piece of a weight that is widened or decoded at a time: 64 MiB in fp32."""

_batched: dict[tuple[int, int, torch.dtype], bool] = {}


def _linear_output(x: torch.Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Spec:
    if len(weight.shape) != 2 or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise DispatchError(
            "linear: these shapes do not contract",
            asked=f"{list(x.shape)} . {list(weight.shape)}",
            do="give [M, K] and [N, K]",
        )
    return Spec((x.shape[0], weight.shape[0]), dtype or x.dtype)


@op("linear", out=_linear_output)
def linear(
    x: torch.Tensor, weight: Weight, dtype: torch.dtype | None = None, *, out: torch.Tensor, ws: Workspace
) -> None:
    """x [M, K] . weight [N, K] -> [M, N] in ``dtype`` (x's unless given), accumulated in fp32 (fp64 for fp64).

    With ``weight.activation`` the input is rounded to e4m3 per 128 channels first.

    Raises:
        DispatchError: x and weight do not contract, or the weight is a stack of experts (found when planning).
    """
    product(x, weight, out, ws)


def _rounded_output(codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype) -> Spec:
    if weight.activation is None:
        raise DispatchError(
            "linear_fp8: this product does not round its input",
            found=repr(weight),
            do="linear, with the input as it is",
        )
    blocks = (codes.shape[0], -(-codes.shape[-1] // FP8_BLOCK))
    if len(weight.shape) != 2 or codes.dim() != 2 or codes.shape[1] != weight.shape[1] or scales.shape != blocks:
        raise DispatchError(
            "linear_fp8: these shapes do not contract",
            asked=f"{list(codes.shape)} with scales {list(scales.shape)} . {list(weight.shape)}",
            do="give [M, K], scales [M, ceil(K/128)] and [N, K]",
        )
    return Spec((codes.shape[0], weight.shape[0]), dtype)


@op("linear_fp8", out=_rounded_output)
def linear_fp8(
    codes: torch.Tensor, scales: torch.Tensor, weight: Weight, dtype: torch.dtype, *, out: torch.Tensor, ws: Workspace
) -> None:
    """``linear`` whose input was rounded before: to the bit what it gives for the unrounded input of that rounding.

    Args:
        codes: [M, K] e4m3.
        scales: [M, ceil(K/128)] fp32, powers of two; a row's beside one another, a group of 128 channels each.
        weight: [N, K] with ``activation``: a product that rounds its input.
        dtype: the carrier's, and the result's.

    Raises:
        DispatchError: they do not contract, or the product rounds nothing (found when planning).
    """
    x = aligned_rows(codes.shape, accumulator(dtype), ws)
    x.copy_(codes)
    unscale(x, scales, FP8_BLOCK, x, ws)
    _accumulated(x, weight, out, ws)


def _grouped_output(x: torch.Tensor, weight: Weight) -> Spec:
    if len(weight.shape) != 2 or x.dim() != 3 or x.shape[2] != weight.shape[1] or weight.shape[0] % x.shape[1]:
        raise DispatchError(
            "grouped_linear: these shapes do not contract",
            asked=f"{list(x.shape)} . {list(weight.shape)}",
            do="give [M, G, K] and [G*N, K]",
        )
    return Spec((x.shape[0], weight.shape[0]), x.dtype)


@op("grouped_linear", out=_grouped_output)
def grouped_linear(x: torch.Tensor, weight: Weight, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [M, G, K] . weight [G*N, K] -> [M, G*N]: group g of x meets rows g*N .. (g+1)*N of the weight.

    The input is never rounded (the official code keeps ``wo_a`` in bf16).

    Raises:
        DispatchError: x and weight do not contract (found when planning).
    """
    groups = x.shape[1]
    rows = weight.shape[0] // groups
    direct = weight.format == PLAIN and x.dtype == weight.data.dtype == accumulator(x.dtype)
    unrounded = weight if direct else Weight(weight.data, weight.scale, weight.format)
    for group in range(groups):
        start = group * rows
        target = out[:, start : start + rows]
        if direct:
            row_product(x[:, group], weight.data[start : start + rows], target, ws)
        else:
            product(x[:, group], unrounded.narrow_rows(start, rows), target, ws)


def product(x: torch.Tensor, weight: Weight, out: torch.Tensor, ws: Workspace) -> None:
    """x [M, K] . weight [N, K] -> out [M, N] of any dtype: rounding, widening and decoding as needed."""
    dtype = accumulator(x.dtype)
    if weight.activation is not None:
        wide = aligned_rows(x.shape, dtype, ws)
        if x.dtype != dtype:
            wide.copy_(x)
            x = wide
        round_fp8_blocks(x, FP8_BLOCK, wide, ws)
        x = wide
    elif x.dtype != dtype:
        x = aligned_rows(x.shape, dtype, ws).copy_(x)
    _accumulated(x, weight, out, ws)


def _accumulated(x: torch.Tensor, weight: Weight, out: torch.Tensor, ws: Workspace) -> None:
    """x [M, K] in the accumulator type, as it is, . weight [N, K] -> out [M, N] of any dtype."""
    dtype = x.dtype
    result = out if out.dtype == dtype else ws.take(out.shape, dtype)
    if weight.format == PLAIN and weight.data.dtype == dtype:
        row_product(x, weight.data, result, ws)
    else:
        _tiled_product(x, weight, result, ws)
    if result is not out:
        out.copy_(result)


def _tiled_product(x: torch.Tensor, weight: Weight, out: torch.Tensor, ws: Workspace) -> None:
    rows, width = weight.shape
    # Whole fp8 blocks of rows per tile, and the same tiles whatever M is.
    step = max(FP8_BLOCK, _TILE_ELEMENTS // width // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, rows, step):
        length = min(step, rows - start)
        node = ws.enter("tile")
        try:
            piece = weight if length == rows else weight.narrow_rows(start, length)
            matrix = ws.take((length, width), x.dtype)
            decode_weight(piece, matrix, ws)
            row_product(x, matrix, out if length == rows else out[:, start : start + length], ws)
        finally:
            ws.leave(node)


def row_product(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
    """x [M, K] . matrix [N, K] -> out [M, N], all of one dtype (fp32 or fp64), rows of x and out unit-strided.

    Row-invariant on the CPU; on other devices one matrix product.
    """
    count = x.shape[0]
    if x.device.type != "cpu":
        torch.mm(x, matrix.t(), out=out)
        return
    size = x.dtype.itemsize
    if (x.stride(0) * size % ROW_ALIGNMENT and count > 1) or x.storage_offset() * size % ROW_ALIGNMENT:
        x = aligned_rows(x.shape, x.dtype, ws).copy_(x)
    if count == 1:
        torch.mv(matrix, x[0], out=out[0])
    elif bmm_equals_mv(matrix.shape[0], matrix.shape[1], x.dtype):
        batch = matrix.t().unsqueeze(0).expand(count, -1, -1)
        torch.bmm(x.unsqueeze(1), batch, out=out.unsqueeze(1))
    else:
        for row in range(count):
            torch.mv(matrix, x[row], out=out[row])


def aligned_rows(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, ws: Workspace) -> torch.Tensor:
    """Scratch [M, K] whose rows all start at ROW_ALIGNMENT."""
    rows, width = shape
    unit = ROW_ALIGNMENT // dtype.itemsize
    padded = -(-width // unit) * unit
    return ws.take((rows, padded), dtype)[:, :width]


def bmm_equals_mv(rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a batch of one-row products gives the bits of ``torch.mv`` for a matrix [rows, width] on this CPU.

    Tried once per shape in a process (it allocates). Inside a capture an untried shape counts as unequal: the
    row-by-row form is right everywhere.
    """
    key = (rows, width, dtype)
    known = _batched.get(key)
    if known is None:
        with one_time_work() as allowed:
            if not allowed:
                return False
            known = _batched[key] = _try_bmm(rows, width, dtype)
    return known


def _try_bmm(rows: int, width: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(rows * 1_000_003 + width)
    rows = min(rows, max(1, _TILE_ELEMENTS // width))  # kernels do not change beyond; keeps the trial small
    matrix = torch.rand(rows, width, dtype=dtype, generator=generator).sub_(0.5)
    unit = ROW_ALIGNMENT // dtype.itemsize
    x = torch.rand(17, -(-width // unit) * unit, dtype=dtype, generator=generator)[:, :width]
    alone = torch.stack([torch.mv(matrix, row) for row in x])
    for count in (2, 3, 17):
        batch = matrix.t().unsqueeze(0).expand(count, -1, -1)
        if not torch.equal(torch.bmm(x[:count].unsqueeze(1), batch).squeeze(1), alone[:count]):
            return False
    return True
