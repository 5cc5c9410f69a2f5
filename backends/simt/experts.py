"""Routes ``simt`` of the experts' ops: their launches (expert_kernels); which calls they take is in expert_needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halma.backends.simt.expert_kernels import (
    FP8_BLOCK,
    ExpertKernels,
    _kernels,
    address_of,
    bits_of,
    kernels_of,
    need_contiguous,
    pair_of,
    weight_addresses,
)
from halma.backends.simt.expert_needs import fits_ffn, fits_grouped, fits_layout, fits_rows, fits_sum, fits_wide
from halma.backends.simt.expert_sources import THIN, TILINGS, fp4_tiling, tiling_of
from halma.hal.workspace import Workspace

__all__ = [
    "ExpertKernels",
    "Products",
    "_kernels",
    "address_of",
    "bits_of",
    "ffn_route",
    "fits_ffn",
    "fits_grouped",
    "fits_layout",
    "fits_rows",
    "fits_sum",
    "fits_wide",
    "grouped_route",
    "in_order",
    "kernels_of",
    "layout_route",
    "need_contiguous",
    "pair_of",
    "sum_route",
    "weight_addresses",
]


def in_order(*launches: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def layout_route(
    name: str,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    experts: int,
    alignment: int,
    *,
    out: tuple[torch.Tensor, ...],
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("expert_layout", ids, weights)
    return kernels_of(name).layout(ids, weights, first, experts, alignment, out)


def sum_route(
    name: str, parts: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor, ws: Workspace
) -> Callable[[], None]:
    need_contiguous("expert_sum", parts, slots)
    return kernels_of(name).sum(parts, slots, out)


class Products:
    """Both products over one layout of ``slots`` slots: scratch is taken and launches are made by :meth:`launches`.

    Thin items and those of fp4 weights round their tokens themselves; for wide ones of fp8 weights that is a launch of
    its own before each product.
    """

    def __init__(
        self,
        kernels: ExpertKernels,
        tiling: str | None,
        gate_up: Any,
        down: Any,
        layer: torch.Tensor | None,
        slots: int,
    ) -> None:
        experts, width, inner = down.shape
        self._kernels = kernels
        if tiling is not None:
            self._tiling = TILINGS[tiling]
        elif gate_up.format == "fp4_block32":
            self._tiling = TILINGS[fp4_tiling(slots)]
        else:
            self._tiling = tiling_of(slots, experts, width, inner)
        self._gate_up, self._down, self._layer, self._slots = gate_up, down, layer, slots
        self._rounds = gate_up.format == "fp8_block128" and self._tiling is not THIN

    def launches(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        index: torch.Tensor | None,
        slot_weights: torch.Tensor,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        limit: float,
        out: torch.Tensor,
        ws: Workspace,
    ) -> list[Callable[[], None]]:
        """rows [R, D] bf16, or e4m3 with ``scales``; ``index``: slot -> row -> out [slots, D]."""
        found: list[Callable[[], None]] = []
        if scales is None and self._rounds:
            rows, scales, launch = self._rounded(rows, index, offsets, ws)
            index = None
            found.append(launch)
        inner = self._down.shape[2]
        carrier = torch.bfloat16 if self._gate_up.format == "plain" else torch.float32
        hidden, powers = ws.take((self._slots, inner), carrier), None
        rest = (slot_weights, counts, offsets)
        product, tiling, layer = self._kernels.product, self._tiling, self._layer
        found.append(product("up", tiling, self._gate_up, layer, rows, scales, index, *rest, hidden, limit))
        if self._rounds:
            hidden, powers, launch = self._rounded(hidden, None, offsets, ws)
            found.append(launch)
        found.append(product("down", tiling, self._down, layer, hidden, powers, None, *rest, out, limit))
        return found

    def _rounded(
        self, x: torch.Tensor, index: torch.Tensor | None, offsets: torch.Tensor, ws: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        data = ws.take((self._slots, x.shape[1]), torch.uint8)
        powers = ws.take((self._slots, x.shape[1] // FP8_BLOCK), torch.float32)
        return data, powers, self._kernels.rounded(x, index, offsets, data, powers)


def grouped_route(
    name: str,
    tiling: str | None,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    slot_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    layer: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("grouped_ffn", rows, scales, index, slot_weights, counts, offsets, layer)
    products = Products(kernels_of(name), tiling, gate_up, down, layer, index.shape[0])
    return in_order(*products.launches(rows, scales, index, slot_weights, counts, offsets, limit, out, ws))


def ffn_route(
    name: str,
    tiling: str | None,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("expert_ffn", x, ids, weights)
    kernels = kernels_of(name)
    (tokens, width), pairs, experts = x.shape, ids.numel(), down.shape[0]
    if tiling is None and kernels.takes_few(gate_up.format, pairs, ids.shape[1], width, down.shape[2]):
        return _few(kernels, x, ids, weights, gate_up, down, limit, out, ws)
    index, slot_weights = ws.take((max(pairs, 1),), torch.int32), ws.take((max(pairs, 1),), torch.float32)
    counts, offsets = ws.take((experts,), torch.int32), ws.take((experts + 1,), torch.int32)
    slots = ws.take(tuple(ids.shape), torch.int32)
    rows, scales, rounding = x, None, None
    if gate_up.format != "plain":
        rows = ws.take((tokens, width), torch.uint8)
        scales = ws.take((tokens, width // FP8_BLOCK), torch.float32)
        rounding = (x, rows, scales)
    layout = kernels.layout(ids, weights, 0, experts, 1, (index, slot_weights, counts, offsets, slots), rounding)
    parts = ws.take((max(pairs, 1), width), torch.float32)
    products = Products(kernels, tiling, gate_up, down, None, max(pairs, 1))
    both = products.launches(rows, scales, index, slot_weights, counts, offsets, limit, parts, ws)
    return in_order(layout, *both, kernels.sum(parts, slots, out))


def _few(
    kernels: ExpertKernels,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    """Blocks lay the pairs out, round the tokens and add the choices up themselves: two launches in all."""
    few = ids.numel(), ids.shape[1]
    carrier = torch.bfloat16 if gate_up.format == "plain" else torch.float32
    hidden = ws.take((few[0], down.shape[2]), carrier)
    rest = (None, None, weights, ids, ids)
    return in_order(
        kernels.product("up", THIN, gate_up, None, x, *rest, hidden, limit, few),
        kernels.product("down", THIN, down, None, hidden, *rest, out, limit, few),
    )
