"""The translation units of the routed experts: their kernels, the macros they are built with, the memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from halma.backends.simt.sources import Target, text_of
from halma.hal.backend import KernelSource
from halma.hal.errors import KernelError

HEADERS: Final = ("dialect.h", "dialect_musa.h", "matrix.h", "matrix_musa.h", "rounding.h", "expert_items.h")
BITS: Final = {"plain": 16, "fp8_block128": 8, "fp4_block32": 4}
"""Bits of a weight by its format; plain ones are bf16."""
FRAGMENT_LANES: Final = 32
"""Of a warp that holds the fragments of a product (matrix.h)."""
MOST_EXPERTS: Final = 256
MOST_PAIRS: Final = 64
"""(token, expert) pairs that every block lays out for itself, without a launch before."""
MOST_STAGES: Final = 6
"""More would be further ahead than the memory's latency times its bandwidth."""

_WARPS, _UNIT = 8, 4096
_SCALES: Final = {16: 0, 8: 16}
_TOKEN: Final = {16: 128, 8: 128}
_BLOCKS: Final = {16: 0, 8: 1}
_WIDTH: Final = {16: 64, 8: 512, 4: 512}
"""Columns that K is a multiple of."""
_STATIC: Final = 13 * 1024
"""Bytes of shared memory kept for the kernels' own tables."""


@dataclass(frozen=True)
class Tiling:
    """How a block of experts.cu is cut; of experts_fp4.cu it is the name alone.

    Args:
        name: ends the names of its kernels.
        pairs: groups of 32 weight rows at a time; the eight warps share K by 8 / pairs.
        tokens: that one pass over a tile of weights serves.
    """

    name: str
    pairs: int
    tokens: int

    def stage_bytes(self, bits: int) -> int:
        """``STAGE`` in experts.cu: the weights of eight warps and the tokens at the same columns."""
        slices = _WARPS // self.pairs
        tokens = slices * self.tokens * (_TOKEN[bits] + 4 * _BLOCKS[bits])
        return -(-(_WARPS * (_UNIT + _SCALES[bits]) + tokens) // 128) * 128

    def sum_bytes(self) -> int:
        """``SUMS`` in experts.cu: where slices of K are added up."""
        return 0 if self.pairs == _WARPS else _WARPS * self.tokens * 36 * 4

    def stages(self, bits: int, shared_bytes: int) -> int:
        """As many as fit.

        Raises:
            KernelError: fewer than two do.
        """
        fit = (shared_bytes - _STATIC - self.sum_bytes()) // self.stage_bytes(bits)
        if fit < 2:
            raise KernelError(
                f"the experts' kernels need more shared memory than a block has here ({shared_bytes:,} bytes)",
                asked=f"two stages of {self.stage_bytes(bits):,} bytes",
                do="use another route of grouped_ffn and expert_ffn",
            )
        return min(fit, MOST_STAGES)

    def shared_bytes(self, bits: int, stages: int) -> int:
        """What a launch asks for."""
        return stages * self.stage_bytes(bits) + self.sum_bytes()


THIN: Final = Tiling("thin", 1, 8)
"""Few rows an expert: many small items, K shared by all warps."""
WIDE: Final = Tiling("wide", 8, 32)
"""More rows: tokens are read once for 256 weight rows."""
TILINGS: Final = {tiling.name: tiling for tiling in (THIN, WIDE)}


FP4_PAIRS: Final = 8
"""``MOST_PAIRS`` of experts_fp4.cu: one tile of tokens."""
FP4_THIN_SLOTS = 64
"""Up to here experts have fewer tiles of rows than a device has warps, so that these share K."""
FP4_MEANS = (4, 1e9)
"""Slots an expert up to which one pass of a wide launch serves one, and two, tiles of 8 tokens; about half are real.
Three of 4,096 columns leave 28 KB of a multiprocessor as cache for loads under way; two do for 90 % of experts of 12.
"""
FP4_ROOM = True
"""Thin launches take shared memory for the tokens there can be, else for eight."""
FP4_BATCH = 3
"""Groups of 8 columns that a thread of ``down_few`` loads before it rounds the first; up to two of them in the other
kernels that have few tokens."""
FP4_CHAINS = 2
"""Sums of a step that thin launches have under way side by side, 1 or 2."""
FP4_CARVEOUT: int | None = 44
"""Percent of the memory of a multiprocessor that wide launches of one tile, and those between, ask to have shared: 100
KB. With the driver's own choice ``expert_layout`` leaves the products less cache for loads under way."""
_FP4_SUMS: Final = 2 * 8 * 8 * 20 * 4
_FP4_STATIC: Final = 5 * 1024
_FP4_RESIDENT: Final = {"up_thin": 2, "up_few": 2, "down_thin": 3, "down_few": 3, "up_wide": 1, "down_wide": 1}
"""Blocks a multiprocessor, as in the kernels' launch bounds."""


@dataclass(frozen=True)
class Fp4Launch:
    """A launch of experts_fp4.cu.

    Args:
        entry: the kernel.
        tiles: of 8 tokens, that one pass over a tile of weights serves.
        tokens: of thin ones, that there is room for.
    """

    entry: str
    tiles: int
    tokens: int = 8

    @property
    def threads(self) -> int:
        return 512 if self.entry.endswith("wide") else 256

    @property
    def resident(self) -> int:
        return _FP4_RESIDENT[self.entry]

    @property
    def room(self) -> int:
        """What the kernel is told: tiles, or tokens of a thin one."""
        return self.tiles if self.entry.endswith("wide") else self.tokens

    def shared_bytes(self, k: int) -> int:
        """fp16 tokens, their scales, and where slices of K are added up."""
        tokens = 8 * self.tiles if self.entry.endswith("wide") else self.tokens
        return tokens * 2 * k + self.tiles * (k // 128 * 32) + (0 if self.entry.endswith("wide") else _FP4_SUMS)


def fp4_tiling(slots: int) -> str:
    """``thin`` or ``wide``, by what pays."""
    return "thin" if slots <= FP4_THIN_SLOTS else "wide"


def fp4_launch(entry: str, slots: int, experts: int, k: int, shared_bytes: int) -> Fp4Launch:
    """How ``slots`` slots over ``experts`` experts are cut, of which about half are real.

    More tiles than the usual expert needs would take shared memory from the cache that loads go through.

    Raises:
        KernelError: no tile of tokens fits.
    """
    tiles = 1
    if entry.endswith("wide"):
        mean = slots / max(experts, 1)
        tiles = 1 + sum(mean > most for most in FP4_MEANS)
    tokens = max(1, min(slots, 8)) if FP4_ROOM else 8
    while tiles and Fp4Launch(entry, tiles, tokens).shared_bytes(k) > shared_bytes - _FP4_STATIC:
        tiles -= 1
    if not tiles:
        raise KernelError(
            f"the experts' kernels need more shared memory than a block has here ({shared_bytes:,} bytes)",
            asked=f"8 tokens of {k} columns",
            do="use another route of grouped_ffn and expert_ffn",
        )
    return Fp4Launch(entry, tiles, tokens)


def why_not_sizes(bits: int, width: int, inner: int) -> str | None:
    """Why the kernels cannot do experts of these sizes, or None."""
    unit = _WIDTH[bits]
    for name, size in (("D", width), ("I", inner)):
        if size % unit:
            return f"{name} = {size} is no multiple of {unit}"
    return None


def why_not_wide(width: int, inner: int) -> str | None:
    """Why experts of these sizes cannot be cut into wide items, or None."""
    rows = WIDE.pairs * 32
    if inner % (rows // 2) or width % rows:
        return f"D = {width} and I = {inner} are not whole tiles of {rows} and {rows // 2}"
    return None


def tiling_of(slots: int, experts: int, width: int, inner: int) -> Tiling:
    """What pays: thin items up to two slots an expert, where all are busy or nothing else fits the sizes."""
    return THIN if slots <= 2 * experts or why_not_wide(width, inner) is not None else WIDE


def _defines(target: Target) -> dict[str, str]:
    return {
        f"HALMA_{target.dialect.upper()}": "1",
        "HALMA_WARP": f"{target.warp_width}u",
        "HALMA_DEPENDENT_LAUNCH": str(int(target.dependent_launch)),
        "HALMA_STORE_ATOMICITY": "0",
        **({} if target.clock_khz is None else {"HALMA_CLOCK_KHZ": f"{target.clock_khz}ull"}),
    }


def products_source(bits: int, shared_bytes: int, target: Target) -> KernelSource:
    """The products of weights of ``bits`` bits on a device whose blocks have ``shared_bytes`` of shared memory."""
    if bits == 4:
        defines = {
            **_defines(target),
            "HALMA_FP4_BATCH": f"{FP4_BATCH}u",
            "HALMA_FP4_CHAINS": f"{FP4_CHAINS}u",
        }
        carveout = {} if FP4_CARVEOUT is None else {"up_wide": FP4_CARVEOUT, "down_wide": FP4_CARVEOUT}
        return KernelSource("experts_fp4", text_of("experts_fp4.cu"), _headers(), defines, carveout)
    defines = {
        **_defines(target),
        "HALMA_BITS": str(bits),
        "HALMA_THIN_STAGES": f"{THIN.stages(bits, shared_bytes)}u",
        "HALMA_WIDE_STAGES": f"{WIDE.stages(bits, shared_bytes)}u",
        "HALMA_THIN_BYTES": f"{THIN.stage_bytes(bits)}u",
        "HALMA_WIDE_BYTES": f"{WIDE.stage_bytes(bits)}u",
        "HALMA_SUM_BYTES": f"{THIN.sum_bytes()}u",
    }
    return KernelSource(f"experts_{bits}", text_of("experts.cu"), _headers(), defines)


def rows_source(target: Target) -> KernelSource:
    """expert_rows.cu."""
    carveout: dict[str, int] = {}
    if FP4_CARVEOUT is not None:
        carveout.update((entry, FP4_CARVEOUT) for entry in ROW_ENTRIES)
    return KernelSource("expert_rows", text_of("expert_rows.cu"), _headers(), _defines(target), carveout)


def product_entries(bits: int) -> tuple[str, ...]:
    """Kernels of :func:`products_source`: ``raw`` ones round their tokens themselves, as all do for 4 bits."""
    if bits == 4:
        return tuple(_FP4_RESIDENT)
    thin = ("down_thin",) if bits == 16 else ("up_thin_raw", "down_thin_raw")
    return ("up_thin", "up_wide", "down_wide", "up_few", "down_few", *thin)


ROW_ENTRIES: Final = ("expert_layout", "round_float32", "round_bfloat16", "expert_sum")


def _headers() -> dict[str, str]:
    return {name: text_of(name) for name in HEADERS}
