"""Example calls of the ops that read or write a request's state: stores, compressors, the indexer, attention.

Beside :mod:`halma.ops.examples`, which imports this.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.testing.examples import Arguments, OpExample, examples
from halma.hal.workspace import Workspace
from halma.ops.cache import write_rows
from halma.ops.compressor import CompressorState
from halma.ops.draws import Draw, example
from halma.ops.row_store import INDEX_FP4, INDEX_FP8, KV_FP8, PLAIN, RowStore

SLOTS, PAGES, PAGE_ROWS = 8, 24, 16
CAPACITY = 3 * PAGE_ROWS
"""Blocks that a page table of three pages a slot can hold."""


def filled(draw: Draw, pages: int, width: int, tail: int, format: str) -> RowStore:
    """A store whose every row holds something, the null page included."""
    store = RowStore.new(pages, PAGE_ROWS, width, tail, format, torch.float32)
    page = torch.arange(pages).repeat_interleave(PAGE_ROWS)
    row = torch.arange(PAGE_ROWS).repeat(pages)
    write_rows(draw.normal(pages * PAGE_ROWS, width), page, row, store, Workspace())
    return store


def page_table(draw: Draw) -> torch.Tensor:
    """[slots + 1, 3]: distinct pages for slots 1.., the null page for slot 0."""
    table = torch.zeros(SLOTS + 1, 3, dtype=torch.int64)
    table[1:] = draw.permutation(PAGES).view(SLOTS, 3) + 1
    return table


def _null_slots(*positions: int) -> Any:
    """Padding for writers: the rows' slots (or pages) become the null one, their payload anything."""

    def pad(arguments: Arguments, real: int, payload: float) -> None:
        for position, value in enumerate(arguments):
            if position in positions:
                value[real:] = 0
            elif isinstance(value, torch.Tensor) and value.is_floating_point() and position < min(positions):
                value[real:] = payload

    return pad


# -- stores ---------------------------------------------------------------------------------------------


@examples("insert_rows")
def _insert_rows() -> list[OpExample]:
    def build(format: str, width: int, tail: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            place = draw.permutation(PAGES * PAGE_ROWS)[:rows]
            store = RowStore.new(PAGES + 1, PAGE_ROWS, width, tail, format, torch.float32)
            return draw.normal(rows, width), place // PAGE_ROWS + 1, place % PAGE_ROWS, store

        return make

    kinds = ((PLAIN, 40, 8), (KV_FP8, 128, 64), (INDEX_FP4, 128, 64), (INDEX_FP8, 128, 64))
    return [
        example("insert_rows", f, build(f, w, t), state=(3,), null_row=True, padding=_null_slots(1, 2), tolerance=0.0)
        for f, w, t in kinds
    ]


@examples("window_insert")
def _window_insert() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        store = RowStore.new(SLOTS + 1, PAGE_ROWS, 40, 8, PLAIN, torch.float32)
        return draw.normal(rows, 40), draw.ids(rows, below=900), torch.arange(rows) % SLOTS + 1, store

    pad = _null_slots(1, 2)
    return [example("window_insert", "a ring", build, state=(3,), null_row=True, padding=pad, tolerance=0.0)]


@examples("block_insert")
def _block_insert() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        block = draw.ids(rows, below=CAPACITY)
        block[1::3] = -1
        store = RowStore.new(PAGES + 1, PAGE_ROWS, 40, 8, PLAIN, torch.float32)
        return draw.normal(rows, 40), block, torch.arange(rows) % SLOTS + 1, page_table(draw), store

    def pad(arguments: Arguments, real: int, payload: float) -> None:
        arguments[0][real:], arguments[1][real:], arguments[2][real:] = payload, -1, 0

    return [example("block_insert", "some complete", build, state=(4,), null_row=True, padding=pad, tolerance=0.0)]


# -- compressor -----------------------------------------------------------------------------------------


@examples("compressor_insert")
def _compressor_insert() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        state = CompressorState(torch.zeros(SLOTS + 1, 12, 20), torch.zeros(SLOTS + 1, 12, 20))
        place = draw.ids(rows, below=900), torch.arange(rows) % SLOTS + 1
        return draw.normal(rows, 20), draw.normal(rows, 20), draw.normal(4, 20), *place, state

    def pad(arguments: Arguments, real: int, payload: float) -> None:
        arguments[0][real:], arguments[1][real:] = payload, payload
        arguments[3][real:], arguments[4][real:] = 0, 0

    return [example("compressor_insert", "a ring of 12", build, state=(5,), null_row=True, padding=pad)]


@examples("compressor_pool")
def _compressor_pool() -> list[OpExample]:
    def build(ratio: int, overlap: bool, tokens: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            ring, width = 2 * ratio + tokens, 40 if overlap else 20
            state = CompressorState(draw.normal(SLOTS + 1, ring, width), draw.normal(SLOTS + 1, ring, width))
            # Every request completes a block: the rows of the others mean nothing and are not comparable.
            start = draw.ids(rows, below=30) * ratio + ratio - 1
            count, slot = torch.full((rows,), 1), torch.arange(rows) % SLOTS + 1
            return state, start, count, slot, ratio, overlap, tokens, torch.float32

        return make

    return [
        example("compressor_pool", "4 tokens, overlapping", build(4, True, 1), by_row=(1, 2, 3)),
        example("compressor_pool", "16 tokens", build(16, False, 3), by_row=(1, 2, 3)),
    ]


@examples("block_positions")
def _block_positions() -> list[OpExample]:
    return [example("block_positions", "ratio 4", lambda d, n: (d.ids(n, below=99) - 1, 4), by_row=(0,))]


# -- indexer --------------------------------------------------------------------------------------------


@examples("round_index")
def _round_index() -> list[OpExample]:
    def build(format: str) -> Any:
        return lambda draw, rows: (draw.normal(rows, 2, 128), format)

    # A flip of one rounding step where the transform sums in another order.
    return [
        example("round_index", INDEX_FP4, build(INDEX_FP4), by_row=(0,), tolerance=0.35),
        example("round_index", INDEX_FP8, build(INDEX_FP8), by_row=(0,), tolerance=0.07),
        example("round_index", PLAIN, build(PLAIN), by_row=(0,), tolerance=0.0),
    ]


@examples("all_blocks")
def _all_blocks() -> list[OpExample]:
    return [example("all_blocks", "ratio 4", lambda d, n: (d.ids(n, below=300), 4, CAPACITY), by_row=(0,))]


@examples("index_scores")
def _index_scores() -> list[OpExample]:
    def build(format: str) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            keys = filled(draw, PAGES + 1, 128, 64, format)
            place = draw.ids(rows, below=4 * CAPACITY), torch.arange(rows) % SLOTS + 1
            q, weights = draw.normal(rows, 4, 128), draw.normal(rows, 4)
            return q, weights, 0.05, keys, *place, page_table(draw), 4, CAPACITY

        return make

    return [
        example("index_scores", f, build(f), by_row=(0, 1, 4, 5), scales=(0.0, 1e3))
        for f in (PLAIN, INDEX_FP4, INDEX_FP8)
    ]


@examples("top_blocks")
def _top_blocks() -> list[OpExample]:
    def distinct(draw: Draw, rows: int) -> Arguments:
        scores = draw.normal(rows, CAPACITY)
        scores[0, 3:] = float("-inf")
        return scores, 8

    def tied(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, CAPACITY, below=3).float(), 8

    return [
        example("top_blocks", "few visible", distinct, by_row=(0,), scales=()),
        example("top_blocks", "ties go to the lower block", tied, by_row=(0,), scales=()),
    ]


# -- attention ------------------------------------------------------------------------------------------


@examples("attend")
def _attend() -> list[OpExample]:
    def window_only(draw: Draw, rows: int) -> Arguments:
        window = filled(draw, SLOTS + 1, 40, 8, PLAIN)
        place = draw.ids(rows, below=60), torch.arange(rows) % SLOTS + 1
        return draw.normal(rows, 3, 40), window, *place, draw.normal(3), 9, 40**-0.5

    def with_blocks(format: str, width: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            window = filled(draw, SLOTS + 1, width, width // 2, format)
            compressed = filled(draw, PAGES + 1, width, width // 2, format)
            chosen = draw.choices(rows, 7, CAPACITY)
            chosen[:, 2::3] = -1
            place = draw.ids(rows, below=60), torch.arange(rows) % SLOTS + 1
            more = draw.normal(2), 12, width**-0.5, compressed, page_table(draw), chosen
            return draw.normal(rows, 2, width), window, *place, *more

        return make

    rows = (0, 2, 3, 9)
    return [
        example("attend", "window", window_only, by_row=(0, 2, 3)),
        example("attend", "window and chosen blocks", with_blocks(PLAIN, 40), by_row=rows),
        example("attend", "packed rows", with_blocks(KV_FP8, 128), by_row=rows),
    ]
