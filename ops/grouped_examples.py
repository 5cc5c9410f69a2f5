"""Example calls of the grouped expert ops, with padding rows, other ranks' experts, gaps and a tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halma.hal.collectives.expert_rows import CHARGED
from halma.hal.testing.examples import Arguments, OpExample, examples
from halma.hal.testing.poison import Fill
from halma.hal.workspace import Workspace
from halma.ops.draws import Draw, example
from halma.ops.grouped import expert_layout
from halma.ops.weight import FP4_BLOCK32, PLAIN, Weight
from halma.ops.weight_table import WeightTable

EXPERTS = 6
FIRST = 4
"""The examples' rank holds experts 4 to 9 of 12."""

ROUNDED = 5e-2
"""Tolerance where activations are rounded: another order of summation moves a value across a rounding step."""


def lay_out(ids: torch.Tensor, weights: torch.Tensor, alignment: int) -> list[torch.Tensor]:
    """index, slot weights, counts, offsets and slots by the reference; an example needs them as arguments."""
    given = expert_layout.out
    assert given is not None
    specs = given(ids, weights, FIRST, EXPERTS, alignment)
    out = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in (specs if isinstance(specs, tuple) else (specs,)))
    expert_layout.reference(ids, weights, FIRST, EXPERTS, alignment, out=out, ws=Workspace())
    return list(out)


def routing(draw: Draw, rows: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [rows, k] of which about half are this rank's, with a padding row among them; weights [rows, k]."""
    ids = draw.choices(rows, k, 2 * EXPERTS)
    ids[:, 0] = draw.ids(rows, below=EXPERTS) + FIRST  # every real row has a slot
    ids[:, 1:][ids[:, 1:] == ids[:, :1]] = 0
    if rows > 2:
        ids[rows // 2] = -1
    return ids, draw.normal(rows, k, dtype=dtype).abs()


# -- layout ---------------------------------------------------------------------------------------------


@examples("expert_layout")
def _expert_layout() -> list[OpExample]:
    def build(alignment: int) -> Any:
        return lambda draw, rows: (*routing(draw, rows, 4), FIRST, EXPERTS, alignment)

    def last(draw: Draw, rows: int) -> Arguments:
        return torch.full((rows, 2), FIRST + EXPERTS - 1), draw.normal(rows, 2), FIRST, EXPERTS, 8

    def nothing(draw: Draw, rows: int) -> Arguments:
        return torch.full((rows, 2), -1), draw.normal(rows, 2), FIRST, EXPERTS, 8

    def poison(arguments: Arguments, fill: Fill) -> None:
        ids, weights, *_ = arguments
        here = (ids >= FIRST) & (ids < FIRST + EXPERTS)
        weights[~here] = fill(weights.new_empty(int((~here).sum())))

    def defined(_: Arguments, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        index, weights, *rest = outputs
        return [index, weights[index >= 0], *rest]

    def charged(draw: Draw, rows: int) -> Arguments:
        return (*routing(draw, rows, 4), FIRST, EXPERTS, 16, CHARGED)

    def named(_: Arguments, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        index, weights, counts, offsets, slots = outputs
        return [index, weights[slots[slots >= 0].long()], counts, offsets, slots]

    return [
        example("expert_layout", name, make, tolerance=0.0, scales=(), poison=poison, defined=some, rows=(1, 3, 40))
        for name, make, some in (
            ("alignment 16, padding charged", charged, named),
            ("alignment 1", build(1), defined),
            ("alignment 16", build(16), defined),
            ("alignment 128", build(128), defined),
            ("the last expert takes everything", last, defined),
            ("nobody has a token", nothing, defined),
        )
    ]


# -- experts --------------------------------------------------------------------------------------------


def _weights(draw: Draw, format: str, width: int, inner: int, dtype: torch.dtype) -> tuple[Weight, Weight]:
    def one(rows: int, columns: int) -> Weight:
        if format == PLAIN:
            return Weight(draw.normal(EXPERTS, rows, columns, scale=0.2, dtype=dtype))
        shape = (EXPERTS, rows, columns)
        scale_shape = Weight.scale_shape(shape, format)
        scale = draw.ids(*scale_shape, below=3).add_(121).to(torch.uint8).view(torch.float8_e8m0fnu)
        if format == FP4_BLOCK32:
            return Weight(draw.ids(EXPERTS, rows, columns // 2, below=256).to(torch.uint8), scale, format, "fp8")
        return Weight(draw.normal(*shape).to(torch.float8_e4m3fn), scale, format, "fp8")

    return one(2 * inner, width), one(width, inner)


def _poison_grouped(arguments: Arguments, fill: Fill) -> None:
    rows, scales, index, weights = arguments[:4]
    real = index >= 0
    unread = torch.ones(rows.shape[0], dtype=torch.bool)
    unread[index[real].long()] = False
    for row in unread.nonzero().view(-1).tolist():
        fill(rows[row])
        if scales is not None:
            fill(scales[row])
    for tensor in (index, weights):
        tensor[~real] = fill(tensor.new_empty(int((~real).sum())))


def _real_slots(arguments: Arguments, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    counts, offsets = arguments[4], arguments[5]
    slot = torch.arange(outputs[0].shape[0], device=counts.device).unsqueeze(1)
    inside = (slot >= offsets[:-1]) & (slot < offsets[:-1] + counts)
    return [outputs[0][inside.any(1)]]


def _grouped(
    format: str = PLAIN,
    *,
    width: int = 128,
    inner: int = 128,
    alignment: int = 4,
    dtype: torch.dtype = torch.float32,
    layers: int = 0,
    payload: bool = False,
    result: torch.dtype | None = None,
    spread: Callable[[torch.Tensor], Any] | None = None,
) -> Callable[[Draw, int], Arguments]:
    def make(draw: Draw, rows: int) -> Arguments:
        ids, weights = routing(draw, rows, 4)
        if spread is not None:
            spread(ids)
        index, slot_weights, counts, offsets, _ = lay_out(ids, weights, alignment)
        x, scales = draw.normal(rows, width, dtype=dtype), None
        if payload:
            x = x.to(torch.float8_e4m3fn)
            scales = 2.0 ** (draw.ids(rows, -(-width // 128), below=4).float() - 2)
        pairs = [_weights(draw, format, width, inner, dtype) for _ in range(max(layers, 1))]
        stacks: Any = pairs[0] if not layers else tuple(WeightTable.of(part) for part in zip(*pairs, strict=True))
        layer = torch.tensor([1], dtype=torch.int32) if layers else None
        return x, scales, index, slot_weights, counts, offsets, *stacks, 1.0, layer, result

    return make


def _grouped_charged(draw: Draw, rows: int) -> Arguments:
    """Padding charged to the experts; its slots read a row behind the real ones."""
    x, scales, index, slot_weights, counts, offsets, *more = _grouped()(draw, rows)
    index[index < 0] = rows
    offsets[-1] = index.shape[0]
    torch.sub(offsets[1:], offsets[:-1], out=counts)
    return torch.cat([x, x[:1]]), scales, index, slot_weights, counts, offsets, *more, CHARGED


def _poison_charged(arguments: Arguments, fill: Fill) -> None:
    rows, index, weights = arguments[0], arguments[2], arguments[3]
    fill(rows[-1])
    charged = index == rows.shape[0] - 1
    weights[charged] = fill(weights.new_empty(int(charged.sum())))


def _not_charged(arguments: Arguments, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [outputs[0][arguments[2] != arguments[0].shape[0] - 1]]


@examples("grouped_ffn")
def _grouped_ffn() -> list[OpExample]:
    bf16 = torch.bfloat16
    few, many = (1, 5), (72, 80)  # many: more than 40 slots an expert, from where other routes apply
    kinds: list[tuple[str, float, Callable[[Draw, int], Arguments]]] = [
        ("fp32", 1e-5, _grouped()),
        ("odd sizes, alignment 1", 1e-5, _grouped(width=37, inner=13, alignment=1)),
        ("the last expert takes everything", 1e-5, _grouped(spread=lambda ids: ids.fill_(FIRST + EXPERTS - 1))),
        ("one expert has nothing", 1e-5, _grouped(spread=lambda ids: ids.masked_fill_(ids == FIRST + 2, 0))),
        ("bf16", 1e-2, _grouped(dtype=bf16, width=256)),
        ("bf16 result", 1e-2, _grouped(dtype=bf16, result=bf16)),
        ("bf16, three layers", 1e-2, _grouped(dtype=bf16, layers=3)),
        ("fp8", ROUNDED, _grouped("fp8_block128", dtype=bf16, width=256)),
        ("fp4", ROUNDED, _grouped("fp4_block32", dtype=bf16, width=256)),
        ("fp4, three layers", ROUNDED, _grouped("fp4_block32", dtype=bf16, layers=3)),
        ("fp4, fp8 payload", ROUNDED, _grouped("fp4_block32", dtype=bf16, payload=True, width=256)),
        ("fp8, fp8 payload, alignment 16", ROUNDED, _grouped("fp8_block128", dtype=bf16, payload=True, alignment=16)),
    ]
    crowded: list[tuple[str, float, Callable[[Draw, int], Arguments]]] = [
        ("fp8, many rows", ROUNDED, _grouped("fp8_block128", dtype=bf16)),
        ("fp4, many rows", ROUNDED, _grouped("fp4_block32", dtype=bf16)),
    ]
    wide = [("fp4, units of 512", ROUNDED, _grouped("fp4_block32", dtype=bf16, width=512, inner=512))]
    charged = example(
        "grouped_ffn",
        "padding charged",
        _grouped_charged,
        tolerance=1e-5,
        scales=(),
        rows=few,
        poison=_poison_charged,
        defined=_not_charged,
    )
    return [charged] + [
        example(
            "grouped_ffn",
            name,
            make,
            tolerance=tolerance,
            scales=(),
            rows=rows,
            poison=_poison_grouped,
            defined=_real_slots,
        )
        for rows, of in ((few, kinds), (many, crowded), ((3,), wide))
        for name, tolerance, make in of
    ]


@examples("expert_sum")
def _expert_sum() -> list[OpExample]:
    def build(dtype: torch.dtype, alignment: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            ids, weights = routing(draw, rows, 4)
            index, *_, slots = lay_out(ids, weights, alignment)
            return draw.normal(index.shape[0], 24, dtype=dtype), slots

        return make

    def poison(arguments: Arguments, fill: Fill) -> None:
        parts, slots = arguments
        used = torch.zeros(parts.shape[0], dtype=torch.bool)
        used[slots[slots >= 0].long()] = True
        for row in (~used).nonzero().view(-1).tolist():
            fill(parts[row])

    return [
        example("expert_sum", name, build(dtype, alignment), scales=(), poison=poison)
        for name, dtype, alignment in (
            ("fp32", torch.float32, 16),
            ("bf16 parts", torch.bfloat16, 1),
            ("fp64", torch.float64, 4),
        )
    ]
