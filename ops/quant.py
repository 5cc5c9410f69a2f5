"""Rounding to the shipped number formats: fp8 e4m3 and fp4 e2m1 in blocks with power-of-two scales, and Hadamard.

A block shares the scale ``2^ceil(log2(max(amax, floor) / limit))``; ceil(log2) is read from the exponent bits of
the fp32 product ``amax * (1/limit)``, as the official kernels do. Rounding is to nearest, ties to even.

The functions below the ops are plain: other families call them with their own workspace. ``values`` and ``x`` are
fp32 or fp64 there (:func:`accumulator`); fp64 is rounded directly, since a detour over fp32 would round twice.
"""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.weight import FP4_BLOCK, FP4_BLOCK32, FP8_BLOCK, FP8_BLOCK128, Weight

E4M3_LIMIT = 448.0
E4M3_FLOOR = 1e-4
E2M1_LIMIT = 6.0
E2M1_FLOOR = 6.0 * 2.0**-126
KV_BLOCK = 64
"""Channels of a KV row that share a scale."""

_EXPONENT = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which a carrier's products and sums are made: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """``x`` in its accumulator type: itself, or a copy in scratch."""
    dtype = accumulator(x.dtype)
    return x if x.dtype == dtype else ws.take(x.shape, dtype).copy_(x)


@op("round_activation", out=lambda x: like(x), padded=True)
def round_activation(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., K] -> like x: the input of an fp8 or fp4 product, to e4m3 with one scale per 128 channels."""
    round_fp8_blocks(x, FP8_BLOCK, out, ws)


def _hadamard_output(x: torch.Tensor) -> Spec:
    width = x.shape[-1]
    if width & (width - 1) or width == 0:
        raise DispatchError(
            "the Hadamard transform needs a power of two", asked=f"d = {width}", do="check index_head_dim"
        )
    return like(x)


@op("hadamard", out=_hadamard_output)
def hadamard(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., d] -> like x: the orthogonal Hadamard transform in Sylvester order, d a power of two.

    Raises:
        DispatchError: d is no power of two (found when planning).
    """
    width = x.shape[-1]
    source = widened(x, ws)
    buffers = ws.take(x.shape, source.dtype), ws.take(x.shape, source.dtype)
    half, turn = 1, 0
    while half < width:  # log2(d) stages of sums and differences
        target = buffers[turn]
        pairs = source.unflatten(-1, (width // (2 * half), 2, half))
        results = target.unflatten(-1, (width // (2 * half), 2, half))
        torch.add(pairs.select(-2, 0), pairs.select(-2, 1), out=results.select(-2, 0))
        torch.sub(pairs.select(-2, 0), pairs.select(-2, 1), out=results.select(-2, 1))
        source, half, turn = target, 2 * half, 1 - turn
    if out.dtype == source.dtype:
        torch.mul(source, width**-0.5, out=out)
    else:
        target = buffers[turn]
        out.copy_(torch.mul(source, width**-0.5, out=target))


def round_fp8_blocks(x: torch.Tensor, block: int, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., K] -> out like x: to e4m3 with one scale per ``block`` channels (the last block may be shorter)."""
    values, scales = scaled(x, block, E4M3_LIMIT, E4M3_FLOOR, ws)
    nearest_e4m3(values, ws)
    unscale(values, scales, block, out, ws)


def round_fp4_blocks(x: torch.Tensor, block: int, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., K] -> out like x: to e2m1 with one scale per ``block`` channels."""
    values, scales = scaled(x, block, E2M1_LIMIT, E2M1_FLOOR, ws)
    nearest_e2m1(values, ws)
    unscale(values, scales, block, out, ws)


def round_kv_rows(x: torch.Tensor, tail: int, out: torch.Tensor, ws: Workspace) -> None:
    """x [N, d] -> out like x: what a KV row keeps: e4m3 in blocks of 64, the last ``tail`` channels bf16."""
    head = x.shape[-1] - tail
    round_fp8_blocks(x[..., :head], KV_BLOCK, out[..., :head], ws)
    rope = ws.take(x[..., head:].shape, accumulator(x.dtype)).copy_(x[..., head:])
    nearest_bf16(rope, ws)
    out[..., head:].copy_(rope)


def scaled(
    x: torch.Tensor, block: int, limit: float, floor: float, ws: Workspace, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K] -> (x / scale, in scratch and in the accumulator type; scales [.., ceil(K/block)], fp32).

    The scales go to ``scales`` where it is given, else to scratch.
    """
    x = widened(x, ws)
    values = ws.take(x.shape, x.dtype)
    if scales is None:
        scales = ws.take((*x.shape[:-1], -(-x.shape[-1] // block)), torch.float32)
    largest = scales if x.dtype == torch.float32 else ws.take(scales.shape, x.dtype)
    for _, _, part, first in _parts(x, block):  # the infinity norm is amax of |x| in one call
        torch.linalg.vector_norm(part, float("inf"), -1, out=largest[..., first : first + part.shape[-2]])
    if largest is not scales:
        scales.copy_(largest)
    scales.clamp_min_(floor).mul_(1.0 / limit)
    # Up to the next power of two: carry any mantissa into the exponent, then drop the mantissa.
    scales.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)
    for start, stop, part, first in _parts(x, block):
        scale = scales[..., first : first + part.shape[-2]].unsqueeze(-1)
        torch.div(part, scale, out=_grouped(values, start, stop, part.shape[-1]))
    return values, scales


def unscale(values: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor, ws: Workspace) -> None:
    """values [.., K] times its block's scale -> out (any carrier); ``values`` is used up."""
    target = out if out.dtype == values.dtype else values
    for start, stop, part, first in _parts(values, block):
        scale = scales[..., first : first + part.shape[-2]].unsqueeze(-1)
        torch.mul(part, scale, out=_grouped(target, start, stop, part.shape[-1]))
    if target is not out:
        out.copy_(target)


def _grouped(x: torch.Tensor, start: int, stop: int, block: int) -> torch.Tensor:
    piece = x if stop - start == x.shape[-1] else x[..., start:stop]
    return piece.unflatten(-1, ((stop - start) // block, block))


def _parts(x: torch.Tensor, block: int) -> list[tuple[int, int, torch.Tensor, int]]:
    """(start, stop, view [.., blocks, block], index of the first block): the full blocks, then a shorter one."""
    width = x.shape[-1]
    full = width // block * block
    parts = [(0, full, _grouped(x, 0, full, block), 0)] if full else []
    if full < width:
        parts.append((full, width, _grouped(x, full, width, width - full), full // block))
    return parts


def nearest_e4m3(values: torch.Tensor, ws: Workspace) -> None:
    """In place: to the nearest e4m3 number. |values| must be at most 448 (half a step more is met by rounding).

    float64 goes through float32, as every conversion of the published code does: rounding once instead gives
    other numbers about once in a million, and a text of 96 tokens holds several of those.
    """
    values.copy_(ws.take(values.shape, torch.float8_e4m3fn).copy_(values))


def nearest_e2m1(values: torch.Tensor, ws: Workspace) -> None:
    """In place: to the nearest e2m1 number; |values| must be below 7."""
    _nearest(values, 1, 0, ws)


def nearest_bf16(values: torch.Tensor, ws: Workspace) -> None:
    """In place: to the nearest bf16 number; float64 through float32, as for e4m3."""
    values.copy_(ws.take(values.shape, torch.bfloat16).copy_(values))


def _nearest(values: torch.Tensor, mantissa: int, lowest: int, ws: Workspace) -> None:
    """Round to ``mantissa`` bits behind the leading one, with subnormals below ``2^lowest``.

    Adding and taking away 1.5 * 2^(own bits) * step leaves a multiple of the step, rounded by the adder itself.
    """
    integer = _INTEGER[values.dtype]
    anchor = ws.take(values.shape, values.dtype)
    torch.bitwise_and(values.view(integer), _EXPONENT[values.dtype], out=anchor.view(integer))
    anchor.clamp_min_(2.0**lowest).mul_(1.5 * 2.0 ** (_MANTISSA_BITS[values.dtype] - mantissa))
    rounded = torch.add(values, anchor, out=ws.take(values.shape, values.dtype)).sub_(anchor)
    torch.copysign(rounded, values, out=values)  # a negative number that rounds to zero keeps its sign


def encode_scales(scales: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
    """scales (fp32, normal powers of two) -> out, uint8 of the same shape: e8m0, the exponent field itself."""
    exponent = torch.bitwise_right_shift(scales.view(torch.int32), 23, out=ws.take(scales.shape, torch.int32))
    out.copy_(exponent)


def decode_scales(encoded: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """e8m0 (as uint8 or float8_e8m0fnu) -> fp32 scratch of the same shape."""
    return ws.take(encoded.shape, torch.float32).copy_(encoded.view(torch.float8_e8m0fnu))


def encode_fp8_blocks(x: torch.Tensor, block: int, data: torch.Tensor, scales: torch.Tensor, ws: Workspace) -> None:
    """x [.., K] -> data uint8 [.., K] (e4m3) and scales uint8 [.., ceil(K/block)] (e8m0)."""
    values, powers = scaled(x, block, E4M3_LIMIT, E4M3_FLOOR, ws)
    data.view(torch.float8_e4m3fn).copy_(values)
    encode_scales(powers, scales, ws)


def decode_fp8_blocks(data: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor, ws: Workspace) -> None:
    """data [.., K] (e4m3) and scales [.., ceil(K/block)] (e8m0) -> out [.., K], any carrier."""
    dtype = accumulator(out.dtype)
    values = out if out.dtype == dtype else ws.take(out.shape, dtype)
    values.copy_(data.view(torch.float8_e4m3fn))
    unscale(values, decode_scales(scales, ws), block, out, ws)


def encode_fp4_blocks(x: torch.Tensor, block: int, data: torch.Tensor, scales: torch.Tensor, ws: Workspace) -> None:
    """x [.., K] -> data uint8 [.., K/2] (e2m1, low nibble = even channel), scales uint8 [.., K/block] (e8m0)."""
    values, powers = scaled(x, block, E2M1_LIMIT, E2M1_FLOOR, ws)
    nearest_e2m1(values, ws)
    encode_scales(powers, scales, ws)
    # e2m1 times 2^-6 is an e4m3 number with the same sign, exponent and mantissa bits at 7 and 4..2.
    wide = ws.take(values.shape, torch.float8_e4m3fn).copy_(values.mul_(2.0**-6)).view(torch.uint8)
    sign = torch.bitwise_right_shift(wide, 4, out=ws.take(wide.shape, torch.uint8)).bitwise_and_(8)
    code = torch.bitwise_right_shift(wide, 2, out=ws.take(wide.shape, torch.uint8)).bitwise_and_(7).bitwise_or_(sign)
    pairs = code.unflatten(-1, (-1, 2))
    high = torch.bitwise_left_shift(pairs.select(-1, 1), 4, out=ws.take(data.shape, torch.uint8))
    torch.bitwise_or(pairs.select(-1, 0), high, out=data)


def decode_fp4_blocks(data: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor, ws: Workspace) -> None:
    """data (int8 or uint8) [.., K/2] and scales [.., K/block] (e8m0) -> out [.., K], any carrier."""
    packed = data.view(torch.uint8)
    dtype = accumulator(out.dtype)
    values = out if out.dtype == dtype else ws.take(out.shape, dtype)
    pairs = values.unflatten(-1, (-1, 2))
    wide, sign = ws.take(packed.shape, torch.uint8), ws.take(packed.shape, torch.uint8)
    # The nibble becomes an e4m3 byte that is 2^-6 times its value (see encode_fp4_blocks).
    torch.bitwise_left_shift(packed, 4, out=sign).bitwise_and_(0x80)
    torch.bitwise_left_shift(packed, 2, out=wide).bitwise_and_(0x1C).bitwise_or_(sign)
    pairs.select(-1, 0).copy_(wide.view(torch.float8_e4m3fn))
    torch.bitwise_and(packed, 0x80, out=sign)
    torch.bitwise_right_shift(packed, 2, out=wide).bitwise_and_(0x1C).bitwise_or_(sign)
    pairs.select(-1, 1).copy_(wide.view(torch.float8_e4m3fn))
    unscale(values, decode_scales(scales, ws).mul_(2.0**6), block, out, ws)


def decode_weight(weight: Weight, out: torch.Tensor, ws: Workspace) -> None:
    """A weight of any format -> out of its logical shape, fp32 or fp64 (exact unless a plain weight is wider)."""
    if weight.format == FP8_BLOCK128:
        _decode_fp8_tiles(weight, out, ws)
    elif weight.format == FP4_BLOCK32:
        decode_fp4_blocks(weight.data, weight.scales, FP4_BLOCK, out, ws)
    else:
        out.copy_(weight.data)


def _decode_fp8_tiles(weight: Weight, out: torch.Tensor, ws: Workspace) -> None:
    scale = decode_scales(weight.scales, ws)
    out.copy_(weight.data)
    rows = weight.shape[-2]
    full = rows // FP8_BLOCK * FP8_BLOCK
    for start, stop, height in ((0, full, FP8_BLOCK), (full, rows, rows - full)):
        if start == stop:
            continue
        first, count = start // FP8_BLOCK, (stop - start) // height
        band = scale.narrow(-2, first, count).unsqueeze(-2)  # [.., bands, 1, column blocks]
        tiles = out.narrow(-2, start, stop - start).unflatten(-2, (count, height))
        for _, _, part, column in _parts(tiles, FP8_BLOCK):
            part.mul_(band[..., column : column + part.shape[-2]].unsqueeze(-1))
