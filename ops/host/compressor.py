"""The routes ``host`` of the compressor: a block is pooled when it is complete, and not on every step.

A graph cannot branch, so the reference pools on every step; with one token a step a block is complete on one
step in four or in 128. Every block is pooled alone, so K7 holds by construction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.compressor import CompressorState, check_insert
from halma.ops.host.arrays import Array, HostArrays, short


def plain_values(call: Call) -> str | None:
    """Requirement: values, gates and ape come in the state's type."""
    wanted = call["state"].values.dtype
    for name in ("values", "gates", "ape"):
        if call[name].dtype is not wanted:
            return f"{name} is {short(call[name].dtype)}, it stores {short(wanted)}"
    return None


def compressor_insert(
    values: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    state: CompressorState,
    *,
    ws: Workspace,
) -> Callable[[], None]:
    """See ``compressor_insert`` in :mod:`halma.ops.compressor`."""
    check_insert(values, gates, ape, state)
    arrays = HostArrays(values, gates, ape, positions, row_slot, state.values, state.gates)
    ring, ratio = state.ring, ape.shape[0]

    def launch() -> None:
        fresh, logits, bias, places, slots, kept_values, kept_gates = arrays()
        with np.errstate(all="ignore"):  # padding rows hold anything
            for row, (position, slot) in enumerate(zip(places.tolist(), slots.tolist(), strict=True)):
                kept_values[slot, position % ring] = fresh[row]
                np.add(logits[row], bias[position % ratio], out=kept_gates[slot, position % ring])

    return launch


def compressor_pool(
    state: CompressorState,
    start: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    ratio: int,
    overlap: bool,
    query_len: int,
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> Callable[[], None]:
    """See ``compressor_pool`` in :mod:`halma.ops.compressor`; rows of open blocks are zero."""
    pooled, block = out
    dtype, width = state.values.dtype, pooled.shape[1]
    rows = pooled if pooled.dtype is dtype else ws.take(pooled.shape, dtype)
    pool = _Pool(state, ratio, overlap, width, ws)
    arrays = HostArrays(start, count, slot, block.view(slot.shape[0], -1), rows)

    def launch() -> None:
        starts, counts, slots, numbers, results = arrays()
        each = numbers.shape[1]
        for request, (first, length, place) in enumerate(
            zip(starts.tolist(), counts.tolist(), slots.tolist(), strict=True)
        ):
            complete = (first + length) // ratio
            for candidate in range(each):
                number = first // ratio + candidate
                row = results[request * each + candidate]
                if number < complete:
                    numbers[request, candidate] = number
                    pool(place, number, row)
                else:
                    numbers[request, candidate] = -1
                    row.fill(0.0)
        if rows is not pooled:
            pooled.copy_(rows)

    return launch


class _Pool:
    """Pools one block at a time: per channel the softmax of its tokens' gates times their values.

    With ``overlap`` a token's row holds two halves: the previous block's tokens give the first, the block's own
    the second. Counted in half rows, token t's halves are 2t and 2t + 1.
    """

    def __init__(self, state: CompressorState, ratio: int, overlap: bool, width: int, ws: Workspace) -> None:
        self._ratio, self._halves = ratio, 2 if overlap else 1
        self._ring = state.ring * self._halves
        own = np.arange(ratio)
        self._steps = np.concatenate([(own - ratio) * 2, own * 2 + 1]) if overlap else own
        shape, dtype = (len(self._steps), width), state.values.dtype
        self._state = HostArrays(state.values.view(-1, width), state.gates.view(-1, width))
        self._scratch = HostArrays(ws.take(shape, dtype), ws.take(shape, dtype), ws.take((3, width), dtype))

    def __call__(self, slot: int, block: int, out: Array) -> None:
        all_values, all_gates = self._state()
        values, gates, sums = self._scratch()
        steps = self._steps + block * self._ratio * self._halves
        # Block 0 has no previous block: its tokens' gates become -inf below, and any finite value will do.
        place = np.maximum(steps, 0) % self._ring + slot * self._ring
        np.take(all_values, place, axis=0, out=values, mode="clip")
        np.take(all_gates, place, axis=0, out=gates, mode="clip")
        if steps[0] < 0:
            gates[: self._ratio] = -np.inf
        top, total, mixed = sums
        with np.errstate(all="ignore"):
            np.maximum.reduce(gates, axis=0, out=top)
            np.subtract(gates, top, out=gates)
            np.exp(gates, out=gates)
            np.add.reduce(gates, axis=0, out=total)
            np.multiply(gates, values, out=gates)
            np.add.reduce(gates, axis=0, out=mixed)
            np.divide(mixed, total, out=out)
