"""The routes ``rows`` of ``expert_ffn``, ``host`` of ``swiglu`` and of ``swiglu_fp8``: experts are multiplied where
they lie, not copied.

The launch reads the ids on the host each time it runs, so it is one opaque node of a graph. A copy of the
chosen weights, as in the reference, costs more than the products themselves (34 of 234 us a layer of the
tiny model at one token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch

from halma.hal.routes import Call
from halma.hal.workspace import ALIGNMENT, Workspace
from halma.ops.host.arrays import Array, HostArrays, short
from halma.ops.linear import ROW_ALIGNMENT, aligned_rows
from halma.ops.quant import E4M3_FLOOR, E4M3_LIMIT, accumulator, round_fp8_blocks, scaled
from halma.ops.weight import FP8_BLOCK, PLAIN, Weight


def plain_in_accumulator(call: Call) -> str | None:
    """Requirement: both stacks are stored in the dtype of the sum, so that a product needs no conversion."""
    acc = accumulator(call["x"].dtype)
    for name in ("gate_up", "down"):
        weight: Weight = call[name]
        if weight.format != PLAIN or weight.data.dtype is not acc:
            return f"{name} is {weight.format} {short(weight.data.dtype)}, it multiplies plain {short(acc)}"
    return None


class Kept:
    """Scratch for rounding ``target`` again and again, taken once.

    A launch may not take from the workspace, so it stands in for it: the n-th take of every run is one view.
    """

    def __init__(self, target: torch.Tensor, ws: Workspace) -> None:
        # Rounding holds at most four tensors like its input at a time, and its scales.
        self._memory = ws.take((5 * target.numel() * target.itemsize + 16 * ALIGNMENT,), torch.uint8)
        self._views: list[torch.Tensor] = []
        self._next = 0
        self._used = 0

    def again(self) -> Workspace:
        """Itself, for the next run."""
        self._next = 0
        return cast(Workspace, self)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`Workspace.take`; the same shapes come in the same order every time."""
        position, self._next = self._next, self._next + 1
        if position == len(self._views):
            nbytes = math.prod(shape) * dtype.itemsize
            self._views.append(self._memory[self._used : self._used + nbytes].view(dtype).view(tuple(shape)))
            self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._views[position]


class Rounding(Kept):
    """Rounds a tensor in place to e4m3 per 128 channels, again and again."""

    def __init__(self, target: torch.Tensor, ws: Workspace) -> None:
        super().__init__(target, ws)
        self._target = target

    def __call__(self) -> None:
        round_fp8_blocks(self._target, FP8_BLOCK, self._target, self.again())


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    limit: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    """See ``expert_ffn``; every (token, expert) is two vector products of its own, so K7 holds by construction."""
    rows, width = x.shape
    choices, inner, acc = ids.shape[1], down.shape[2], out.dtype
    pairs = rows * choices
    hidden = ws.take((pairs, 2 * inner), acc)
    active = aligned_rows((pairs, inner), acc, ws)
    scratch = ws.take((pairs, inner), acc)
    result = ws.take((pairs, width), acc)
    offsets = (x.storage_offset() | x.stride(0)) * acc.itemsize
    direct = x.dtype is acc and gate_up.activation is None and offsets % ROW_ALIGNMENT == 0
    entry = x if direct else aligned_rows((rows, width), acc, ws)
    round_entry = Rounding(entry, ws) if gate_up.activation else None
    round_active = Rounding(active, ws) if down.activation else None
    arrays = HostArrays(ids.view(pairs), weights.view(pairs, 1), entry, hidden, active, scratch, result, out)
    stacks = HostArrays(gate_up.data, down.data)
    dot = np.dot

    def launch() -> None:
        flat, factors, entries, hiddens, actives, space, results, total = arrays()
        first, second = stacks()
        chosen = flat.tolist()
        if entry is not x:
            entry.copy_(x)
        if round_entry is not None:
            round_entry()
        with np.errstate(all="ignore"):  # padding rows hold anything
            for pair, expert in enumerate(chosen):
                dot(first[expert], entries[pair // choices], hiddens[pair])
            swiglu_arrays(hiddens[:, :inner], hiddens[:, inner:], limit, actives, space)
            np.multiply(actives, factors, out=actives)
            if round_active is not None:
                round_active()
            for pair, expert in enumerate(chosen):
                dot(second[expert], actives[pair], results[pair])
            _sum_of_choices(results.reshape(rows, choices, width), total)

    return launch


def fp32_or_fp64(call: Call) -> str | None:
    """Requirement: no conversion is needed."""
    dtype = call["gate_up"].dtype
    return None if dtype in (torch.float32, torch.float64) else f"gate_up is {short(dtype)}, it computes fp32 or fp64"


def swiglu(gate_up: torch.Tensor, limit: float, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    """See ``swiglu`` in :mod:`halma.ops.experts`."""
    inner = out.shape[1]
    arrays = HostArrays(gate_up, out, ws.take(out.shape, out.dtype))

    def launch() -> None:
        both, result, scratch = arrays()
        with np.errstate(all="ignore"):  # padding rows hold anything
            swiglu_arrays(both[:, :inner], both[:, inner:], limit, result, scratch)

    return launch


def swiglu_fp8(
    gate_up: torch.Tensor, limit: float, *, out: tuple[torch.Tensor, torch.Tensor], ws: Workspace
) -> Callable[[], None]:
    """See ``swiglu_fp8`` in :mod:`halma.ops.experts`: ``swiglu`` above and the reference's rounding."""
    codes, scales = out
    active = ws.take(tuple(codes.shape), gate_up.dtype)
    activate, scratch = swiglu(gate_up, limit, out=active, ws=ws), Kept(active, ws)

    def launch() -> None:
        activate()
        values, _ = scaled(active, FP8_BLOCK, E4M3_LIMIT, E4M3_FLOOR, scratch.again(), scales)
        codes.copy_(values)

    return launch


def swiglu_arrays(gate: Array, up: Array, limit: float, out: Array, scratch: Array) -> None:
    """gate, up [P, I] -> out [P, I]: silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    np.minimum(gate, limit, out=out)
    np.negative(out, out=scratch)
    np.exp(scratch, out=scratch)
    np.add(scratch, 1.0, out=scratch)
    np.divide(out, scratch, out=out)
    np.minimum(up, limit, out=scratch)
    np.maximum(scratch, -limit, out=scratch)
    np.multiply(out, scratch, out=out)


def _sum_of_choices(parts: Array, out: Array) -> None:
    """parts [M, k, D] -> out [M, D], added in the order of the choices."""
    out[:] = parts[:, 0]
    for choice in range(1, parts.shape[1]):
        np.add(out, parts[:, choice], out=out)
