"""Kernels round the grouped products: staging of rows, layout by expert, and the sum over a token's choices."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from halma.backends.triton.products import rounded

CHUNK = 128
"""Pairs that one block of the layout counts and places."""


@triton.jit
def _ordered(values, ROWS: tl.constexpr, CODES: tl.constexpr):
    """values [ROWS, 128] in the order of the columns -> in that of :func:`column_order`."""
    if CODES == 1:
        return values
    else:
        WORDS: tl.constexpr = 64 // CODES
        return values.reshape(ROWS, 2, WORDS, 2, CODES // 2).permute(0, 1, 4, 2, 3).reshape(ROWS, 128)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["scales", "end"])
def stage_kernel(
    x,
    scales,
    staged,
    count,
    end,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    CODES: tl.constexpr,
    ROUND: tl.constexpr,
    SCALED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x [R, K] by STRIDE (times scales [R, K / 128] where SCALED) -> staged bf16 [R, K], columns in the order of CODES.

    With ROUND to e4m3 per 128 channels, as ``round_fp8_blocks`` does: exact in bf16. Where BOUNDED, rows from
    ``end[0]`` on are left out.
    """
    start = tl.program_id(0) * ROWS
    block = tl.program_id(1)
    if BOUNDED:
        count = tl.minimum(count, tl.load(end))
    if start < count:
        row = start + tl.arange(0, ROWS)
        column = block * 128 + tl.arange(0, 128)
        here = (row < count)[:, None]
        values = tl.load(x + row[:, None].to(tl.int64) * STRIDE + column[None, :], mask=here, other=0)
        if SCALED:
            # e4m3 by its bits: at the places of fp32's fields it is 2^120 too small; its NaN would be 480.
            bits = values.to(tl.int32)
            number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
            number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
            factor = tl.load(scales + row * (K // 128) + block, mask=row < count, other=0.0)
            values = number * 1.329227995784916e36 * factor[:, None]
        else:
            values = values.to(tl.float32)
        if ROUND:
            values = rounded(values, 1)
        at = staged + row[:, None].to(tl.int64) * K + column[None, :]
        tl.store(at, _ordered(values.to(tl.bfloat16), ROWS, CODES), mask=here)


@triton.jit(do_not_specialize=["pairs", "capacity", "first"], do_not_specialize_on_alignment=["ids", "index"])
def count_kernel(
    ids,
    index,
    chunks,
    pairs,
    capacity,
    first,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """chunks[c, e] = pairs of chunk c that chose expert first + e; index[:] = -1."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - first
    number = tl.arange(0, EXPERTS_2)
    chosen = (expert[:, None] == number[None, :]) & (number < EXPERTS)[None, :] & (pair < pairs)[:, None]
    tl.store(chunks + chunk * EXPERTS_2 + number, tl.sum(chosen.to(tl.int32), 0))
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    while tl.min(slot, 0) < capacity:
        tl.store(index + slot, tl.full((CHUNK,), -1, tl.int32), mask=slot < capacity)
        slot += tl.num_programs(0) * CHUNK


@triton.jit(do_not_specialize=["number_of_chunks", "alignment"], do_not_specialize_on_alignment=["counts", "offsets"])
def offsets_kernel(
    chunks,
    counts,
    offsets,
    number_of_chunks,
    alignment,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """chunks -> for every chunk the pairs of the chunks before it; counts, offsets. One block."""
    number = tl.arange(0, EXPERTS_2)
    before = tl.zeros((EXPERTS_2,), tl.int32)
    chunk = tl.arange(0, AT_ONCE)
    while tl.min(chunk, 0) < number_of_chunks:
        here = (chunk < number_of_chunks)[:, None]
        at = chunks + chunk[:, None] * EXPERTS_2 + number[None, :]
        found = tl.load(at, mask=here, other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, 0) - found, mask=here)
        before += tl.sum(found, 0)
        chunk += AT_ONCE
    real = number < EXPERTS
    aligned = (before + alignment - 1) // alignment * alignment
    ends = tl.cumsum(aligned, 0)
    tl.store(counts + number, before, mask=real)
    tl.store(offsets + number, ends - aligned, mask=real)
    tl.store(offsets + EXPERTS, tl.max(ends, 0))


@triton.jit(
    do_not_specialize=["pairs", "choices", "first"],
    do_not_specialize_on_alignment=["ids", "weights", "offsets", "index", "slot_weights", "slots"],
)
def place_kernel(
    ids,
    weights,
    chunks,
    offsets,
    index,
    slot_weights,
    slots,
    pairs,
    choices,
    first,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Every pair to its slot: index[slot] = token, slot_weights[slot] = weight, slots[pair] = slot or -1."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    here = pair < pairs
    expert = tl.load(ids + pair, mask=here, other=-1).to(tl.int32) - first
    number = tl.arange(0, EXPERTS_2)
    chosen = ((expert[:, None] == number[None, :]) & (number < EXPERTS)[None, :]).to(tl.int32)
    start = tl.load(offsets + number, mask=number < EXPERTS, other=0) + tl.load(chunks + chunk * EXPERTS_2 + number)
    place = tl.sum(chosen * (start[None, :] + tl.cumsum(chosen, 0) - 1), 1)
    known = here & (expert >= 0) & (expert < EXPERTS)
    tl.store(index + place, pair // choices, mask=known)
    tl.store(slot_weights + place, tl.load(weights + pair, mask=here, other=0.0), mask=known)
    tl.store(slots + pair, tl.where(known, place, -1), mask=here)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def sum_kernel(parts, slots, out, CHOICES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """out[m] = the sum over the choices with a slot, in their order, of parts[slot]; fp32 [M, D]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < D
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots + row * CHOICES + choice).to(tl.int64)
        total += tl.load(parts + slot * D + column, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(out + row * D + column, total, mask=inside)
