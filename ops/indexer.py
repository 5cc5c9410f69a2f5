"""Which compressed blocks a row attends to: all that exist, or the best by the indexer's scores."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.cache import gather_pages
from halma.ops.linear import aligned_rows
from halma.ops.quant import accumulator, hadamard, round_fp4_blocks, round_fp8_blocks
from halma.ops.row_store import INDEX_FP4, INDEX_FP8, PLAIN, RowStore
from halma.ops.tiles import ROWS, tile_products
from halma.ops.weight import FP4_BLOCK

_PAGES = 32
"""Pages scored at a time for each row: 2,048 blocks of 64-row pages."""


def _round_output(x: torch.Tensor, format: str) -> Spec:
    width = x.shape[-1]
    if format not in (PLAIN, INDEX_FP4, INDEX_FP8):
        raise DispatchError(
            f"index keys cannot be kept as {format!r}", asked="round_index", found=f"{PLAIN}, {INDEX_FP4}, {INDEX_FP8}"
        )
    if format != PLAIN and (width & (width - 1) or (format == INDEX_FP4 and width < FP4_BLOCK)):
        raise DispatchError(
            f"{format} needs index heads of a power of two, at least {FP4_BLOCK} for fp4",
            asked=f"d = {width}",
            do="check index_head_dim",
        )
    return like(x)


@op("round_index", out=_round_output)
def round_index(x: torch.Tensor, format: str, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [.., d] -> like x: index queries or keys as the format keeps them: Hadamard, then e2m1 or e4m3 rounding.

    One scale per 32 channels for ``index_fp4``, one a row for ``index_fp8``. ``plain`` leaves x as it is: without
    rounding the transform cancels in the scores. Queries and keys must both come through here (ROCm/ATOM#1507).

    Raises:
        DispatchError: no such format, or d does not suit it (found when planning).
    """
    if format == PLAIN:
        out.copy_(x)
        return
    turned = ws.take(x.shape, accumulator(x.dtype))
    hadamard.reference(x, out=turned, ws=ws)
    if format == INDEX_FP4:
        round_fp4_blocks(turned, FP4_BLOCK, out, ws)
    else:
        round_fp8_blocks(turned, x.shape[-1], out, ws)


@op(
    "all_blocks",
    out=lambda positions, ratio, capacity_rows: Spec((positions.shape[0], capacity_rows), torch.int64),
)
def all_blocks(positions: torch.Tensor, ratio: int, capacity_rows: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """positions [M] i64 -> [M, capacity_rows] i64: block w where the row sees it, w < (p + 1) // ratio, else -1."""
    blocks, hidden = _hidden_blocks(positions, ratio, capacity_rows, ws)
    out.copy_(blocks)
    out.masked_fill_(hidden, -1)


def _hidden_blocks(
    positions: torch.Tensor, ratio: int, capacity_rows: int, ws: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> scratch: block numbers [capacity_rows] and bool [M, capacity_rows], where a row does not see the block."""
    count = torch.add(positions, 1, out=ws.take(positions.shape, torch.int64)).floor_divide_(ratio)
    blocks = ws.take((capacity_rows,), torch.int64)
    torch.arange(capacity_rows, out=blocks)
    hidden = ws.take((positions.shape[0], capacity_rows), torch.bool)
    return blocks, torch.ge(blocks, count.unsqueeze(1), out=hidden)


def _score_output(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: RowStore,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    page_table: torch.Tensor,
    ratio: int,
    capacity_rows: int,
) -> Spec:
    found = page_table.shape[1] * keys.page_rows
    if q.dim() != 3 or q.shape[2] != keys.width or weights.shape != q.shape[:2] or capacity_rows > found:
        raise DispatchError(
            "index_scores: the arguments do not fit",
            asked=f"q {list(q.shape)}, weights {list(weights.shape)}, {capacity_rows} blocks",
            found=(f"keys {keys.plan_key}", f"a page table for {found} blocks"),
        )
    return Spec((q.shape[0], capacity_rows), accumulator(q.dtype))


@op("index_scores", out=_score_output)
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: RowStore,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    page_table: torch.Tensor,
    ratio: int,
    capacity_rows: int,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """q [M, H, d], weights [M, H] -> [M, capacity_rows]: ``scale * sum_h weights_h * relu(q_h . K_w)``.

    -inf where the row does not see block w. Products and sums in fp32 (fp64 for fp64).

    Args:
        q: rotated and rounded as the keys are (``round_index``).
        keys: pages of index keys; a block's score is made a page at a time, so it does not depend on the capacity.
        positions, row_slot: int64 [M].
        page_table: int64 [slots + 1, max_pages].

    Raises:
        DispatchError: shapes do not fit, or the page table holds fewer blocks (found when planning).
    """
    for first in range(0, q.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        node = ws.enter("rows")
        try:
            _score_rows(q[rows], weights[rows], scale, keys, row_slot[rows], page_table, out[rows], ws)
        finally:
            ws.leave(node)
    _, hidden = _hidden_blocks(positions, ratio, capacity_rows, ws)
    out.masked_fill_(hidden, float("-inf"))  # also over whatever lies in pages that the row does not own


def _score_rows(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: RowStore,
    row_slot: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    rows, heads, width = q.shape
    dtype = accumulator(q.dtype)
    query = aligned_rows((rows, heads * width), dtype, ws).copy_(q.view(rows, -1)).unflatten(1, (heads, width))
    weight = torch.mul(weights, scale, out=aligned_rows((rows, heads), dtype, ws)).unsqueeze(1)
    pages = ws.take((page_table.shape[1], rows), torch.int64)
    torch.index_select(page_table.t(), 1, row_slot, out=pages)
    capacity, height = out.shape[1], keys.page_rows
    for start in range(0, -(-capacity // height), _PAGES):
        count = min(_PAGES, -(-capacity // height) - start)
        node = ws.enter("pages")
        try:
            found = ws.take((count, rows, height, width), dtype)
            gather_pages(pages[start : start + count].view(-1), keys, found.view(-1, height, width), ws)
            dots = ws.take((count, rows, heads, height), dtype)
            tile_products(query, found.transpose(2, 3), dots)
            dots.relu_()
            scores = ws.take((count, rows, 1, height), dtype)
            tile_products(weight, dots, scores)
            _store_scores(scores.squeeze(2), start * height, out)
        finally:
            ws.leave(node)


def _store_scores(scores: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """scores [pages, M, page_rows] -> out[:, first ..], as far as the capacity goes (it may end inside a page)."""
    height = scores.shape[2]
    length = min(out.shape[1] - first, scores.shape[0] * height)
    whole = length // height
    if whole:
        out[:, first : first + whole * height].unflatten(1, (whole, height)).copy_(scores[:whole].transpose(0, 1))
    if length % height:
        out[:, first + whole * height : first + length].copy_(scores[whole, :, : length % height])


@op("top_blocks", out=lambda scores, k: Spec((scores.shape[0], k), torch.int64))
def top_blocks(scores: torch.Tensor, k: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """scores [M, N] -> [M, k] i64: the k best in ascending order of block, -1 behind them where there are fewer.

    -inf marks a block that does not count. Among equal scores the lower block wins: relu gives exact zeros, so
    ties are common.
    """
    rows, blocks = scores.shape
    kept = min(k, blocks)
    values, order = ws.take(scores.shape, scores.dtype), ws.take(scores.shape, torch.int64)
    torch.sort(scores, dim=1, descending=True, stable=True, out=(values, order))
    none = torch.isneginf(values[:, :kept], out=ws.take((rows, kept), torch.bool))
    best = ws.take((rows, kept), torch.int64).copy_(order[:, :kept])
    best.masked_fill_(none, blocks)
    ranked = out if kept == k else ws.take((rows, kept), torch.int64)
    torch.sort(best, dim=1, stable=True, out=(ranked, order[:, :kept]))
    beyond = torch.eq(ranked, blocks, out=none)
    ranked.masked_fill_(beyond, -1)
    if kept < k:
        out.fill_(-1)
        out[:, :kept].copy_(ranked)
