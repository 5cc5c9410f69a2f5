"""What a V4 model remembers: the stores that a step reads and writes, sized once.

Everything is keyed by absolute position, so a step may carry several tokens of a request and a rejected
token is a truncation: whatever was written at or beyond the new length is overwritten before it is read.

* window rows: one ring a slot, at least ``sliding_window + T - 1`` rows for steps of T tokens (M4);
* compressed rows and index keys: pages of ``page_tokens`` tokens, through one page table for all layers;
* partial compressor state: a ring a slot, long enough that T new tokens overwrite nothing still needed.

Slot 0 and page 0 are the null slot and page: padding rows write there, and nothing real reads there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halma.models.deepseek_v4.config import LayerKind, V4Config
from halma.ops.compressor import CompressorState
from halma.ops.row_store import RowStore

PAGE_TOKENS = 256
"""Tokens a page, at least: 64 rows of a CSA layer, two of an HCA layer of ratio 128."""


@dataclass(frozen=True)
class StatePlan:
    """Sizes of the state, as pure arithmetic.

    Args:
        slots: requests that may live at once (slot 0 comes on top).
        max_context: most tokens of one request.
        max_query_len: most tokens of one request in one step.
        pages: pages for all requests together (page 0 comes on top).
        page_tokens: tokens a page; a multiple of every ratio.
    """

    slots: int
    max_context: int
    max_query_len: int
    pages: int
    page_tokens: int

    @staticmethod
    def of(
        config: V4Config, *, slots: int, max_context: int, max_query_len: int, pages: int | None = None
    ) -> StatePlan:
        """The plan for ``slots`` requests; ``pages`` defaults to all of them at full length."""
        ratios = [layer.ratio for layer in config.layers if layer.ratio]
        unit = math.lcm(*ratios) if ratios else 1
        page_tokens = -(-PAGE_TOKENS // unit) * unit
        each = -(-max_context // page_tokens)
        return StatePlan(slots, max_context, max_query_len, slots * each if pages is None else pages, page_tokens)

    @property
    def pages_per_slot(self) -> int:
        """Width of the page table."""
        return -(-self.max_context // self.page_tokens)

    def pages_for(self, tokens: int) -> int:
        """Pages that a request of ``tokens`` needs."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True)
class RowFormats:
    """How rows are stored: ``plain`` in exact arithmetic, packed as shipped otherwise."""

    kv: str = "plain"
    index: str = "plain"

    @staticmethod
    def of(arithmetic: str, index: str = "index_fp4") -> RowFormats:
        """The formats of an arithmetic; ``index`` picks fp4 or fp8 keys for shipping."""
        return RowFormats() if arithmetic == "exact" else RowFormats("kv_fp8", index)


@dataclass(frozen=True, eq=False, repr=False)
class LayerState:
    """The stores of one layer; which of them exist follows its kind."""

    window: RowStore
    compressed: RowStore | None = None
    compressor: CompressorState | None = None
    index: RowStore | None = None
    index_compressor: CompressorState | None = None


@dataclass(frozen=True, eq=False, repr=False)
class V4State:
    """The whole state on one device.

    Attributes:
        layers: one per layer.
        page_table: int64 [slots + 1, pages_per_slot]; row 0 and unused entries point to page 0.
        lengths, last_token: int64 [slots + 1]; tokens committed, and the newest token, not yet fed.
        ring: int64 [slots + 1, ring]: committed tokens by position, in memory that the host reads too.
    """

    plan: StatePlan
    formats: RowFormats
    layers: tuple[LayerState, ...]
    page_table: torch.Tensor
    lengths: torch.Tensor
    last_token: torch.Tensor
    ring: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the stores occupy."""
        tensors = [self.page_table, self.lengths, self.last_token, self.ring]
        for layer in self.layers:
            stores = (layer.window, layer.compressed, layer.index)
            tensors += [store.data for store in stores if store is not None]
            for partial in (layer.compressor, layer.index_compressor):
                tensors += [partial.values, partial.gates] if partial is not None else []
        return sum(tensor.nbytes for tensor in tensors)


TOKEN_RING = 64
"""Positions that the host may lag behind; it reads one step late, so a few would do."""


def build_state(
    config: V4Config,
    plan: StatePlan,
    formats: RowFormats,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ring: torch.Tensor | None = None,
) -> V4State:
    """Allocate the state. ``ring`` is the device's view of pinned host memory."""
    layers = tuple(_layer_state(config, kind, plan, formats, dtype, device) for kind in config.layers)
    count = plan.slots + 1

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return V4State(
        plan,
        formats,
        layers,
        integers(count, plan.pages_per_slot),
        integers(count),
        integers(count),
        ring if ring is not None else integers(count, TOKEN_RING),
    )


def _layer_state(
    config: V4Config,
    kind: LayerKind,
    plan: StatePlan,
    formats: RowFormats,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerState:
    rope, slots = config.qk_rope_head_dim, plan.slots + 1
    window = RowStore.new(
        slots, config.sliding_window + plan.max_query_len - 1, config.head_dim, rope, formats.kv, dtype, device
    )
    if not kind.ratio:
        return LayerState(window)
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    rows = plan.page_tokens // kind.ratio
    ring = kind.ratio * (2 if kind.overlap else 1) + plan.max_query_len

    def partial(width: int) -> CompressorState:
        shape = (slots, ring, width * (2 if kind.overlap else 1))
        return CompressorState(
            torch.zeros(shape, dtype=acc, device=device), torch.zeros(shape, dtype=acc, device=device)
        )

    compressed = RowStore.new(plan.pages + 1, rows, config.head_dim, rope, formats.kv, dtype, device)
    if not kind.indexed:
        return LayerState(window, compressed, partial(config.head_dim))
    return LayerState(
        window,
        compressed,
        partial(config.head_dim),
        RowStore.new(plan.pages + 1, rows, config.index_head_dim, rope, formats.index, dtype, device),
        partial(config.index_head_dim),
    )
