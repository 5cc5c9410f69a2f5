"""The translation unit of the routed experts for many rows an expert: experts_many.cu and what it is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from halma.backends.simt.sources import Target, text_of
from halma.hal.backend import KernelSource

HEADERS: Final = ("dialect.h", "dialect_musa.h", "matrix.h", "matrix_musa.h", "warpgroup.h", "rounding.h")
ENTRIES: Final = ("up_many", "down_many", "stage_bfloat16", "stage_float32", "stage_e4m3")
THREADS: Final = 3 * 128
"""Of a block that multiplies: a group that copies, two that multiply."""
MOST_EXPERTS: Final = 256
TILE: Final = 128
"""Weight rows of an item, and the columns that all sizes are multiples of."""


FROM_ROWS: Final = 40
"""Slots an expert from which this way is taken, at worst: V4-Flash with 128 of 256 experts here has 24 at 512 tokens,
where the way of few rows took 0.76 ms on an H200, and 96 at 2,048, where this took 1.06 and Triton's 1.34."""


@dataclass(frozen=True)
class Size:
    """How many tokens an item has at most, and how many stages of them a block holds.

    Args:
        most: 64, 128 or 256 tokens: the more, the less often weights are decoded; the fewer, the more stages fit.
        stages: the ring's; 26 KiB of weights and more are under way, the memory's latency times its bandwidth.
    """

    most: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        """``STAGE`` in experts_many.cu: 128 columns of the tokens in bf16, of 128 weight rows, their scales."""
        return -(-(256 * self.most + TILE * 64 + TILE * 4) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """What a launch asks for: stages begin at a multiple of 1,024."""
        return self.stages * self.stage_bytes + 1024


SIZES: Final = (Size(64, 8), Size(128, 5), Size(256, 3))


def size_of(slots: int, experts: int) -> Size:
    """What pays for so many slots: most experts should be done in one pass."""
    mean = slots / experts
    return SIZES[0] if mean <= 96 else SIZES[1] if mean <= 192 else SIZES[2]


def why_not_sizes(width: int, inner: int) -> str | None:
    """Why the kernels cannot do experts of these sizes, or None."""
    for name, size in (("D", width), ("I", inner)):
        if size % TILE:
            return f"{name} = {size} is no multiple of {TILE}"
    return None


def first_eight(expert: int, offset: int) -> int:
    """Where an expert's staged tokens begin, in eights of them; ``first_eight`` in experts_many.cu."""
    return offset // 8 + expert


def staged_bytes(slots: int, experts: int, width: int) -> int:
    """Bytes of staged tokens of ``width`` columns: eights of them, every expert's last one part filled."""
    return (slots // 8 + experts + 1) * 8 * width * 2


def group_product(n: int) -> str:
    """``GroupProduct<n>`` of warpgroup.h: one instruction with n / 2 sums a thread."""
    sums = n // 2
    listed = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return f"""template <> struct GroupProduct<{n}u> {{
  DEVICE void run(float* d, const u32* a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{listed}}}, "
                 "{{%{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}}}, %{sums + 4}, 1, 1, 1, 0;"
                 : {operands}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }}
}};
"""


def many_source(size: Size, target: Target) -> KernelSource:
    """experts_many.cu for items of up to ``size.most`` tokens."""
    defines = {
        f"HALMA_{target.dialect.upper()}": "1",
        "HALMA_WARP": f"{target.warp_width}u",
        "HALMA_DEPENDENT_LAUNCH": str(int(target.dependent_launch)),
        "HALMA_STORE_ATOMICITY": "0",
        "HALMA_MOST": f"{size.most}u",
        "HALMA_STAGES": f"{size.stages}u",
        "HALMA_STAGE_BYTES": f"{size.stage_bytes}u",
        **({} if target.clock_khz is None else {"HALMA_CLOCK_KHZ": f"{target.clock_khz}ull"}),
    }
    headers = {name: text_of(name) for name in HEADERS}
    headers["group_products.h"] = "".join(group_product(n) for n in range(16, size.most + 1, 16))
    return KernelSource(f"experts_many_{size.most}", text_of("experts_many.cu"), headers, defines)
