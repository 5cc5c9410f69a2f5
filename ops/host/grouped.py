"""The routes ``host`` of ``expert_layout`` and ``rows`` of ``grouped_ffn``: only real slots are worked on.

A launch reads counts and offsets on the host each time it runs, so it is one opaque node of a graph; the reference
has to work through every slot that the shape allows, with a copy of its expert's weights (and of every layer's).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from halma.hal.collectives.expert_rows import CHARGED, SKIPPED
from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import HostArrays, short
from halma.ops.host.experts import Rounding, swiglu_arrays
from halma.ops.linear import aligned_rows
from halma.ops.weight import PLAIN, Weight
from halma.ops.weight_table import WeightTable


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
) -> Callable[[], None]:
    """See ``expert_layout``."""
    pairs, choices = ids.numel(), ids.shape[1]
    arrays = HostArrays(ids.view(pairs), weights.view(pairs), *out[:4], out[4].view(pairs))

    def launch() -> None:
        flat, given, index, slot_weights, counts, offsets, slots = arrays()
        local = flat - first
        here = (local >= 0) & (local < experts)
        order = np.argsort(np.where(here, local, experts), kind="stable")[: int(here.sum())]
        chosen = local[order]
        counts[:] = np.bincount(chosen, minlength=experts)
        offsets[0] = 0
        np.cumsum(-(-counts // alignment) * alignment, out=offsets[1:])
        starts = np.cumsum(counts) - counts
        place = np.arange(len(order)) + (offsets[:-1] - starts)[chosen]
        index[:] = -1
        index[place] = order // choices
        slot_weights[:] = 0
        slot_weights[place] = given[order]
        slots[:] = -1
        slots[order] = place
        if padding == CHARGED:
            offsets[experts] = len(index)
            counts[:] = offsets[1:] - offsets[:-1]
            np.maximum(index, 0, out=index)

    return launch


def plain_in_weights_dtype(call: Call) -> str | None:
    """Requirement: both stacks are stored in the dtype of the sums, and rows are no fp8 payload."""
    acc: torch.dtype = call["slot_weights"].dtype
    for name in ("gate_up", "down"):
        given: Weight | WeightTable = call[name]
        data = (given.layers[0] if isinstance(given, WeightTable) else given).data
        if given.format != PLAIN or data.dtype is not acc:
            return f"{name} is {given.format} {short(data.dtype)}, it multiplies plain {short(acc)}"
    if call["scales"] is not None:
        return "rows are an fp8 payload"
    return None if call["dtype"] in (None, acc) else f"the result is {short(call['dtype'])}, it writes {short(acc)}"


def grouped_rows(
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
) -> Callable[[], None]:
    """See ``grouped_ffn``; every slot is two vector products of its own, so K7 holds by construction."""
    acc, capacity, inner = slot_weights.dtype, index.shape[0], down.shape[2]
    entry = aligned_rows((capacity, rows.shape[1]), acc, ws)
    hidden = ws.take((capacity, 2 * inner), acc)
    active = aligned_rows((capacity, inner), acc, ws)
    scratch = ws.take((capacity, inner), acc)
    round_entry = Rounding(entry, ws) if gate_up.activation else None
    round_active = Rounding(active, ws) if down.activation else None
    arrays = HostArrays(index, slot_weights, counts, offsets, entry, hidden, active, scratch, out)
    source = HostArrays(rows) if rows.dtype is acc else None
    stacks = [HostArrays(one.data, two.data) for one, two in zip(_layers(gate_up), _layers(down), strict=True)]
    chosen = None if layer is None else HostArrays(layer)
    dot = np.dot

    def launch() -> None:
        names, factors, numbers, starts, entries, hiddens, actives, space, outs = arrays()
        first, second = stacks[0 if chosen is None else int(chosen()[0][0])]()
        groups = [(e, int(starts[e]), int(starts[e]) + n) for e, n in enumerate(numbers.tolist()) if n]
        for _, begin, end in groups:
            if source is not None:
                entries[begin:end] = source()[0][names[begin:end]]
            else:
                entry[begin:end].copy_(rows[index[begin:end].long()])
        if round_entry is not None:
            round_entry()
        with np.errstate(all="ignore"):  # a token may hold anything
            for expert, begin, end in groups:
                for slot in range(begin, end):
                    dot(first[expert], entries[slot], hiddens[slot])
                mine = hiddens[begin:end]
                swiglu_arrays(mine[:, :inner], mine[:, inner:], limit, actives[begin:end], space[begin:end])
                np.multiply(actives[begin:end], factors[begin:end, None], out=actives[begin:end])
            if round_active is not None:
                round_active()
            for expert, begin, end in groups:
                for slot in range(begin, end):
                    dot(second[expert], actives[slot], outs[slot])

    return launch


def _layers(weight: Weight | WeightTable) -> tuple[Weight, ...]:
    return weight.layers if isinstance(weight, WeightTable) else (weight,)
