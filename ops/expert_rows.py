"""The route ``rows`` of ``expert_ffn``: on a CPU, multiply where the chosen experts lie instead of copying them.

The launch reads the ids on the host each time it runs, so it is one opaque node of a graph. A copy of the
chosen weights, as in the reference, costs more than the products themselves (34 of 234 us a layer of the
tiny model at one token, against 80 us in all here).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch

from halma.hal.dispatch import Call
from halma.hal.workspace import ALIGNMENT, Workspace
from halma.ops.experts import sum_of_choices, swiglu_rows
from halma.ops.linear import ROW_ALIGNMENT, aligned_rows
from halma.ops.quant import accumulator, round_fp8_blocks
from halma.ops.weight import FP8_BLOCK, PLAIN, Weight

_stacks: weakref.WeakKeyDictionary[Weight, tuple[torch.Tensor, ...]] = weakref.WeakKeyDictionary()
"""The experts of a stack as views: making one costs more than a microsecond."""


def _experts_of(stack: Weight) -> tuple[torch.Tensor, ...]:
    views = _stacks.get(stack)
    if views is None:
        views = _stacks[stack] = stack.data.unbind(0)
    return views


def plain_in_accumulator(call: Call) -> str | None:
    """Requirement: both stacks are stored in the dtype of the sum, so that a product needs no conversion."""
    acc = accumulator(call["x"].dtype)
    for name in ("gate_up", "down"):
        weight: Weight = call[name]
        if weight.format != PLAIN or weight.data.dtype is not acc:
            return f"{name} is {weight.format} {_short(weight.data.dtype)}, it multiplies plain {_short(acc)}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Rounding:
    """Rounds a tensor in place to e4m3 per 128 channels, again and again, in scratch taken once.

    A launch may not take from the workspace, so it stands in for it: the n-th take of every run is one view.
    """

    def __init__(self, target: torch.Tensor, ws: Workspace) -> None:
        self._target = target
        # Rounding holds at most four tensors like its input at a time, and its scales.
        self._memory = ws.take((5 * target.numel() * target.itemsize + 16 * ALIGNMENT,), torch.uint8)
        self._views: list[torch.Tensor] = []
        self._next = 0
        self._used = 0

    def __call__(self) -> None:
        self._next = 0
        round_fp8_blocks(self._target, FP8_BLOCK, self._target, cast(Workspace, self))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`Workspace.take`; the same shapes come in the same order every time."""
        position, self._next = self._next, self._next + 1
        if position == len(self._views):
            nbytes = math.prod(shape) * dtype.itemsize
            self._views.append(self._memory[self._used : self._used + nbytes].view(dtype).view(tuple(shape)))
            self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._views[position]


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
    first, second = _experts_of(gate_up), _experts_of(down)
    hidden = ws.take((pairs, 2 * inner), acc)
    active = aligned_rows((pairs, inner), acc, ws)
    scratch = ws.take((pairs, inner), acc)
    result = ws.take((pairs, width), acc)
    offsets = (x.storage_offset() | x.stride(0)) * acc.itemsize
    direct = x.dtype is acc and gate_up.activation is None and offsets % ROW_ALIGNMENT == 0
    entry = x if direct else aligned_rows((rows, width), acc, ws)
    round_entry = _Rounding(entry, ws) if gate_up.activation else None
    round_active = _Rounding(active, ws) if down.activation else None
    factors, flat = weights.view(pairs, 1), ids.view(pairs)
    entries, hiddens, actives, results = (t.unbind(0) for t in (entry, hidden, active, result))
    sources = [row for row in entries for _ in range(choices)]
    parts = result.view(rows, choices, width).unbind(1)
    gate, up = hidden.chunk(2, 1)
    product = torch.mv

    def launch() -> None:
        chosen = flat.tolist()
        if entry is not x:
            entry.copy_(x)
        if round_entry is not None:
            round_entry()
        for expert, source, target in zip(chosen, sources, hiddens, strict=True):
            product(first[expert], source, out=target)
        swiglu_rows(gate, up, limit, active, scratch)
        active.mul_(factors)
        if round_active is not None:
            round_active()
        for expert, source, target in zip(chosen, actives, results, strict=True):
            product(second[expert], source, out=target)
        sum_of_choices(parts, out)

    return launch
