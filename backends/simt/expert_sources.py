"""The translation units of the routed experts: their kernels, the macros they are built with, the memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from halma.backends.simt.sources import Target, text_of
from halma.hal.backend import KernelSource
from halma.hal.errors import KernelError

HEADERS: Final = ("dialect.h", "dialect_musa.h", "matrix.h", "matrix_musa.h", "rounding.h", "expert_items.h")
FP4_HEADERS: Final = tuple(f"experts_fp4_{part}.h" for part in ("codes", "items", "rows", "thin", "tokens", "wide"))
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
"""``MOST_PAIRS`` of experts_fp4.cu."""
FP4_THIN_SLOTS = 64
"""Up to here experts have fewer tiles of rows than a device has warps, so that these share K."""
FP4_THIN_TOKENS = 4
"""That a thin launch has room for, and one pass over an expert's weights serves; hardly an expert has more there."""
FP4_MEANS = (4, 16)
"""Slots an expert up to which one pass of a wide launch serves one, and two, tiles of 8 tokens; about half are real."""
FP4_MOST = 104 * 1024
"""Bytes of shared memory up to which it serves three. Those of 4,096 columns leave 28 KB of a multiprocessor for cache
for loads under way; two do for 90 % of experts of 12."""
FP4_CARVEOUT: int | None = 44
"""Percent of the memory of a multiprocessor that wide launches of one tile, and those between, ask to have shared: 100
KB. With the driver's own choice ``expert_layout`` leaves the products less cache for loads under way."""
_FP4_STATIC: Final = 5 * 1024
_FP4_ENTRIES: Final = ("up_thin", "down_thin", "up_few", "down_few", "up_wide", "down_wide")


@dataclass(frozen=True)
class Fp4Launch:
    """A launch of experts_fp4.cu.

    Args:
        entry: the kernel.
        room: tiles of 8 tokens that one pass over the weights serves; of thin ones tokens.
    """

    entry: str
    room: int

    @property
    def threads(self) -> int:
        return 512 if self.entry.endswith("wide") else 256

    @property
    def resident(self) -> int:
        """Blocks a multiprocessor, as in the kernels' launch bounds."""
        return 1 if self.entry.endswith("wide") else 2

    def shared_bytes(self, k: int) -> int:
        """Tokens in fp16 and their scales; of thin launches also where slices of K are added up."""
        steps = k // 128
        if self.entry.endswith("wide"):
            return 8 * self.room * (2 * k + 4 * steps)
        return steps * (4 * (64 * self.room + 16) + 32) + 2 * 8 * self.room * 20 * 4


def fp4_tiling(slots: int) -> str:
    """``thin`` or ``wide``, by what pays."""
    return "thin" if slots <= FP4_THIN_SLOTS else "wide"


def fp4_launch(entry: str, slots: int, experts: int, k: int, shared_bytes: int) -> Fp4Launch:
    """How ``slots`` slots over ``experts`` experts are cut, of which about half are real.

    More tiles than the usual expert needs would take shared memory from the cache that loads go through.

    Raises:
        KernelError: they do not fit: one tile of tokens, one token of a thin launch, or all of a few.
    """
    least = 1
    if entry.endswith("wide"):
        mean = slots / max(experts, 1)
        room = 1 + sum(mean > most for most in FP4_MEANS)
        room -= room == 3 and Fp4Launch(entry, room).shared_bytes(k) > FP4_MOST
    elif entry.endswith("few"):
        room = least = max(1, slots)
    else:
        room = max(1, min(slots, FP4_THIN_TOKENS))
    for cut in (Fp4Launch(entry, tokens) for tokens in range(room, least - 1, -1)):
        if cut.shared_bytes(k) <= shared_bytes - _FP4_STATIC:
            return cut
    raise KernelError(
        f"the experts' kernels need more shared memory than a block has here ({shared_bytes:,} bytes)",
        asked=f"{least * (8 if entry.endswith('wide') else 1)} tokens of {k} columns",
        do="use another route of grouped_ffn and expert_ffn",
    )


def fp4_takes_few(pairs: int, choices: int, width: int, inner: int, shared_bytes: int) -> bool:
    """Whether blocks can lay so many pairs out themselves."""
    if not 0 < pairs <= FP4_PAIRS:
        return False
    try:
        fp4_launch("up_few", pairs // choices, 1, width, shared_bytes)
        fp4_launch("down_few", pairs, 1, inner, shared_bytes)
    except KernelError:
        return False
    return True


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
        headers = {**_headers(), **{name: text_of(name) for name in FP4_HEADERS}}
        return KernelSource(
            "experts_fp4", text_of("experts_fp4.cu"), headers, _defines(target), _carveout("up_wide", "down_wide")
        )
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
    text = text_of("expert_rows.cu")
    return KernelSource("expert_rows", text, _headers(), _defines(target), _carveout(*ROW_ENTRIES))


def product_entries(bits: int) -> tuple[str, ...]:
    """Kernels of :func:`products_source`: ``raw`` ones round their tokens themselves, as all do for 4 bits."""
    if bits == 4:
        return _FP4_ENTRIES
    thin = ("down_thin",) if bits == 16 else ("up_thin_raw", "down_thin_raw")
    return ("up_thin", "up_wide", "down_wide", "up_few", "down_few", *thin)


ROW_ENTRIES: Final = ("expert_layout", "round_float32", "round_bfloat16", "expert_sum")


def _headers() -> dict[str, str]:
    return {name: text_of(name) for name in HEADERS}


def _carveout(*entries: str) -> dict[str, int]:
    return {} if FP4_CARVEOUT is None else dict.fromkeys(entries, FP4_CARVEOUT)
