"""The route ``host`` of ``attend``: every token on its own, over the keys that it sees and no others.

The reference works in tiles of the largest number of keys, since a graph's shapes are fixed: 35 calls of ATen a
layer. Here a token's shapes follow from its position and its chosen blocks alone, so K7 holds by construction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from halma.hal.errors import DispatchError
from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import Array, HostArrays, short
from halma.ops.row_store import PLAIN, RowStore


def plain_keys(call: Call) -> str | None:
    """Requirement: rows are kept as they are multiplied, in fp32 or fp64, and so are q and sink."""
    dtype = call["q"].dtype
    if dtype not in (torch.float32, torch.float64) or call["sink"].dtype is not dtype:
        return f"q is {short(dtype)} and sink {short(call['sink'].dtype)}, it takes both in fp32 or fp64"
    for name in ("window", "compressed"):
        store: RowStore | None = call[name]
        if store is not None and (store.format != PLAIN or store.data.dtype is not dtype):
            return f"{name} is kept as {store.format} {short(store.data.dtype)}, it reads plain {short(dtype)}"
    return None


def attend(
    q: torch.Tensor,
    window: RowStore,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    sink: torch.Tensor,
    window_size: int,
    scale: float,
    compressed: RowStore | None = None,
    page_table: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    """See ``attend`` in :mod:`halma.ops.attention`."""
    heads, width = q.shape[1:]
    if chosen is not None and (compressed is None or page_table is None):
        raise DispatchError("attend has chosen blocks and nowhere to read them", do="give compressed and page_table")
    most = window_size + (0 if chosen is None else chosen.shape[1])
    keys, weights = ws.take((most, width), q.dtype), ws.take((heads * most,), q.dtype)
    sums = ws.take((3, heads, 1), q.dtype)
    near = HostArrays(q, window.rows, positions, row_slot, sink.view(heads, 1), keys, weights, sums, out)
    back = np.arange(window_size)
    far = None
    if chosen is not None and compressed is not None and page_table is not None:
        far = HostArrays(chosen, compressed.rows, page_table)
        pitch, page_rows = compressed.row_pitch, compressed.page_rows

    def launch() -> None:
        queries, rows, places, slots, sinks, found, memory, (top, total, extra), results = near()
        with np.errstate(all="ignore"):  # padding rows hold anything
            for token, (position, slot) in enumerate(zip(places.tolist(), slots.tolist(), strict=True)):
                count = min(position + 1, window_size)
                place = (position - back[:count]) % window.page_rows + slot * window.row_pitch
                np.take(rows, place, axis=0, out=found[:count], mode="clip")
                if far is not None:
                    blocks, stored, table = far()
                    block = blocks[token]
                    block = block[block >= 0]
                    place = table[slot, block // page_rows] * pitch + block % page_rows
                    np.take(stored, place, axis=0, out=found[count : count + len(block)], mode="clip")
                    count += len(block)
                scores = memory[: heads * count].reshape(heads, count)
                np.dot(queries[token], found[:count].T, scores)
                _softmax(scores, scale, sinks, top, total, extra)
                np.dot(scores, found[:count], results[token])
                np.divide(results[token], total, out=results[token])

    return launch


def _softmax(scores: Array, scale: float, sink: Array, top: Array, total: Array, extra: Array) -> None:
    """scores [H, N] -> exp(scale * score - top) in place; total [H, 1]: their sum and the sink's term."""
    np.multiply(scores, scale, out=scores)
    np.maximum.reduce(scores, axis=1, keepdims=True, out=top)
    np.subtract(scores, top, out=scores)
    np.exp(scores, out=scores)
    np.add.reduce(scores, axis=1, keepdims=True, out=total)
    # The sink is no part of the maximum: far above it, its term becomes inf and the output 0, as it should.
    np.subtract(sink, top, out=extra)
    np.exp(extra, out=extra)
    np.add(total, extra, out=total)
