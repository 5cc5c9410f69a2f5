"""The two grouped products of an expert network, as persistent kernels that walk device counts and offsets.

Weight rows are the first operand and tokens the second, so a packed weight becomes a matrix operand in registers
and never returns to shared memory. A block takes TILE_W weight rows against up to TILE_T slots of one expert, in one
or two matrices of tokens (192 = 128 + 64) against weights decoded once. What a block reads beyond an expert's last
slot is a real row once more, so nothing outside the real slots is ever read.

A word of 32 bits holds 8 fp4 or 4 fp8 codes. Two codes half a word apart become two bf16 numbers at once: their
bits are moved to the places of sign, exponent and mantissa, which gives value * 2^-126 (fp4) or value * 2^-120
(fp8), subnormals included; one product with a power of two brings in the scale, exactly. The columns then come in
the order :func:`column_order`, and the rows that meet them are stored in that order.

Products are made 2^64 too small and corrected once at the end: scales from 2^-56 to 2^64 stay inside bf16's range.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

STEP = 64
"""Columns contracted at a time."""


@triton.jit
def column_order(position, CODES: tl.constexpr):
    """Which column of a row stands at ``position``, for weights with CODES codes a word; 1: columns as they are."""
    if CODES == 1:
        return position
    else:
        WORDS: tl.constexpr = 64 // CODES
        HALF: tl.constexpr = CODES // 2
        inside = position % 64
        pair = inside // 2
        return position - inside + (pair % WORDS) * CODES + pair // WORDS + (inside % 2) * HALF


@triton.jit
def _weight_tile(words, factor, ROWS: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr):
    """words int32 [ROWS, 64 / CODES] and factor int32 [ROWS, 64 / CODES] (bf16 bits) -> bf16, or fp32, [ROWS, 64]."""
    WORDS: tl.constexpr = 64 // CODES
    PAIRS: tl.constexpr = CODES // 2
    BITS: tl.constexpr = 32 // CODES
    turn = tl.arange(0, PAIRS) * BITS
    code = (words[:, None, :] >> turn[None, :, None]).reshape(ROWS, 32)
    scale = factor[:, None, :].broadcast_to(ROWS, PAIRS, WORDS).reshape(ROWS, 32)
    if CODES == 8:
        both = ((code & 0x00080008) << 12) | ((code & 0x00070007) << 6)
    else:
        both = ((code & 0x00800080) << 8) | ((code & 0x007F007F) << 4)
    if WIDE:  # the interpreter has no arithmetic in bf16: the same numbers in fp32
        scale = (scale << 16).to(tl.float32, bitcast=True)
        low = (both << 16).to(tl.float32, bitcast=True) * scale
        high = (both & -65536).to(tl.float32, bitcast=True) * scale
    else:
        scale = scale.to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True) * scale
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * scale
    return tl.join(low, high).reshape(ROWS, 64)


@triton.jit
def _wide(values, WIDE: tl.constexpr):
    """values, in fp32 for the interpreter, which has no arithmetic in bf16."""
    return values.to(tl.float32) if WIDE else values


@triton.jit
def _start(table, layer, KIND: tl.constexpr, ALIGNED: tl.constexpr, TABLE: tl.constexpr):
    """Where a weight, or its scales, start: ``table`` itself, or the address that it holds for the layer."""
    if TABLE:
        # Without the hint, said here, rows would be copied by four bytes.
        return tl.multiple_of(tl.load(table + tl.load(layer)).to(tl.pointer_type(KIND)), ALIGNED)
    else:
        return table


@triton.jit
def _product(
    x,  # [.., K] bf16, its columns in the order of CODES
    rows,  # int32 [TILE_T]: which rows of x
    more,  # int32 [MORE]: further rows, against the same weights: decoded once for both; MORE may be 0
    weight,  # int32 words [E, N, K / CODES], or bf16 [E, N, K]
    scale,  # fp4: int16 [E, N, K / 64], two e8m0 each; fp8: uint8 [E, N / 128, K / 128]
    expert,
    lines,  # int32 [TILE_W]: which rows of the expert's weight
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_T: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """-> fp32 [TILE_W, TILE_T] and [TILE_W, MORE]: the expert's weight rows times the rows of x (MORE 0: 16 zeros)."""
    wide = expert.to(tl.int64)
    columns = tl.arange(0, 64)
    x_at = x + rows[:, None].to(tl.int64) * K + columns[None, :]
    more_at = x + more[:, None].to(tl.int64) * K + columns[None, :]
    total = tl.zeros((TILE_W, TILE_T), tl.float32)
    rest = tl.zeros((TILE_W, MORE if MORE else 16), tl.float32)
    if CODES == 1:
        w_at = weight + wide * (N * K) + lines[:, None] * K + columns[None, :]
        for step in tl.range(0, K // 64, num_stages=STAGES):
            own = _wide(tl.load(w_at + step * 64), WIDE)
            total = tl.dot(own, _wide(tl.load(x_at + step * 64), WIDE).T, total)
            if MORE:
                rest = tl.dot(own, _wide(tl.load(more_at + step * 64), WIDE).T, rest)
    else:
        WORDS: tl.constexpr = 64 // CODES
        words = tl.arange(0, WORDS)
        w_at = weight + wide * (N * K // CODES) + lines[:, None] * (K // CODES) + words[None, :]
        if CODES == 8:
            s_at = scale + wide * (N * K // 64) + lines * (K // 64)
        else:
            s_at = scale + wide * (N // 128 * (K // 128)) + lines // 128 * (K // 128)
        exponent = tl.load(s_at).to(tl.int32)
        for step in tl.range(0, K // 64, num_stages=STAGES):
            packed = tl.load(w_at + step * WORDS)
            # One step ahead by hand: too narrow for an asynchronous copy.
            ahead = tl.minimum(step + 1, K // 64 - 1)
            if CODES == 8:
                following = tl.load(s_at + ahead).to(tl.int32)
                factor = (((exponent[:, None] >> (words[None, :] // 4 * 8)) & 0xFF) + 62) << 7
            else:
                following = tl.load(s_at + ahead // 2).to(tl.int32)
                factor = ((exponent[:, None] + 56) << 7).broadcast_to(TILE_W, WORDS)
            own = _weight_tile(packed, factor, TILE_W, CODES, WIDE)
            total = tl.dot(own, _wide(tl.load(x_at + step * 64), WIDE).T, total)
            if MORE:
                rest = tl.dot(own, _wide(tl.load(more_at + step * 64), WIDE).T, rest)
            exponent = following
        total = total * 18446744073709551616.0
        rest = rest * 18446744073709551616.0
    return total, rest


@triton.jit
def nearest_e4m3(scaled):
    """Numbers up to 448 -> the nearest e4m3 numbers, ties to even, in fp32: no fp8 type, so on every generation.

    Adding and taking away 1.5 * 2^20 times a number's own power of two leaves three bits behind the leading one;
    below 2^-6 the step stays 2^-9.
    """
    binade = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(binade, 0.015625) * 1572864.0
    return (scaled + anchor) - anchor


@triton.jit
def rounded(values, AXIS: tl.constexpr):
    """fp32 values, 128 along AXIS -> the numbers that ``round_fp8_blocks`` makes of them: exact in bf16."""
    largest = tl.maximum(tl.max(tl.abs(values), AXIS), 1e-4) * (1.0 / 448.0)
    power = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    # A product with the inverse, itself a power of two, is the quotient: far cheaper than a division.
    inverse = tl.expand_dims((0x7F000000 - power).to(tl.float32, bitcast=True), AXIS)
    return nearest_e4m3(values * inverse) * tl.expand_dims(power.to(tl.float32, bitcast=True), AXIS)


@triton.jit
def _tile_of(item, counts, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, ACROSS: tl.constexpr, TILE_T: tl.constexpr):
    """Item -> (expert, weight tile, first slot of the tile inside the expert); expert = EXPERTS behind the last.

    The tiles of an expert that share weight rows come one after the other, so that blocks running side by side
    find them in the L2 cache.
    """
    number = tl.arange(0, EXPERTS_2)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    tiles = (count + TILE_T - 1) // TILE_T
    ends = tl.cumsum(tiles, 0) * ACROSS
    before = ends <= item
    expert = tl.sum(before.to(tl.int32), 0)
    start = tl.max(tl.where(before, ends, 0), 0)
    own = tl.maximum(tl.sum(tl.where(number == expert, tiles, 0), 0), 1)
    inside = item - start
    return tl.minimum(expert, EXPERTS), inside // own, inside % own * TILE_T


@triton.jit
def _slots(first, count, base, ROWS: tl.constexpr):
    """-> int32 [ROWS] slots from ``first`` of the expert on, the last real one again behind it; which are real."""
    number = first + tl.arange(0, ROWS if ROWS else 16)
    return base + tl.minimum(number, count - 1), number < count


@triton.jit
def _swiglu(
    total,  # fp32 [2 * CHANNELS, ROWS], gate and up rows by turns of eight
    slots,
    real,
    slot_weights,
    hidden,
    limit,
    columns,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """swiglu(total) times the slots' weights to their rows of ``hidden``."""
    gate, up = total.reshape(CHANNELS // 8, 2, 8, ROWS).permute(0, 2, 3, 1).split()
    # A minimum drops a NaN if it is not told: a broken row would look sound.
    gate = tl.minimum(gate.reshape(CHANNELS, ROWS), limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up.reshape(CHANNELS, ROWS), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    values = gate / (tl.exp(-gate) + 1.0) * up * tl.load(slot_weights + slots)[None, :]
    at = hidden + slots[:, None].to(tl.int64) * STRIDE + columns[None, :]
    tl.store(at, values.to(hidden.dtype.element_ty).T, mask=real[:, None])


@triton.jit
def _gate_up_tile(
    left, x, index, slot_weights, weight, scale, hidden, limit, expert, across, first, count, base,
    D: tl.constexpr, INNER: tl.constexpr, STRIDE: tl.constexpr, CODES: tl.constexpr, ORDER: tl.constexpr,
    TILE_W: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the first product where SIZE is the least size that holds the ``left`` slots, else nothing."""
    CHANNELS: tl.constexpr = TILE_W // 2
    UP_TO_64: tl.constexpr = 64 if SIZE >= 64 else 32 if SIZE >= 32 else 16
    TILE_T: tl.constexpr = 256 if SIZE >= 256 else 128 if SIZE >= 128 else UP_TO_64
    MORE: tl.constexpr = SIZE - TILE_T
    if (left > SIZE - PIECE) & (left <= SIZE):
        line = tl.arange(0, TILE_W)
        slots, real = _slots(first, count, base, TILE_T)
        others, more = _slots(first + TILE_T, count, base, MORE)
        channel = across * CHANNELS + line // 16 * 8 + line % 8
        lines = column_order(channel, ORDER) + line // 8 % 2 * INNER
        total, rest = _product(
            x, tl.load(index + slots), tl.load(index + others), weight, scale, expert, lines,
            2 * INNER, D, CODES, TILE_W, TILE_T, MORE, STAGES, WIDE,
        )  # fmt: skip
        columns = across * CHANNELS + tl.arange(0, CHANNELS)
        _swiglu(total, slots, real, slot_weights, hidden, limit, columns, STRIDE, CHANNELS, TILE_T)
        if MORE:
            _swiglu(rest, others, more, slot_weights, hidden, limit, columns, STRIDE, CHANNELS, MORE)


@triton.jit
def _down_tile(
    left, hidden, weight, scale, out, expert, across, first, count, base,
    D: tl.constexpr, INNER: tl.constexpr, CODES: tl.constexpr,
    TILE_W: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the second product, where SIZE fits."""
    UP_TO_64: tl.constexpr = 64 if SIZE >= 64 else 32 if SIZE >= 32 else 16
    TILE_T: tl.constexpr = 256 if SIZE >= 256 else 128 if SIZE >= 128 else UP_TO_64
    MORE: tl.constexpr = SIZE - TILE_T
    if (left > SIZE - PIECE) & (left <= SIZE):
        slots, real = _slots(first, count, base, TILE_T)
        others, more = _slots(first + TILE_T, count, base, MORE)
        lines = across * TILE_W + tl.arange(0, TILE_W)
        total, rest = _product(
            hidden, slots, others, weight, scale, expert, lines, D, INNER, CODES, TILE_W, TILE_T, MORE, STAGES, WIDE
        )
        at = out + slots[:, None].to(tl.int64) * D + lines[None, :]
        tl.store(at, total.T.to(out.dtype.element_ty), mask=real[:, None])
        if MORE:
            at = out + others[:, None].to(tl.int64) * D + lines[None, :]
            tl.store(at, rest.T.to(out.dtype.element_ty), mask=more[:, None])


@triton.jit(do_not_specialize_on_alignment=["index", "slot_weights", "counts", "offsets", "scale", "layer"])
def gate_up_kernel(
    x,
    index,
    slot_weights,
    counts,
    offsets,
    weight,
    scale,
    layer,
    hidden,
    limit,
    D: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    CODES: tl.constexpr,
    ORDER: tl.constexpr,
    TABLE: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_T: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """hidden[s] = swiglu(x[index[s]] . w1, x[index[s]] . w3) * slot_weights[s], fp32 or bf16 [C, INNER], by STRIDE.

    TILE_W / 2 channels a block: gate and up rows alternate by eight, so that both halves of a channel meet in one
    thread. A tile takes TILE_T slots, an expert's last one as few pieces of PIECE as hold what is left. Columns of
    ``hidden`` are in the order of ORDER.
    """
    ACROSS: tl.constexpr = INNER // (TILE_W // 2)
    weight = _start(weight, layer, tl.bfloat16 if CODES == 1 else tl.int32, 16, TABLE)
    scale = _start(scale, layer, tl.int16 if CODES == 8 else tl.uint8, 2, TABLE and CODES > 1)
    blocks = tl.num_programs(0)
    item = tl.program_id(0)
    expert, across, first = _tile_of(item, counts, EXPERTS, EXPERTS_2, ACROSS, TILE_T)
    while expert < EXPERTS:
        count = tl.load(counts + expert)
        base = tl.load(offsets + expert)
        left = tl.minimum(count - first, TILE_T)
        for level in tl.static_range(TILE_T // PIECE):
            _gate_up_tile(
                left, x, index, slot_weights, weight, scale, hidden, limit, expert, across, first, count, base,
                D, INNER, STRIDE, CODES, ORDER, TILE_W, TILE_T - level * PIECE, PIECE, STAGES, WIDE,
            )  # fmt: skip
        item += blocks
        expert, across, first = _tile_of(item, counts, EXPERTS, EXPERTS_2, ACROSS, TILE_T)


@triton.jit(do_not_specialize_on_alignment=["counts", "offsets", "scale", "layer"])
def down_kernel(
    hidden,
    counts,
    offsets,
    weight,
    scale,
    layer,
    out,
    D: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    CODES: tl.constexpr,
    TABLE: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_T: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[s] = hidden[s] . w2 of the slot's expert; out fp32 or bf16 [C, D]; other rows are left alone."""
    ACROSS: tl.constexpr = D // TILE_W
    weight = _start(weight, layer, tl.bfloat16 if CODES == 1 else tl.int32, 16, TABLE)
    scale = _start(scale, layer, tl.int16 if CODES == 8 else tl.uint8, 2, TABLE and CODES > 1)
    blocks = tl.num_programs(0)
    item = tl.program_id(0)
    expert, across, first = _tile_of(item, counts, EXPERTS, EXPERTS_2, ACROSS, TILE_T)
    while expert < EXPERTS:
        count = tl.load(counts + expert)
        base = tl.load(offsets + expert)
        left = tl.minimum(count - first, TILE_T)
        for level in tl.static_range(TILE_T // PIECE):
            _down_tile(
                left, hidden, weight, scale, out, expert, across, first, count, base,
                D, INNER, CODES, TILE_W, TILE_T - level * PIECE, PIECE, STAGES, WIDE,
            )  # fmt: skip
        item += blocks
        expert, across, first = _tile_of(item, counts, EXPERTS, EXPERTS_2, ACROSS, TILE_T)
