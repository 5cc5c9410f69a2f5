"""Attention over the window and the chosen compressed rows; one latent row is key and value of all heads."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.cache import find_blocks, gather_rows
from halma.ops.linear import ROW_ALIGNMENT, aligned_rows
from halma.ops.quant import accumulator
from halma.ops.row_store import RowStore
from halma.ops.tiles import ROWS, tile_products

TILE = 64
"""Keys whose weighted sum is one product; tiles are added one after another, so more tiles change no bits."""


def _attend_output(
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
) -> Spec:
    problems = []
    if q.dim() != 3 or q.shape[2] != window.width or sink.shape != q.shape[1:2]:
        problems.append(f"q {list(q.shape)} and sink {list(sink.shape)} for rows of {window.width} channels")
    if window_size > window.page_rows:
        problems.append(f"a window of {window_size} in a ring of {window.page_rows} rows")
    if chosen is not None:
        if compressed is None or page_table is None:
            problems.append("chosen blocks without the store and the page table to find them in")
        elif compressed.width != window.width or chosen.shape[0] != q.shape[0]:
            problems.append(f"chosen {list(chosen.shape)} from rows of {compressed.width} channels")
    if problems:
        raise DispatchError("attend: the arguments do not fit", found=problems)
    return like(q)


@op("attend", out=_attend_output)
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
) -> None:
    """q [M, H, d] -> [M, H, d]: softmax(scale * q . k) over the row's keys, which are their own values.

    Keys of a row at position p: window rows of positions ``max(0, p - window_size + 1) .. p``, and its chosen
    blocks. Each head's ``exp(sink)`` joins the denominator only. All sums in fp32 (fp64 for fp64).

    Args:
        window: one page a slot, position p in row ``p % page_rows``; the step's own rows are written already.
        positions, row_slot: int64 [M].
        sink: [H].
        compressed, page_table: where block w of a slot lies (see ``block_insert``).
        chosen: int64 [M, K], -1 for none, in any place; None where the layer has no compressed rows.

    Raises:
        DispatchError: shapes do not fit (found when planning).
    """
    for first in range(0, q.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        node = ws.enter("rows")
        try:
            blocks = None if chosen is None else (compressed, page_table, chosen[rows])
            keys, hidden = _keys(window, positions[rows], row_slot[rows], window_size, blocks, accumulator(q.dtype), ws)
            _weigh(q[rows], keys, hidden, sink, scale, out[rows], ws)
        finally:
            ws.leave(node)


def _keys(
    window: RowStore,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    window_size: int,
    blocks: tuple[RowStore | None, torch.Tensor | None, torch.Tensor] | None,
    dtype: torch.dtype,
    ws: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> scratch: keys [tiles, M, TILE, d], finite where the row's own are; bool [tiles, M, TILE], where one is hidden.

    The window comes first, newest position first: the order does not depend on the size of the ring.
    """
    near = -(-window_size // TILE)
    far = 0 if blocks is None else -(-blocks[2].shape[1] // TILE)
    rows = positions.shape[0]
    place = ws.take((near + far, rows, TILE), torch.int64)
    hidden = ws.take(place.shape, torch.bool)
    keys = ws.take((near + far, rows, TILE, window.width), dtype)
    slot = row_slot.view(1, rows, 1)
    back = ws.take((near * TILE,), torch.int64)
    torch.arange(0, -near * TILE, -1, out=back)
    if window_size < near * TILE:
        back[window_size:].fill_(1 - window_size)
    ring = place[:near]
    torch.add(positions.view(1, rows, 1), back.view(near, 1, TILE), out=ring)
    if far:
        _into_tiles(blocks[2], place[near:])  # type: ignore[index]
    torch.lt(place, 0, out=hidden)
    if window_size < near * TILE:
        hidden[near - 1, :, window_size - near * TILE :].fill_(True)
    # A hidden window place reads the oldest row that the window holds, never a row that nobody wrote.
    place.clamp_min_(0)
    gather_rows(slot, ring.remainder_(window.page_rows), window, keys[:near], ws)
    if blocks is not None and far:
        store, table, _ = blocks
        if store is None or table is None:
            raise DispatchError(
                "attend has chosen blocks and nowhere to read them", do="give compressed and page_table"
            )
        page, row = find_blocks(place[near:], slot, table, store, ws)
        gather_rows(page, row, store, keys[near:], ws)
        keys[near:].masked_fill_(hidden[near:].unsqueeze(-1), 0.0)  # may be NaN, and 0 * NaN is NaN
    return keys, hidden


def _into_tiles(chosen: torch.Tensor, out: torch.Tensor) -> None:
    """chosen [M, K] -> out [ceil(K / TILE), M, TILE], -1 behind the last."""
    count = chosen.shape[1]
    whole = count // TILE
    if count % TILE:
        out[whole].fill_(-1)
        out[whole, :, : count % TILE].copy_(chosen[:, whole * TILE :])
    if whole:
        out[:whole].copy_(chosen[:, : whole * TILE].unflatten(1, (whole, TILE)).transpose(0, 1))


def _weigh(
    q: torch.Tensor,
    keys: torch.Tensor,
    hidden: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """Softmax and weighted sum in two passes: the maximum is exact in any order, the sums go tile by tile."""
    tiles, rows, _, width = keys.shape
    heads, dtype = q.shape[1], keys.dtype
    aligned = heads * width * dtype.itemsize % ROW_ALIGNMENT == 0
    if not aligned or q.dtype != dtype:
        q = aligned_rows((rows, heads * width), dtype, ws).copy_(q.view(rows, -1)).unflatten(1, (heads, width))
    # Scores and, behind them, the denominator's terms (the sink first, then one sum a tile): one exp does both.
    size = tiles * rows * heads * TILE
    memory = ws.take((size + (tiles + 1) * rows * heads,), dtype)
    scores = memory[:size].view(tiles, rows, heads, TILE)
    terms = memory[size:].view(tiles + 1, rows, heads)
    tile_products(q, keys.transpose(2, 3), scores, scale)
    scores.masked_fill_(hidden.unsqueeze(2), float("-inf"))
    top = torch.amax(scores, (0, 3), keepdim=True, out=ws.take((1, rows, heads, 1), dtype))
    scores.sub_(top)
    # The sink is no part of the maximum: should it be far above, its term becomes inf and the output 0, as it should.
    torch.sub(sink, top.view(rows, heads), out=terms[0])
    memory[: size + rows * heads].exp_()
    torch.sum(scores, -1, out=terms[1:])
    terms.cumsum_(0)  # in sequence, so hidden tiles at the end add exact zeros
    direct = aligned and out.dtype == dtype
    mixed = out if direct else aligned_rows((rows, heads * width), dtype, ws).unflatten(1, (heads, width))
    torch.bmm(scores[0], keys[0], out=mixed)
    for tile in range(1, tiles):
        mixed.baddbmm_(scores[tile], keys[tile])
    mixed.div_(terms[tiles].unsqueeze(-1))
    if not direct:
        out.copy_(mixed)
