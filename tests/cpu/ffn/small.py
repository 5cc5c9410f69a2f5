"""Small layers, routings and programs for the tests of the FFN program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.ffn.items import Item, ItemBuffers, ItemSizes
from halma.models.deepseek_v4.ffn.ladder import Ladder, item_ladder
from halma.models.deepseek_v4.ffn.program import FfnOptions, FfnProgram
from halma.ops.weight import FP4_BLOCK32, PLAIN, Weight

LIMIT = 1.0
SIZES = ItemSizes(
    max_tokens=12, hidden=64, top_k=3, experts=6, layers=3, max_shared=12, alignment=4, every_row_shared=True
)


@dataclass(frozen=True, eq=False)
class Layer:
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight | None
    shared_down: Weight | None


def layers_of(
    sizes: ItemSizes, backend: Backend, *, inner: int = 32, format: str = PLAIN, dtype: torch.dtype = torch.float32
) -> list[Layer]:
    generator = torch.Generator().manual_seed(5)
    device = backend.device.torch_device

    def one(*shape: int) -> Weight:
        if format == PLAIN:
            return Weight((torch.randn(*shape, generator=generator) * 0.2).to(dtype).to(device))
        scales = torch.randint(120, 124, Weight.scale_shape(shape, format), dtype=torch.uint8, generator=generator)
        if format == FP4_BLOCK32:
            packed = (*shape[:-1], shape[-1] // 2)
            data = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
        else:
            data = torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)
        return Weight(data.to(device), scales.to(device).view(torch.float8_e8m0fnu), format, "fp8")

    width, experts = sizes.hidden, sizes.experts

    def layer() -> Layer:
        routed = one(experts, 2 * inner, width), one(experts, width, inner)
        return Layer(*routed, *((one(2 * inner, width), one(width, inner)) if sizes.max_shared else (None, None)))

    return [layer() for _ in range(sizes.layers)]


def program_of(
    backend: Backend,
    sizes: ItemSizes = SIZES,
    *,
    ladder: Ladder | None = None,
    layers: Sequence[Layer] | None = None,
    carrier: torch.dtype = torch.float32,
    reply: torch.dtype | None = None,
    **options: Any,
) -> FfnProgram:
    acc = torch.float64 if carrier is torch.float64 else torch.float32
    ranks = 1 if sizes.every_row_shared or not sizes.max_shared else -(-sizes.max_tokens // sizes.max_shared)
    return FfnProgram(
        layers_of(sizes, backend) if layers is None else layers,
        backend,
        ItemBuffers(backend, sizes, carrier=carrier, acc=acc),
        ladder or item_ladder(sizes.max_tokens, sizes.top_k, ranks, sizes.experts, shared=sizes.max_shared > 0),
        FfnOptions(reply or carrier, LIMIT, **{"reserve": 0, **options}),
    )


@dataclass(frozen=True)
class Payload:
    """An item's rows [n, D], ids [n, k] with -1 for choices elsewhere, weights [n, k]; on the CPU."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def put(self, program: FfnProgram, *, poison: float | None = None) -> None:
        """Into the program's buffers; the rows behind hold ``poison``, and ids of another item."""
        b, n = program.buffers, len(self.rows)
        if poison is not None:
            b.rows.fill_(poison)
            b.weights.fill_(poison)
            b.ids.fill_(0)
        b.rows[:n].copy_(self.rows)
        b.ids[:n].copy_(self.ids)
        b.weights[:n].copy_(self.weights)


def payload(sizes: ItemSizes, rows: int, seed: int, carrier: torch.dtype = torch.float32) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    acc = torch.float64 if carrier is torch.float64 else torch.float32
    ids = torch.rand(rows, 2 * sizes.experts, generator=generator).argsort(1)[:, : sizes.top_k].contiguous()
    ids[ids >= sizes.experts] = -1  # of another rank
    x = torch.randn(rows, sizes.hidden, generator=generator).to(carrier)
    return Payload(x, ids, torch.rand(rows, sizes.top_k, generator=generator).to(acc))


def wanted(layer: Layer, given: Payload, item: Item) -> torch.Tensor:
    """The item by the ops as a model calls them, in the accumulator's dtype: choices elsewhere weigh nothing."""
    ops = Ops(Workspace(given.rows.device))
    acc = given.weights.dtype
    here = given.ids >= 0
    weights = given.weights * here
    out = ops.expert_ffn(given.rows, given.ids.clamp(min=0), weights, layer.gate_up, layer.down, LIMIT).clone()
    if item.shared and layer.shared_gate_up is not None and layer.shared_down is not None:
        begin, end = item.shared_first, item.shared_first + item.shared
        up = ops.linear(given.rows[begin:end], layer.shared_gate_up, acc)
        out[begin:end] += ops.linear(ops.swiglu(up, LIMIT), layer.shared_down, acc)
    return out
