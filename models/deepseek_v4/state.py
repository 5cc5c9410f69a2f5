"""What a V4 model remembers: the stores that a step reads and writes, sized once.

Everything is keyed by absolute position, so a step may carry several tokens of a request and a rejected
token is a truncation: whatever was written at or beyond the new length is overwritten before it is read.

* window rows: one ring a slot, at least ``sliding_window + T - 1`` rows for steps of T tokens (M4);
* compressed rows and index keys: pages of ``page_tokens`` tokens, through one page table for all layers;
* partial compressor state: a ring a slot, long enough that T new tokens overwrite nothing still needed;
* drafts: the MTP module's own window, and the tokens that it proposes for the next step.

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
        drafts: most tokens that the MTP module proposes at a time; 0 without it.
    """

    slots: int
    max_context: int
    max_query_len: int
    pages: int
    page_tokens: int
    drafts: int = 0

    @staticmethod
    def of(
        config: V4Config, *, slots: int, max_context: int, max_query_len: int, pages: int | None = None, drafts: int = 0
    ) -> StatePlan:
        """The plan for ``slots`` requests; ``pages`` defaults to all of them at full length.

        A step that verifies carries the newest token and all drafts: ``max_query_len`` is raised to that.
        """
        ratios = [layer.ratio for layer in config.layers if layer.ratio]
        unit = math.lcm(*ratios) if ratios else 1
        page_tokens = -(-PAGE_TOKENS // unit) * unit
        each = -(-max_context // page_tokens)
        longest = max(max_query_len, drafts + 1)
        return StatePlan(slots, max_context, longest, slots * each if pages is None else pages, page_tokens, drafts)

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
class DraftState:
    """What the MTP module remembers.

    Attributes:
        layer: its window, fed with every committed token. Rows of drafts lie behind those and are overwritten by the
            true ones, so the ring is longer than a layer's of the target by the most drafts.
        tokens: int64 [slots + 1, K]; ``tokens[s, j]`` is proposed for position ``lengths[s] + 1 + j``, -1 for none.
    """

    layer: LayerState
    tokens: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class V4State:
    """The whole state on one device.

    Attributes:
        layers: one per layer.
        page_table: int64 [slots + 1, pages_per_slot]; row 0 and unused entries point to page 0.
        lengths, last_token: int64 [slots + 1]; tokens fed, and the newest token, which is not: it stands at position
            ``lengths[s]``.
        end: int64 [slots + 1]; one behind the last position that a token of the request may have: prompt and answer
            together. A step emits ``end - 1 - lengths`` tokens at most, so a request is over on the device where that
            is not positive; a stop token makes it so. ``max_context`` to begin with.
        stops: int64 [slots + 1, MAX_STOPS]; tokens that end the request, -1 for none.
        ring: int64 [slots + 1, TOKEN_RING]: emitted tokens by position, in memory that the host reads too.
        log: int64 [LOG_STEPS, requests], in such memory too: how many tokens each row of a step emitted.
        step: int64 [1]; the number of the next step: step n writes row ``n % LOG_STEPS`` of the log.
        draft: None without MTP.
    """

    plan: StatePlan
    formats: RowFormats
    layers: tuple[LayerState, ...]
    page_table: torch.Tensor
    lengths: torch.Tensor
    last_token: torch.Tensor
    end: torch.Tensor
    stops: torch.Tensor
    ring: torch.Tensor
    log: torch.Tensor
    step: torch.Tensor
    draft: DraftState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the stores occupy."""
        tensors = [self.page_table, self.lengths, self.last_token, self.end, self.stops, self.ring, self.log, self.step]
        layers = self.layers
        if self.draft is not None:
            tensors.append(self.draft.tokens)
            layers = (*layers, self.draft.layer)
        for layer in layers:
            stores = (layer.window, layer.compressed, layer.index)
            tensors += [store.data for store in stores if store is not None]
            for partial in (layer.compressor, layer.index_compressor):
                tensors += [partial.values, partial.gates] if partial is not None else []
        return sum(tensor.nbytes for tensor in tensors)


TOKEN_RING = 64
"""Positions that the host may lag behind: five steps of nine tokens, the most that it runs ahead."""

LOG_STEPS = 64
"""Steps that the host may lag behind."""

MAX_STOPS = 8
"""Stop tokens that the device looks for; the host looks for more of them, and for stop strings, itself."""


def build_state(
    config: V4Config,
    plan: StatePlan,
    formats: RowFormats,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ring: torch.Tensor | None = None,
    log: torch.Tensor | None = None,
) -> V4State:
    """Allocate the state. ``ring`` and ``log`` are the device's views of pinned host memory."""
    layers = tuple(_layer_state(config, kind, plan, formats, dtype, device) for kind in config.layers)
    count = plan.slots + 1

    def integers(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    draft = None
    if plan.drafts:
        rows = config.sliding_window + plan.max_query_len - 1 + plan.drafts
        draft = DraftState(
            LayerState(_window(config, plan, formats, dtype, device, rows)), integers(count, plan.drafts, value=-1)
        )
    return V4State(
        plan,
        formats,
        layers,
        page_table=integers(count, plan.pages_per_slot),
        lengths=integers(count),
        last_token=integers(count),
        end=integers(count, value=plan.max_context),
        stops=integers(count, MAX_STOPS, value=-1),
        ring=ring if ring is not None else integers(count, TOKEN_RING),
        log=log if log is not None else integers(LOG_STEPS, plan.slots),
        step=integers(1),
        draft=draft,
    )


def _window(
    config: V4Config, plan: StatePlan, formats: RowFormats, dtype: torch.dtype, device: torch.device, rows: int
) -> RowStore:
    return RowStore.new(plan.slots + 1, rows, config.head_dim, config.qk_rope_head_dim, formats.kv, dtype, device)


def _layer_state(
    config: V4Config,
    kind: LayerKind,
    plan: StatePlan,
    formats: RowFormats,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerState:
    rope, slots = config.qk_rope_head_dim, plan.slots + 1
    window = _window(config, plan, formats, dtype, device, config.sliding_window + plan.max_query_len - 1)
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
