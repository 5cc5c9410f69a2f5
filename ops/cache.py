"""Writing rows into stores and reading them back: rings by position, pages by block."""

from __future__ import annotations

import torch

from halma.hal.dispatch import op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.row_codec import decode_rows, encode_rows
from halma.ops.row_store import PLAIN, RowStore


@op("insert_rows")
def insert_rows(rows: torch.Tensor, page: torch.Tensor, row: torch.Tensor, store: RowStore, *, ws: Workspace) -> None:
    """rows [N, width], page and row [N] i64 -> row ``row[i]`` of page ``page[i]``, encoded into the store's format.

    Several rows for the null page may collide there; anywhere else places are distinct.

    Raises:
        DispatchError: the rows are not of the store's width.
    """
    write_rows(rows, page, row, store, ws)


@op("window_insert")
def window_insert(
    kv: torch.Tensor, positions: torch.Tensor, row_slot: torch.Tensor, store: RowStore, *, ws: Workspace
) -> None:
    """kv [M, d], positions and row_slot [M] i64 -> position p to row ``p % page_rows`` of its slot's page.

    Raises:
        DispatchError: the rows are not of the store's width.
    """
    row = torch.remainder(positions, store.page_rows, out=ws.take(positions.shape, torch.int64))
    write_rows(kv, row_slot, row, store, ws)


@op("block_insert")
def block_insert(
    rows: torch.Tensor,
    block: torch.Tensor,
    slot: torch.Tensor,
    page_table: torch.Tensor,
    store: RowStore,
    *,
    ws: Workspace,
) -> None:
    """rows [R*nb, d], block [R*nb] i64 (-1: none, goes to the null page), slot [R] -> pages of the page table.

    Args:
        page_table: int64 [slots + 1, max_pages]; block w of a slot is row ``w % page_rows`` of page
            ``page_table[slot, w // page_rows]``.

    Raises:
        DispatchError: the rows are not of the store's width, or their number is no multiple of the requests'.
    """
    if block.shape[0] != rows.shape[0] or rows.shape[0] % slot.shape[0]:
        raise DispatchError(
            "block_insert: these rows and blocks do not fit",
            asked=f"rows {list(rows.shape)}, block {list(block.shape)} for {slot.shape[0]} requests",
        )
    blocks = block.view(slot.shape[0], -1)
    none = torch.lt(blocks, 0, out=ws.take(blocks.shape, torch.bool))
    known = torch.clamp_min(blocks, 0, out=ws.take(blocks.shape, torch.int64))
    page, row = find_blocks(known, slot.unsqueeze(1), page_table, store, ws)
    page.masked_fill_(none, 0)
    write_rows(rows, page.view(-1), row.view(-1), store, ws)


def write_rows(rows: torch.Tensor, page: torch.Tensor, row: torch.Tensor, store: RowStore, ws: Workspace) -> None:
    """See ``insert_rows``."""
    if rows.shape[-1] != store.width:
        raise DispatchError(
            "these rows do not fit the store", asked=f"rows {list(rows.shape)}", found=f"store {store.plan_key}"
        )
    place = torch.add(row, page, alpha=store.row_pitch, out=ws.take(row.shape, torch.int64))
    if store.format == PLAIN:
        if rows.dtype != store.data.dtype:
            rows = ws.take(rows.shape, store.data.dtype).copy_(rows)
        store.rows.index_copy_(0, place, rows)
        return
    data, scales = encode_rows(rows, store, ws)
    store.rows.index_copy_(0, place, data)
    torch.add(row, page, alpha=store.scale_pitch, out=place)
    store.scales.index_copy_(0, place, scales)


def find_blocks(
    block: torch.Tensor, slot: torch.Tensor, page_table: torch.Tensor, store: RowStore, ws: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """block [..] i64, all >= 0, slot broadcastable to it -> scratch [..]: page and row of each block."""
    entry = torch.floor_divide(block, store.page_rows, out=ws.take(block.shape, torch.int64))
    entry.add_(slot, alpha=page_table.shape[1])
    page = ws.take(block.shape, torch.int64)
    torch.index_select(page_table.view(-1), 0, entry.view(-1), out=page.view(-1))
    return page, torch.remainder(block, store.page_rows, out=entry)


def gather_rows(page: torch.Tensor, row: torch.Tensor, store: RowStore, out: torch.Tensor, ws: Workspace) -> None:
    """row [..] i64, page broadcastable to it -> out [.., width], contiguous, fp32 or fp64: decoded rows.

    Rows that nobody wrote come out as garbage, perhaps NaN: who may meet them masks them.
    """
    place = torch.add(row, page, alpha=store.row_pitch, out=ws.take(row.shape, torch.int64))
    flat = out.view(-1, store.width)
    count = flat.shape[0]
    if store.format == PLAIN:
        direct = store.data.dtype == out.dtype
        found = flat if direct else ws.take(flat.shape, store.data.dtype)
        torch.index_select(store.rows, 0, place.view(-1), out=found)
        if not direct:
            flat.copy_(found)
        return
    data = ws.take((count, store.layout.data_bytes), torch.uint8)
    torch.index_select(store.rows, 0, place.view(-1), out=data)
    scales = ws.take((count, store.layout.scale_bytes), torch.uint8)
    torch.add(row, page, alpha=store.scale_pitch, out=place)
    torch.index_select(store.scales, 0, place.view(-1), out=scales)
    decode_rows(data, scales, store, flat, ws)


def gather_pages(page: torch.Tensor, store: RowStore, out: torch.Tensor, ws: Workspace) -> None:
    """page [N] i64 -> out [N, page_rows, width], contiguous, fp32 or fp64: whole pages, decoded."""
    if store.format == PLAIN:
        direct = store.data.dtype == out.dtype
        found = out if direct else ws.take(out.shape, store.data.dtype)
        torch.index_select(store.data, 0, page, out=found)
        if not direct:
            out.copy_(found)
        return
    layout, rows = store.layout, store.page_rows
    whole = ws.take((page.shape[0], store.data.shape[1]), torch.uint8)
    torch.index_select(store.data, 0, page, out=whole)
    split = rows * layout.data_bytes
    data = whole[:, :split].unflatten(1, (rows, layout.data_bytes))
    scales = whole[:, split : split + rows * layout.scale_bytes].unflatten(1, (rows, layout.scale_bytes))
    decode_rows(data, scales, store, out, ws)
