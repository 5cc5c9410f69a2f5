"""Compiles the Triton products for one architecture without a device and says what came out: run in its own process.

    python -m tests.compile.triton_build 90

In its own, since whether Triton compiles or interprets is decided for a process when Triton is imported.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halma.backends.triton import products, rows

SIZES = {"D": 4096, "INNER": 2048}
CUT = {"EXPERTS": 128, "EXPERTS_2": 128, "TILE_W": 256, "TILE_T": 32, "PIECE": 16, "STAGES": 4, "WIDE": False}
FP4 = {"weight": "*i32", "scale": "*i16"}
TABLE = {"weight": "*i64", "scale": "*i64"}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "gate_up": (
        products.gate_up_kernel,
        {"x": "*bf16", "index": "*i32", "slot_weights": "*fp32", "counts": "*i32", "offsets": "*i32", "layer": "*i32",
         "hidden": "*fp32", "limit": "fp32", **FP4},
        {**SIZES, **CUT, "STRIDE": 4096, "ORDER": 1, "CODES": 8, "TABLE": False},
    ),
    "down": (
        products.down_kernel,
        {"hidden": "*bf16", "counts": "*i32", "offsets": "*i32", "layer": "*i32", "out": "*fp32", **TABLE},
        {**SIZES, **CUT, "CODES": 4, "TABLE": True},
    ),
    "stage": (
        rows.stage_kernel,
        {"x": "*bf16", "scales": "*fp32", "staged": "*bf16", "count": "i32", "end": "*i32"},
        {"K": 4096, "STRIDE": 4096, "CODES": 8, "ROUND": True, "SCALED": False, "BOUNDED": True, "ROWS": 32},
    ),
}  # fmt: skip
ALIGNED = ("x", "hidden", "weight", "scale", "out", "staged")


def build(name: str, arch: int) -> dict[str, Any]:
    """One kernel's shared memory, the sizes of its asynchronous copies (bytes), which generation's products it has."""
    kernel, types, constants = KERNELS[name]
    names = kernel.arg_names
    signature = {each: types.get(each, "constexpr") for each in names}
    divisible = {(names.index(each),): [["tt.divisibility", 16]] for each in ALIGNED if each in types}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    found: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8, "num_stages": 4})
    text = found.asm["ptx"]
    words = [word for word in ("mma.sync", "wgmma.mma_async", "tcgen05.mma") if word in text]
    copies = {int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (\w+)", text)}
    return {
        "shared": found.metadata.shared,
        "copies": sorted(copies),
        "words": words,
        "binary": len(found.asm["cubin"]),
    }


if __name__ == "__main__":
    print(json.dumps({name: build(name, int(sys.argv[1])) for name in KERNELS}))
