"""The expert feed-forward network: SwiGLU with its clamp, the routed experts, and their sum with the shared one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.workspace import Workspace
from halma.ops.linear import ROW_ALIGNMENT, aligned_rows
from halma.ops.quant import (
    E4M3_FLOOR,
    E4M3_LIMIT,
    accumulator,
    decode_weight,
    round_fp8_blocks,
    scaled,
    widened,
)
from halma.ops.weight import FP8_BLOCK, PLAIN, Weight
from halma.ops.weight_table import WeightTable

PAIRS_AT_ONCE = 16
"""Chosen experts whose weights the reference copies at a time: its scratch is this many experts, whatever M."""


def swiglu_rows(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """gate, up [M, I] -> out [M, I], with scratch like out; all of one dtype, acc.

    silu is spelt out: ATen's own finishes the last elements of a vector with another exponential on the CPU,
    so its bits depend on where a row lies (seen with torch 2.13; K7).
    """
    torch.clamp(gate, max=limit, out=out)
    torch.neg(out, out=scratch)
    scratch.exp_()
    scratch.add_(1.0)
    out.div_(scratch)
    torch.clamp(up, -limit, limit, out=scratch)
    out.mul_(scratch)


@op("swiglu", out=lambda gate_up, limit: Spec((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype))
def swiglu(gate_up: torch.Tensor, limit: float, *, out: torch.Tensor, ws: Workspace) -> None:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); the gate is clamped from above only.

    Args:
        gate_up: [M, 2I] C, gate first.
        limit: ``swiglu_limit``; applied to both halves before the product.
        out: [M, I] C; computed in acc, one cast at the end.
    """
    _gated(gate_up, limit, out, ws)


def _gated(gate_up: torch.Tensor, limit: float, out: torch.Tensor, ws: Workspace) -> None:
    acc = accumulator(out.dtype)
    scratch = ws.take(tuple(out.shape), acc)
    wide = widened(gate_up, ws)
    result = out if out.dtype is acc else ws.take(tuple(out.shape), acc)
    gate, up = wide.chunk(2, 1)
    swiglu_rows(gate, up, limit, result, scratch)
    if result is not out:
        out.copy_(result)


def _rounded_outputs(gate_up: torch.Tensor, limit: float) -> tuple[Spec, Spec]:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    return Spec((rows, inner), torch.float8_e4m3fn), Spec((rows, -(-inner // FP8_BLOCK)), torch.float32)


@op("swiglu_fp8", out=_rounded_outputs)
def swiglu_fp8(gate_up: torch.Tensor, limit: float, *, out: tuple[torch.Tensor, torch.Tensor], ws: Workspace) -> None:
    """``swiglu``, rounded as the product behind it rounds its input: to the bit that of ``swiglu`` and that rounding.

    So the activation is cast to the carrier first, once, and its e4m3 code is that of the cast.

    Args:
        gate_up, limit: as for ``swiglu``.
        out: codes [M, I] e4m3, and scales [M, ceil(I/128)] fp32: powers of two, a row's beside one another.
    """
    codes, scales = out
    active = ws.take(tuple(codes.shape), gate_up.dtype)
    _gated(gate_up, limit, active, ws)
    values, _ = scaled(active, FP8_BLOCK, E4M3_LIMIT, E4M3_FLOOR, ws, scales)
    codes.copy_(values)


def sum_of_choices(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """k parts [M, D], one a choice -> out [M, D]: added in the order of the choices."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


@op(
    "expert_ffn",
    out=lambda x, ids, weights, gate_up, down, limit: Spec(tuple(x.shape), accumulator(x.dtype)),
    padded=True,
)
def expert_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    limit: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """The weighted sum of every token's chosen experts: sum over e of (swiglu(x . w1_e, x . w3_e) * weight_e) . w2_e.

    The weight is multiplied in before w2, as the official code does. Where a weight asks for fp8 activations,
    x and the weighted input of w2 are rounded to e4m3 per 128 channels.

    Args:
        x: [M, D] C.
        ids: [M, k] int64 within [0, E), in padding rows too.
        weights: [M, k] acc.
        gate_up: logical [E, 2I, D], the rows of w1, then those of w3.
        down: logical [E, D, I].
        limit: ``swiglu_limit``.
        out: [M, D] acc, summed in the order of the choices.
    """
    rows, width = x.shape
    choices, inner, acc = ids.shape[1], down.shape[2], out.dtype
    pairs = rows * choices
    flat = ids.view(pairs)
    entry = aligned_rows((pairs, width), acc, ws)
    entry.unflatten(0, (rows, choices)).copy_(rounded_rows(widened(x, ws), gate_up, ws).unsqueeze(1))
    hidden = ws.take((pairs, 2 * inner), acc)
    active = aligned_rows((pairs, inner), acc, ws)
    scratch = ws.take((pairs, inner), acc)
    result = ws.take((pairs, width), acc)
    chosen_products(entry, flat, gate_up, hidden, ws)
    gate, up = hidden.chunk(2, 1)
    swiglu_rows(gate, up, limit, active, scratch)
    active.mul_(weights.view(pairs, 1))
    if down.activation is not None:
        round_fp8_blocks(active, FP8_BLOCK, active, ws)
    chosen_products(active, flat, down, result, ws)
    sum_of_choices(result.view(rows, choices, width).unbind(1), out)


def rounded_rows(x: torch.Tensor, weight: Weight | WeightTable, ws: Workspace) -> torch.Tensor:
    """x [M, K] acc as a product with ``weight`` reads it: itself, or rounded to e4m3 per 128 channels in scratch."""
    if weight.activation is None:
        return x
    rounded = ws.take(tuple(x.shape), x.dtype)
    round_fp8_blocks(x, FP8_BLOCK, rounded, ws)
    return rounded


def chosen_products(
    x: torch.Tensor,
    ids: torch.Tensor,
    stack: Weight | WeightTable,
    out: torch.Tensor,
    ws: Workspace,
    layer: torch.Tensor | None = None,
) -> None:
    """out[p] = stack[ids[p]] . x[p] for every pair p, a few pairs at a time; ``layer`` [1] int32 picks from a table."""
    pairs = x.shape[0]
    node = ws.enter("tile")
    try:
        tile = _Tile(stack, min(PAIRS_AT_ONCE, pairs), x.dtype, ws, layer)
        for first in range(0, pairs, PAIRS_AT_ONCE):
            last = min(first + PAIRS_AT_ONCE, pairs)
            matrices = tile.fill(ids[first:last], ws)
            # One row vector per item: the form whose bits are those of a product on its own (K7).
            torch.bmm(x[first:last].unsqueeze(1), matrices.transpose(1, 2), out=out[first:last].unsqueeze(1))
    finally:
        ws.leave(node)


class _Tile:
    """Scratch for the matrices of a few chosen experts, each starting at an aligned address.

    BLAS gives other bits for a matrix that does not start at 16 bytes (seen with MKL), so a matrix of an odd
    size must not lie at an address that depends on its place in the tile.
    """

    def __init__(
        self, stack: Weight | WeightTable, size: int, dtype: torch.dtype, ws: Workspace, layer: torch.Tensor | None
    ) -> None:
        self._layers = stack.layers if isinstance(stack, WeightTable) else (stack,)
        first = self._layers[0]
        _, rows, columns = first.shape
        unit = ROW_ALIGNMENT // dtype.itemsize
        padded = -(-rows * columns // unit) * unit
        self._format = first.format
        self._wide = ws.take((size, padded), dtype)[:, : rows * columns].unflatten(1, (rows, columns))
        self._direct = first.format == PLAIN and first.data.dtype is dtype
        self._data = self._wide if self._direct else ws.take((size, *first.data.shape[1:]), first.data.dtype)
        scale = first.scale
        self._scale = None if scale is None else ws.take((size, *scale.shape[1:]), scale.dtype)
        self._chosen: torch.Tensor | None = None
        if layer is not None:
            count = len(self._layers)
            numbers = torch.arange(count, out=ws.take((count,), layer.dtype))
            self._chosen = torch.eq(numbers, layer, out=ws.take((count,), torch.bool))

    def fill(self, ids: torch.Tensor, ws: Workspace) -> torch.Tensor:
        """The matrices [len(ids), N, K] in the tile's dtype, until the next fill."""
        count = ids.shape[0]
        wide = self._wide[:count]
        self._pick([weight.data for weight in self._layers], ids, self._data[:count], ws)
        if not self._direct:
            scale = None if self._scale is None else self._scale[:count]
            if scale is not None:
                self._pick([weight.scales for weight in self._layers], ids, scale, ws)
            node = ws.enter("decode")
            try:
                decode_weight(Weight(self._data[:count], scale, self._format), wide, ws)
            finally:
                ws.leave(node)
        return wide

    def _pick(self, sources: Sequence[torch.Tensor], ids: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
        """sources[layer][ids] -> out; every layer's is gathered, for the host does not know which it is."""
        _gather(sources[0], ids, out)
        if self._chosen is None or len(sources) == 1:
            return
        node = ws.enter("layers")
        try:
            other = ws.take(tuple(out.shape), out.dtype)
            for position, source in enumerate(sources[1:], 1):
                _gather(source, ids, other)
                mine, theirs = out, other
                if out.dtype.itemsize == 1:  # where does not know the fp8 types
                    mine, theirs = out.view(torch.uint8), other.view(torch.uint8)
                torch.where(self._chosen[position], theirs, mine, out=mine)
        finally:
            ws.leave(node)


def _gather(source: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    if source.dtype.itemsize == 1:  # index_select does not know the fp8 types
        source, out = source.view(torch.uint8), out.view(torch.uint8)
    torch.index_select(source, 0, ids, out=out)


@op("add_rows", out=lambda a, b, dtype: Spec(tuple(a.shape), dtype))
def add_rows(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor, ws: Workspace) -> None:
    """a [M, D] + b [M, D], any floating dtypes, summed in acc -> out [M, D] of ``dtype``, one cast at the end."""
    if a.dtype is b.dtype is dtype:
        torch.add(a, b, out=out)
        return
    acc = torch.float64 if torch.float64 in (a.dtype, b.dtype, dtype) else torch.float32
    total = out if dtype is acc else ws.take(tuple(out.shape), acc)
    total.copy_(a)
    total.add_(b if b.dtype is acc else ws.take(tuple(b.shape), acc).copy_(b))
    if total is not out:
        out.copy_(total)
