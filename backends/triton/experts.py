"""Routes ``triton`` of the experts' ops: launches of the kernels beside this file.

Everything is driven by counts and offsets on the device: no host read, and grids that depend on shapes alone. A
route compiles every kernel that it may need for its weights when it is first planned, so none is compiled inside a
capture. Each returned launch holds its tensors and is good as long as their addresses are.

Numbers: a packed weight times its scale and a rounded activation are exact in bf16, so with fp8 activations the
products differ from the reference by the order of fp32 sums alone; weights for which that does not hold are refused
when they are first met (:mod:`halma.backends.triton.weights`). Without activation rounding the input of the second
product is rounded to bf16, and ``expert_ffn`` with plain weights keeps its slots in bf16 (2^-9 of a slot each).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
import triton

from halma.backends.triton import products, rows
from halma.backends.triton.fitting import CODES, Tiles, all_tiles, tiles_for
from halma.backends.triton.weights import operands
from halma.hal.collectives.expert_rows import slot_capacity
from halma.hal.workspace import Workspace

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton interprets: decided when it is imported, by ``TRITON_INTERPRET``."""

_STAGED_ROWS: Final = 32
_SUM_WIDTH: Final = 1024
_warm: set[Any] = set()

Launch = Callable[[], None]


def expert_layout(
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    experts: int,
    alignment: int,
    *,
    out: tuple[torch.Tensor, ...],
    ws: Workspace,
) -> Launch:
    """See the op; three small launches."""
    index, slot_weights, counts, offsets, slots = out
    pairs, choices, capacity = ids.numel(), ids.shape[1], index.numel()
    wide = max(triton.next_power_of_2(experts), 16)
    chunks = triton.cdiv(pairs, rows.CHUNK)
    table = ws.take((chunks, wide), torch.int32)
    sizes: dict[str, Any] = {"EXPERTS": experts, "EXPERTS_2": wide}

    def launch() -> None:
        rows.count_kernel[(chunks,)](ids, index, table, pairs, capacity, first, CHUNK=rows.CHUNK, **sizes)
        rows.offsets_kernel[(1,)](
            table, counts, offsets, chunks, alignment, AT_ONCE=max(16, 8192 // wide), num_warps=8, **sizes
        )
        rows.place_kernel[(chunks,)](
            ids, weights, table, offsets, index, slot_weights, slots, pairs, choices, first, CHUNK=rows.CHUNK, **sizes
        )

    return launch


def expert_sum(parts: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> Launch:
    """See the op; one launch."""
    count, choices = slots.shape
    width = parts.shape[1]
    piece = min(_SUM_WIDTH, triton.next_power_of_2(width))
    grid = (count, triton.cdiv(width, piece))
    return lambda: rows.sum_kernel[grid](parts, slots, out, CHOICES=choices, D=width, WIDTH=piece)


def grouped_ffn(
    x: torch.Tensor,
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
) -> Launch:
    """See the op; rows are staged once, then two products, and between them the rounding of the second's input."""
    experts, inner, capacity = gate_up.shape[0], down.shape[2], index.shape[0]
    staged, stage = _staged(x, scales, gate_up, ws)
    hidden = ws.take((capacity, inner), torch.bfloat16)
    rounding = down.activation is not None
    wide = _wide_rows(out, down, ws) if rounding else hidden
    warm_up(gate_up, down, out.dtype, x.device, capacity / experts)
    tiles = tiles_for(gate_up.format, capacity, experts, _machine(x.device)[1])
    grid = (blocks_of(x.device, tiles),)
    first, second = gate_up_options(gate_up, down, wide.stride(0), tiles), down_options(down, tiles)
    up_data, up_scale = operands(gate_up)
    down_data, down_scale = operands(down)
    chosen = counts if layer is None else layer
    round_rows = _stage_launch(wide, None, hidden, CODES[down.format], offsets[experts:]) if rounding else None

    def launch() -> None:
        stage()
        products.gate_up_kernel[grid](
            staged, index, slot_weights, counts, offsets, up_data, up_scale, chosen, wide, float(limit), **first
        )
        if round_rows is not None:
            round_rows()
        products.down_kernel[grid](hidden, counts, offsets, down_data, down_scale, chosen, out, **second)

    return launch


def expert_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Launch:
    """See the op: layout, products and sum, one after the other."""
    experts = gate_up.shape[0]
    pairs = ids.numel()
    capacity = slot_capacity(pairs, experts)
    index, slots = ws.take((capacity,), torch.int32), ws.take(tuple(ids.shape), torch.int32)
    slot_weights = ws.take((capacity,), torch.float32)
    counts, offsets = ws.take((experts,), torch.int32), ws.take((experts + 1,), torch.int32)
    # Of plain weights' results no more than bf16 is right anyway: half the traffic of the sum.
    parts = ws.take((capacity, x.shape[1]), torch.bfloat16 if down.format == "plain" else torch.float32)
    launches = (
        expert_layout(ids, weights, 0, experts, 1, out=(index, slot_weights, counts, offsets, slots), ws=ws),
        grouped_ffn(x, None, index, slot_weights, counts, offsets, gate_up, down, limit, out=parts, ws=ws),
        expert_sum(parts, slots, out=out, ws=ws),
    )

    def launch() -> None:
        for each in launches:
            each()

    return launch


# -- pieces ---------------------------------------------------------------------------------------------


def _staged(x: torch.Tensor, scales: torch.Tensor | None, gate_up: Any, ws: Workspace) -> tuple[torch.Tensor, Launch]:
    """The rows as the first product reads them, bf16 [R, D], and the launch that makes them."""
    codes = CODES[gate_up.format]
    rounding = gate_up.activation is not None and scales is None
    if codes == 1 and not rounding and scales is None:
        return x, lambda: None
    staged = ws.take(tuple(x.shape), torch.bfloat16)
    return staged, _stage_launch(x, scales, staged, codes, None, rounding)


def _stage_launch(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    staged: torch.Tensor,
    codes: int,
    end: torch.Tensor | None,
    rounding: bool = True,
) -> Launch:
    """Rows x to ``staged``; those from ``end[0]`` on may stay as they are."""
    count, width = staged.shape
    # Triton's own e4m3 is missing on older generations: the bytes are decoded by the kernel.
    given = x.view(torch.uint8) if scales is not None else x
    factors, last = staged if scales is None else scales, staged if end is None else end
    grid = (triton.cdiv(count, _STAGED_ROWS), width // 128)
    options: dict[str, Any] = {
        "K": width,
        "STRIDE": x.stride(0),
        "CODES": codes,
        "ROUND": rounding,
        "SCALED": scales is not None,
        "BOUNDED": end is not None,
        "ROWS": _STAGED_ROWS,
    }
    return lambda: rows.stage_kernel[grid](given, factors, staged, count, last, **options)


def wide_stride(down: Any, result: torch.dtype) -> tuple[int, bool]:
    """Stride of the fp32 rows that are rounded for the second product, and whether the result's own rows hold them."""
    _, width, inner = down.shape
    inside = width * result.itemsize >= inner * 4
    return (width * result.itemsize // 4 if inside else inner), inside


def _wide_rows(out: torch.Tensor, down: Any, ws: Workspace) -> torch.Tensor:
    """fp32 [C, I] for the second product's input before it is rounded, inside ``out`` where its rows are long enough.

    A slot's row of ``out`` is written by the second product, after the rounding has read it; rows of other slots are
    not written.
    """
    inner = down.shape[2]
    if wide_stride(down, out.dtype)[1]:
        return out.view(torch.float32)[:, :inner]
    return ws.take((out.shape[0], inner), torch.float32)


def gate_up_options(gate_up: Any, down: Any, stride: int, tiles: Tiles) -> dict[str, Any]:
    """What the first product is compiled for; ``stride``: of the rows that it writes."""
    experts, _, width = gate_up.shape
    codes = CODES[down.format]
    return {
        "D": width,
        "INNER": down.shape[2],
        "STRIDE": stride,
        "ORDER": 1 if down.activation is not None else codes,
        **_options(gate_up, experts, tiles),
        "TILE_W": tiles.rows,
    }


def down_options(down: Any, tiles: Tiles) -> dict[str, Any]:
    """What the second product is compiled for."""
    experts, width, inner = down.shape
    tile = tiles.rows if width % tiles.rows == 0 else 128
    return {"D": width, "INNER": inner, **_options(down, experts, tiles), "TILE_W": tile}


def _options(weight: Any, experts: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "EXPERTS_2": triton.next_power_of_2(experts),
        "CODES": CODES[weight.format],
        "TABLE": hasattr(weight, "layers"),
        "TILE_T": tiles.slots,
        "PIECE": tiles.piece,
        "STAGES": tiles.stages,
        "WIDE": INTERPRETED,
        "num_warps": tiles.warps,
    }


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may take."""
    if device.type == "cpu":  # the interpreter: more blocks than one, so that the walk is tested
        return 3, 1 << 20
    active: Any = triton.runtime.driver.active
    index = device.index if device.index is not None else active.get_current_device()
    found = active.utils.get_device_properties(index)
    return int(found["multiprocessor_count"]), int(found["max_shared_mem"])


def blocks_of(device: torch.device, tiles: Tiles) -> int:
    """The grid of a product: what runs at once, whatever the counts are."""
    return _machine(device)[0] * tiles.blocks


def warm_up(gate_up: Any, down: Any, result: torch.dtype, device: torch.device, most: float) -> None:
    """Compiles the products of these weights for up to ``most`` rows an expert, once.

    A program is planned at its largest size, so nothing is compiled at a later one.
    """
    if device.type == "cpu":
        return
    half, narrow = torch.bfloat16, torch.int32
    rounding = down.activation is not None
    wide = torch.float32 if rounding else half
    stride = wide_stride(down, result)[0] if rounding else down.shape[2]
    for tiles in all_tiles(gate_up.format, most, _machine(device)[1]):
        key = (gate_up.plan_key, down.plan_key, result, device, tiles)
        if key in _warm:
            continue
        grid = (blocks_of(device, tiles),)
        compiled = (
            products.gate_up_kernel.warmup(
                half, narrow, torch.float32, narrow, narrow, *operands(gate_up), narrow, wide, 1.0,
                grid=grid, **gate_up_options(gate_up, down, stride, tiles),
            ),
            products.down_kernel.warmup(
                half, narrow, narrow, *operands(down), narrow, result, grid=grid, **down_options(down, tiles)
            ),
        )  # fmt: skip
        for kernel in compiled:
            kernel._init_handles()  # loading waits otherwise for the first launch, which may be in a capture
        _warm.add(key)
