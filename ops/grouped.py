"""Experts by group: lay an item's pairs out by expert, run every expert on its slots, add a token's slots up.

The counts and offsets stay on the device; a program's shapes come from the most pairs it may meet. What lies
outside the real slots is never read and never written, so padding may hold anything (F3).
"""

from __future__ import annotations

import torch

from halma.hal.collectives.expert_rows import CHARGED, SKIPPED, slot_capacity
from halma.hal.dispatch import Spec, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.experts import chosen_products, rounded_rows, swiglu_rows
from halma.ops.linear import aligned_rows
from halma.ops.quant import accumulator, round_fp8_blocks, widened
from halma.ops.weight import FP8_BLOCK, Weight
from halma.ops.weight_table import WeightTable

# -- layout ---------------------------------------------------------------------------------------------


def _layout_output(
    ids: torch.Tensor, weights: torch.Tensor, first: int, experts: int, alignment: int, padding: str = SKIPPED
) -> tuple[Spec, ...]:
    _need_padding("expert_layout", padding)
    if padding == CHARGED and not ids.shape[0]:
        raise DispatchError(
            "expert_layout: no padding can be charged",
            asked=f"{padding} padding of an item without rows",
            found="a charged slot names a row, and there is none",
            do="skip padding, or skip the item",
        )
    if ids.dim() != 2 or ids.shape != weights.shape or ids.dtype is not torch.int64 or first < 0:
        raise DispatchError(
            "expert_layout: ids and weights do not fit",
            asked=f"ids {ids.dtype}{list(ids.shape)}, weights {list(weights.shape)}, first expert {first}",
            do="give ids int64 [M, k], weights [M, k] and a first expert from 0 on",
        )
    capacity = slot_capacity(ids.numel(), experts, alignment)
    return (
        Spec((capacity,), torch.int32),
        Spec((capacity,), weights.dtype),
        Spec((experts,), torch.int32),
        Spec((experts + 1,), torch.int32),
        Spec(tuple(ids.shape), torch.int32),
    )


@op("expert_layout", out=_layout_output, padded=True)
def expert_layout(
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    experts: int,
    alignment: int,
    padding: str = SKIPPED,
    *,
    out: tuple[torch.Tensor, ...],
    ws: Workspace,
) -> None:
    """Sorts the (token, choice) pairs of this rank's experts by expert, stable by (token, choice).

    Args:
        ids: [M, k] int64; a pair outside ``first .. first + experts`` is skipped, a padding row holds -1.
        weights: [M, k] acc.
        first: this rank's first expert.
        experts: E, this rank's experts.
        alignment: the first slot of an expert is a multiple of it.
        padding: ``skipped``, or ``charged``: gaps count as the expert's before them and the tail as the last one's,
            so that counts sum to C; such a slot names row 0, its weight is undefined, and ``slots`` never names it.
        out: index int32 [C], the token of a slot, -1 in gaps and tail; slot weights acc [C], undefined there;
            counts int32 [E]; offsets int32 [E + 1]; slots int32 [M, k], -1 for skipped pairs.
            C = ``slot_capacity(M * k, E, alignment)``.
    """
    index, slot_weights, counts, offsets, slots = out
    pairs, choices = ids.numel(), ids.shape[1]
    keys = ws.take((pairs,), torch.int64)
    ordered, order = ws.take((pairs,), torch.int64), ws.take((pairs,), torch.int64)
    torch.sub(ids.view(pairs), first, out=keys)
    _skip_others(keys, experts, ws)
    torch.sort(keys, stable=True, out=(ordered, order))
    starts = ws.take((experts + 1,), torch.int64)
    numbers = torch.arange(experts + 1, out=ws.take((experts + 1,), torch.int64))
    torch.searchsorted(ordered, numbers, out=starts)  # not bincount, which reads the largest back
    _aligned_offsets(starts, alignment, counts, offsets, ws)

    place = torch.arange(pairs, out=ws.take((pairs,), torch.int64))
    base = ws.take((experts + 1,), torch.int64)
    base.copy_(offsets)
    base.sub_(starts)
    move = torch.index_select(base, 0, ordered, out=ws.take((pairs,), torch.int64))
    place.add_(move)  # the skipped pairs come last, behind every real slot: still below C
    here = torch.lt(ordered, experts, out=ws.take((pairs,), torch.bool))
    absent = ws.take((), torch.int64).fill_(-1)
    token = torch.div(order, choices, rounding_mode="floor", out=ws.take((pairs,), torch.int64))
    torch.where(here, token, absent, out=token)
    narrow = ws.take((pairs,), torch.int32)
    index.fill_(-1)
    index.scatter_(0, place, narrow.copy_(token))
    given = torch.index_select(weights.view(pairs), 0, order, out=ws.take((pairs,), weights.dtype))
    slot_weights.zero_()
    slot_weights.scatter_(0, place, given)
    torch.where(here, place, absent, out=token)
    slots.view(pairs).scatter_(0, order, narrow.copy_(token))
    if padding == CHARGED:
        offsets[experts:].fill_(index.shape[0])
        torch.sub(offsets[1:], offsets[:-1], out=counts)
        index.clamp_(min=0)


def _need_padding(op: str, padding: str) -> None:
    if padding not in (SKIPPED, CHARGED):
        raise DispatchError(f"{op}: there is no such padding", asked=repr(padding), do=f"{SKIPPED!r} or {CHARGED!r}")


def _skip_others(keys: torch.Tensor, experts: int, ws: Workspace) -> None:
    """In place: every key outside [0, experts) becomes ``experts``, so that it is sorted to the end."""
    below = torch.lt(keys, 0, out=ws.take(keys.shape, torch.bool))
    last = ws.take((), torch.int64).fill_(experts)
    keys.clamp_(max=experts)
    torch.where(below, last, keys, out=keys)


def _aligned_offsets(
    starts: torch.Tensor, alignment: int, counts: torch.Tensor, offsets: torch.Tensor, ws: Workspace
) -> None:
    """starts [E + 1] -> counts [E] and offsets [E + 1], each a multiple of ``alignment``."""
    wide = ws.take(counts.shape, torch.int64)
    torch.sub(starts[1:], starts[:-1], out=wide)
    counts.copy_(wide)
    wide.add_(alignment - 1)
    torch.div(wide, alignment, rounding_mode="floor", out=wide)
    wide.mul_(alignment)
    offsets[:1].zero_()
    torch.cumsum(wide, 0, dtype=torch.int32, out=offsets[1:])


# -- experts --------------------------------------------------------------------------------------------


def _grouped_output(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    slot_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Weight | WeightTable,
    down: Weight | WeightTable,
    limit: float,
    layer: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    padding: str = SKIPPED,
) -> Spec:
    _need_padding("grouped_ffn", padding)
    problem = _misfit(rows, scales, index, counts, offsets, gate_up, down, layer)
    if problem is not None:
        raise DispatchError(
            "grouped_ffn: these do not fit together",
            asked=f"rows {list(rows.shape)}, gate_up {gate_up.plan_key}, down {down.plan_key}",
            found=problem,
            do="take index, weights, counts and offsets from one expert_layout or one dispatch",
        )
    return Spec((index.shape[0], rows.shape[1]), dtype or slot_weights.dtype)


def _misfit(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Weight | WeightTable,
    down: Weight | WeightTable,
    layer: torch.Tensor | None,
) -> str | None:
    if len(gate_up.shape) != 3 or len(down.shape) != 3:
        return "the weights are not stacks of experts"
    (experts, twice, width), inner = gate_up.shape, down.shape[2]
    if down.shape[:2] != (experts, width) or twice != 2 * inner or rows.shape[1] != width:
        return f"gate_up {list(gate_up.shape)} and down {list(down.shape)} with rows of {rows.shape[1]}"
    if tuple(counts.shape) != (experts,) or tuple(offsets.shape) != (experts + 1,):
        return f"{counts.numel()} counts and {offsets.numel()} offsets for {experts} experts"
    if (rows.dtype is torch.float8_e4m3fn) != (scales is not None):
        return f"rows of {rows.dtype} {'with' if scales is not None else 'without'} scales"
    if scales is not None and tuple(scales.shape) != (rows.shape[0], -(-width // FP8_BLOCK)):
        return f"scales {list(scales.shape)} for rows {list(rows.shape)}"
    tables = [isinstance(weight, WeightTable) for weight in (gate_up, down)]
    if tables != [layer is not None] * 2:
        return f"{sum(tables)} tables of weights {'with' if layer is not None else 'without'} a layer"
    return None


@op("grouped_ffn", out=_grouped_output, padded=True)
def grouped_ffn(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    slot_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Weight | WeightTable,
    down: Weight | WeightTable,
    limit: float,
    layer: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    padding: str = SKIPPED,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """Every slot through its expert: (swiglu(x . w1_e, x . w3_e) * weight) . w2_e with x = rows[index[slot]].

    The arithmetic is that of ``expert_ffn``, to the bit on the CPU. A slot s belongs to expert e where
    ``offsets[e] <= s < offsets[e] + counts[e]``; other slots, and rows that no slot names, are neither read
    nor written (here: read, but only into rows that are dropped).

    Args:
        rows: [R, D], the carrier, or float8_e4m3fn with ``scales``: then it is not rounded again.
        scales: [R, ceil(D/128)] float32, or None.
        index: int32 [C], slot -> row.
        slot_weights: [C] acc; products and sums are made in its dtype.
        counts, offsets: int32 [E] and [E + 1], on the device.
        gate_up: logical [E, 2I, D], or a table of those with ``layer``.
        down: logical [E, D, I], or a table.
        limit: ``swiglu_limit``.
        layer: int32 [1], which entry of the tables; within them (it is an index).
        dtype: of the result; default acc.
        padding: that of the layout. ``charged`` says that counts sum to C; what such slots give depends on row 0 and
            on weights that may be anything, and nothing reads it.
        out: [C, D]; slots that are not real keep what they held.

    Raises:
        DispatchError: shapes, scales or tables that do not fit one another (found when planning).
    """
    acc, capacity, width, inner = slot_weights.dtype, index.shape[0], rows.shape[1], down.shape[2]
    expert, real = _experts_of_slots(counts, offsets, capacity, ws)
    source = _entry_rows(rows, scales, gate_up, acc, ws)
    chosen = torch.where(real, index, ws.take((), torch.int32).zero_(), out=ws.take((capacity,), torch.int32))
    entry = aligned_rows((capacity, width), acc, ws)
    torch.index_select(source, 0, chosen, out=entry)
    hidden = ws.take((capacity, 2 * inner), acc)
    active = aligned_rows((capacity, inner), acc, ws)
    scratch = ws.take((capacity, inner), acc)
    result = ws.take((capacity, width), acc)
    chosen_products(entry, expert, gate_up, hidden, ws, layer)
    gate, up = hidden.chunk(2, 1)
    swiglu_rows(gate, up, limit, active, scratch)
    active.mul_(slot_weights.view(capacity, 1))
    if down.activation is not None:
        round_fp8_blocks(active, FP8_BLOCK, active, ws)
    chosen_products(active, expert, down, result, ws, layer)
    final = result if out.dtype is acc else ws.take(tuple(out.shape), out.dtype).copy_(result)
    torch.where(real.unsqueeze(1), final, out, out=out)


def _experts_of_slots(
    counts: torch.Tensor, offsets: torch.Tensor, capacity: int, ws: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """counts [E], offsets [E + 1] -> expert int64 [C], always within [0, E), and bool [C]: which slots are real."""
    experts = counts.shape[0]
    slot = torch.arange(capacity, out=ws.take((capacity,), torch.int32))
    expert = ws.take((capacity,), torch.int64)
    ends = ws.take((experts,), torch.int32).copy_(offsets[1:])
    torch.searchsorted(ends, slot, right=True, out=expert)
    expert.clamp_(max=experts - 1)
    last = torch.add(offsets[:-1], counts, out=ws.take((experts,), torch.int32))
    bound = torch.index_select(last, 0, expert, out=ws.take((capacity,), torch.int32))
    return expert, torch.lt(slot, bound, out=ws.take((capacity,), torch.bool))


def _entry_rows(
    rows: torch.Tensor, scales: torch.Tensor | None, gate_up: Weight | WeightTable, acc: torch.dtype, ws: Workspace
) -> torch.Tensor:
    """rows as the first product reads them, [R, D] acc."""
    if scales is None:
        return rounded_rows(widened(rows, ws), gate_up, ws)
    values = ws.take(tuple(rows.shape), acc).copy_(rows)
    full, width = rows.shape[1] // FP8_BLOCK * FP8_BLOCK, rows.shape[1]
    factors = scales if scales.dtype is acc else ws.take(tuple(scales.shape), acc).copy_(scales)
    if full:
        values[:, :full].unflatten(1, (-1, FP8_BLOCK)).mul_(factors[:, : full // FP8_BLOCK].unsqueeze(2))
    if full < width:
        values[:, full:].mul_(factors[:, -1:])
    return values


# -- sum ------------------------------------------------------------------------------------------------


def _sum_output(parts: torch.Tensor, slots: torch.Tensor) -> Spec:
    if parts.dim() != 2 or slots.dim() != 2 or slots.dtype is not torch.int32 or not slots.shape[1]:
        raise DispatchError(
            "expert_sum: parts and slots do not fit",
            asked=f"parts {list(parts.shape)}, slots {slots.dtype}{list(slots.shape)}",
            do="give parts [C, D] and slots int32 [M, k]",
        )
    return Spec((slots.shape[0], parts.shape[1]), accumulator(parts.dtype))


@op("expert_sum", out=_sum_output, padded=True)
def expert_sum(parts: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """A token's slots added up in the order of its choices.

    Args:
        parts: [C, D], what ``grouped_ffn`` gave; rows that ``slots`` does not name may hold anything.
        slots: int32 [M, k]; -1 where a choice has no slot here: it adds +0.
        out: [M, D] acc; zeros for a token without any slot.
    """
    rows, choices = slots.shape
    width, acc = parts.shape[1], out.dtype
    columns = ws.take((choices, rows), torch.int32)
    columns.copy_(slots.t())
    here = torch.ge(columns, 0, out=ws.take((choices, rows), torch.bool))
    columns.clamp_(min=0)
    part = ws.take((rows, width), parts.dtype)
    term = part if parts.dtype is acc else ws.take((rows, width), acc)
    nothing = ws.take((), acc).zero_()
    for choice in range(choices):
        torch.index_select(parts, 0, columns[choice], out=part)
        if term is not part:
            term.copy_(part)
        target = term if choice else out
        torch.where(here[choice].unsqueeze(1), term, nothing, out=target)
        if choice:
            out.add_(term)
