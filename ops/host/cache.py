"""The routes ``host`` of ``window_insert`` and ``block_insert``: rows written one by one where they belong."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halma.hal.errors import DispatchError
from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import HostArrays, short
from halma.ops.row_store import PLAIN, RowStore


def plain_store(call: Call) -> str | None:
    """Requirement: rows are stored as they come, in a type that numpy knows."""
    rows, store = call["kv"] if call.op == "window_insert" else call["rows"], call["store"]
    if store.format != PLAIN or store.data.dtype is not rows.dtype or rows.dtype is torch.bfloat16:
        return f"the store is {store.format} {short(store.data.dtype)} for rows of {short(rows.dtype)}, it copies plain"
    return None


def _check(rows: torch.Tensor, store: RowStore) -> None:
    if rows.shape[-1] != store.width:
        raise DispatchError(
            "these rows do not fit the store", asked=f"rows {list(rows.shape)}", found=f"store {store.plan_key}"
        )


def window_insert(
    kv: torch.Tensor, positions: torch.Tensor, row_slot: torch.Tensor, store: RowStore, *, ws: Workspace
) -> Callable[[], None]:
    """See ``window_insert`` in :mod:`halma.ops.cache`."""
    _check(kv, store)
    arrays = HostArrays(kv, positions, row_slot, store.rows)

    def launch() -> None:
        rows, places, slots, target = arrays()
        for row, position, slot in zip(rows, places.tolist(), slots.tolist(), strict=True):
            target[slot * store.row_pitch + position % store.page_rows] = row

    return launch


def block_insert(
    rows: torch.Tensor,
    block: torch.Tensor,
    slot: torch.Tensor,
    page_table: torch.Tensor,
    store: RowStore,
    *,
    ws: Workspace,
) -> Callable[[], None]:
    """See ``block_insert`` in :mod:`halma.ops.cache`; nothing is written for a block of -1."""
    _check(rows, store)
    if block.shape[0] != rows.shape[0] or rows.shape[0] % slot.shape[0]:
        raise DispatchError(
            "block_insert: these rows and blocks do not fit",
            asked=f"rows {list(rows.shape)}, block {list(block.shape)} for {slot.shape[0]} requests",
        )
    each = rows.shape[0] // slot.shape[0]
    arrays = HostArrays(rows, block, slot, page_table, store.rows)

    def launch() -> None:
        given, blocks, slots, table, target = arrays()
        owners = slots.tolist()
        for index, number in enumerate(blocks.tolist()):
            if number >= 0:
                page = int(table[owners[index // each], number // store.page_rows])
                target[page * store.row_pitch + number % store.page_rows] = given[index]

    return launch
