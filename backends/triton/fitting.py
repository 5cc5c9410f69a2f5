"""What the Triton routes of the experts take, and which tiles they take it in: plain arithmetic, no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from halma.hal.collectives.expert_rows import takes_skipped
from halma.hal.routes import Call

CODES: Final = {"plain": 1, "fp8_block128": 4, "fp4_block32": 8}
"""Codes in a word of 32 bits, by a weight's format; 1: bf16, multiplied as it is."""

CHANNELS: Final = 128
"""D and I are multiples of it: scales and rounding go by 128 channels, and so do the blocks."""

MOST_EXPERTS: Final = 1024

FROM_ROWS: Final = {"plain": 0.25, "fp8_block128": 36.0, "fp4_block32": 47.0}
"""Rows an expert, at worst, from which the route applies, by the format of ``gate_up``: below them the portable
dialect's kernels were faster on an H200 (V4-Flash, 128 of 256 experts here; between 6 and 8, at 775 and at 1,000
tokens)."""


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Args:
        rows: weight rows of a block; of the second product 128 where they do not divide its rows.
        slots: slots of one expert a block takes at a time, a power of two or one and a half of one.
        piece: the last tile of an expert takes what is left in pieces of this many slots.
        stages: steps of 64 columns in flight.
        warps: of a block.
        blocks: a multiprocessor.
    """

    rows: int
    slots: int
    piece: int
    stages: int
    warps: int
    blocks: int = 1


_PACKED: Final = (
    # from rows an expert (the worst case: about twice the real ones where half of the experts are here), tiles
    # Many rows: half the weight rows, so that twice the slots share what decoding them costs.
    (288, Tiles(128, 256, 64, 4, 8)),
    (160, Tiles(128, 128, 32, 4, 4, 2)),
    (48, Tiles(128, 64, 32, 4, 4, 2)),
    (24, Tiles(256, 32, 16, 5, 8)),
    (0, Tiles(256, 16, 16, 5, 8)),
)
_PLAIN: Final = (
    # Nothing to decode: what counts is bytes from the L2 cache, so the largest tiles that registers and the 227 KiB
    # of shared memory hold (a stage of 256 rows and 192 slots takes 56).
    (288, Tiles(128, 256, 64, 4, 8)),  # 2.62 ms at 8,192 tokens on an H200; 256 x 192 took 3.19
    (160, Tiles(256, 128, 64, 4, 8)),
    (48, Tiles(256, 64, 32, 4, 8)),
    (24, Tiles(256, 32, 16, 4, 8)),
    (0, Tiles(256, 16, 16, 4, 8)),
)


_SHARED: Final = 227 << 10
"""Shared memory of a multiprocessor of sm_90, which the tables are for: bytes."""


def tiles_for(format: str, capacity: float, experts: int, shared: int = _SHARED) -> Tiles:
    """The tiles for ``capacity`` slots over ``experts`` experts: a pure function, so the same at capture and replay.

    ``shared``: bytes of shared memory a block may take; where there is less, fewer stages are in flight.
    """
    share = capacity / experts
    tiles = next(tiles for least, tiles in (_PLAIN if format == "plain" else _PACKED) if share >= least)
    line = 64 * 2 if format == "plain" else 64 * 4 // CODES[format]
    stages = shared // tiles.blocks // (tiles.rows * line + tiles.slots * 64 * 2)
    return replace(tiles, stages=max(min(tiles.stages, stages), 2))


def all_tiles(format: str, most: float = math.inf, shared: int = _SHARED) -> tuple[Tiles, ...]:
    """Every answer of :func:`tiles_for` where the route applies and there are up to ``most`` rows an expert."""
    least = FROM_ROWS[format]
    shares = (max(start, least) for start, _ in _PACKED)  # the tables have the same steps
    return tuple(dict.fromkeys(tiles_for(format, share, 1, shared) for share in shares if share <= max(most, least)))


# -- requirements ---------------------------------------------------------------------------------------


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layers_of(weight: Any) -> tuple[Any, ...]:
    """The weights of a table's layers, or the one weight."""
    return getattr(weight, "layers", (weight,))


def _stacks(gate_up: Any, down: Any, rows: int) -> str | None:
    """``rows``: the most slots that all experts together may have."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.format not in CODES:
            return f"{name} is {weight.format}, it knows {', '.join(CODES)}"
        dtype = layers_of(weight)[0].data.dtype
        if weight.format == "plain" and dtype is not torch.bfloat16:
            return f"{name} is {_short(dtype)}, its plain weights are bfloat16"
    experts, _, width = gate_up.shape
    if experts > MOST_EXPERTS:
        return f"{experts} experts, it looks tiles up among {MOST_EXPERTS} at most"
    inner = down.shape[2]
    if width % CHANNELS or inner % CHANNELS:
        return f"D = {width} and I = {inner} are not both multiples of {CHANNELS}"
    share, least = rows / experts, FROM_ROWS[gate_up.format]
    if share < least:
        return f"{share:g} rows an expert at most, with {gate_up.format} it was slower than the others below {least:g}"
    return None


def fits_grouped(call: Call) -> str | None:
    """Requirement of ``grouped_ffn``."""
    rows, weights, dtype = call["rows"], call["slot_weights"], call["dtype"]
    if (reason := takes_skipped(call)) is not None:
        return reason
    if rows.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"rows are {_short(rows.dtype)}, it multiplies bfloat16 or e4m3"
    if weights.dtype is not torch.float32:
        return f"slot weights are {_short(weights.dtype)}, it sums in float32"
    if dtype not in (None, torch.float32, torch.bfloat16):
        return f"the result is {_short(dtype)}, it writes float32 or bfloat16"
    return _stacks(call["gate_up"], call["down"], call["index"].shape[0])


def fits_ffn(call: Call) -> str | None:
    """Requirement of ``expert_ffn``."""
    x, weights = call["x"], call["weights"]
    if x.dtype is not torch.bfloat16:
        return f"x is {_short(x.dtype)}, it multiplies bfloat16"
    if weights.dtype is not torch.float32:
        return f"weights are {_short(weights.dtype)}, it sums in float32"
    if not call["ids"].numel():
        return "there are no pairs"
    return _stacks(call["gate_up"], call["down"], call["ids"].numel())


def fits_layout(call: Call) -> str | None:
    """Requirement of ``expert_layout``."""
    if call["weights"].dtype is not torch.float32:
        return f"weights are {_short(call['weights'].dtype)}, it moves float32"
    if not call["ids"].numel():
        return "there are no pairs"
    experts = call["experts"]
    if experts > MOST_EXPERTS:
        return f"{experts} experts, it counts {MOST_EXPERTS} at most"
    return takes_skipped(call)


def fits_sum(call: Call) -> str | None:
    """Requirement of ``expert_sum``."""
    parts = call["parts"]
    if parts.dtype not in (torch.float32, torch.bfloat16):
        return f"parts are {_short(parts.dtype)}, it adds float32 or bfloat16"
    return None if call["slots"].numel() else "there are no slots"
