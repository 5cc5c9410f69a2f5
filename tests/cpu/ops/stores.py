"""A small state of one layer with everything unwritten poisoned, and what it should answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.row_store import RowStore
from tests.cpu.ops.checks import fresh_ops, poisoned, tensors_of

SLOTS = 3
"""Request slots besides the null slot."""


_shared = fresh_ops()


def again(name: str, *args: Any) -> Any:
    """As ``run`` of the checks, in one workspace for all calls: plans are kept, which makes long loops bearable."""
    _shared.workspace.start()
    result = getattr(_shared, name)(*args)
    copies = [tensor.clone() for tensor in tensors_of(result)]
    return copies[0] if len(copies) == 1 else tuple(copies) or None


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Seeded normal numbers, drawn in fp64 and rounded once."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def poisoned_store(pages: int, page_rows: int, width: int, tail: int, format: str, dtype: torch.dtype) -> RowStore:
    """A store in which every byte is the worst it can be."""
    store = RowStore.new(pages, page_rows, width, tail, format, dtype)
    store.data.copy_(poisoned(store.data.shape, dtype) if format == "plain" else torch.full_like(store.data, 0xFF))
    return store


def shuffled_table(pages_per_slot: int, seed: int = 7) -> torch.Tensor:
    """[SLOTS + 1, pages_per_slot]: every slot's pages in an order of their own; the null slot has page 0 only."""
    order = torch.randperm(SLOTS * pages_per_slot, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(SLOTS + 1, pages_per_slot, dtype=torch.int64)
    table[1:] = order.view(SLOTS, pages_per_slot)
    return table


@dataclasses.dataclass(eq=False)
class Layer:
    """Window and compressed rows of one layer for requests of ``length`` tokens, slot s holding ``rows(s)``.

    ``kv[s]`` and ``blocks[s]`` are what the stores hold after rounding, in fp64.
    """

    window: RowStore
    compressed: RowStore
    table: torch.Tensor
    kv: list[torch.Tensor]
    blocks: list[torch.Tensor]


def filled_layer(
    *,
    length: int,
    count: int,
    width: int = 48,
    tail: int = 8,
    ring: int = 24,
    page_rows: int = 8,
    pages: int = 16,
    format: str = "plain",
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Every slot has written positions 0 .. length - 1 and blocks 0 .. count - 1; all else is poison."""
    window = poisoned_store(SLOTS + 1, ring, width, tail, format, dtype)
    compressed = poisoned_store(SLOTS * pages + 1, page_rows, width, tail, format, dtype)
    table = shuffled_table(pages)
    kv, blocks = [torch.empty(0)], [torch.empty(0)]
    for slot in range(1, SLOTS + 1):
        rows = normal(length, width, seed=10 + slot, dtype=dtype)
        for first in range(0, length, ring):  # a ring at a time: places within a call are distinct
            part = torch.arange(first, min(length, first + ring))
            again("window_insert", rows[part], part, torch.full_like(part, slot), window)
        far = normal(count, width, seed=20 + slot, dtype=dtype)
        if count:
            again("block_insert", far, torch.arange(count), torch.tensor([slot]), table, compressed)
        kv.append(as_stored(rows, tail, format))
        blocks.append(as_stored(far, tail, format))
    return Layer(window, compressed, table, kv, blocks)


def as_stored(rows: torch.Tensor, tail: int, format: str) -> torch.Tensor:
    """fp64 rows after the format's rounding, by a rule of this file's own: scale by search, value by torch's cast."""
    rows = rows.double()
    if format == "plain":
        return rows
    head = rows.shape[1] - tail
    out = rows.float().bfloat16().double()
    for start in range(0, head, 64):
        part = rows[:, start : min(start + 64, head)]
        largest = part.abs().amax(1, keepdim=True).clamp_min(1e-4)
        scale = torch.exp2(torch.arange(-40.0, 40.0, dtype=torch.float64))
        first = (scale * 448 >= largest).to(torch.int64).argmax(1, keepdim=True)
        step = scale[first]
        out[:, start : min(start + 64, head)] = (part / step).float().to(torch.float8_e4m3fn).double() * step
    return out
