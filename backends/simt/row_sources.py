"""The translation unit rows.cu: its kernels and the macros it is built with."""

from __future__ import annotations

from typing import Final

from halma.backends.simt.gemv_tiles import TILES
from halma.backends.simt.sources import Target, text_of
from halma.hal.backend import KernelSource

HEADERS: Final = ("dialect.h", "dialect_musa.h", "rounding.h")
ENTRIES: Final = (
    *(f"gemv_{tile}" for tile in TILES),
    *(f"gemv_codes_{tile}" for tile in TILES),
    "quantise_bfloat16",
    "quantise_float32",
    "swiglu_bfloat16",
    "swiglu_fp8_bfloat16",
    "swiglu_fp8_float16",
    "rotate_bfloat16",
)


def rows_source(target: Target) -> KernelSource:
    """rows.cu for a device."""
    defines = {
        f"HALMA_{target.dialect.upper()}": "1",
        "HALMA_WARP": f"{target.warp_width}u",
        "HALMA_DEPENDENT_LAUNCH": str(int(target.dependent_launch)),
        "HALMA_STORE_ATOMICITY": "0",
        **({} if target.clock_khz is None else {"HALMA_CLOCK_KHZ": f"{target.clock_khz}ull"}),
    }
    return KernelSource("rows", text_of("rows.cu"), {name: text_of(name) for name in HEADERS}, defines)
