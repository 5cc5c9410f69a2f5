"""Tiles of the GEMV kernels of rows.cu: measured ones by exact device and shape, a rule for every other.

A tile BNxBK is a block of BN rows of the weight, each read by BK threads. A measured row is for exactly one
architecture, its numbers of multiprocessors, one N and K, and the numbers of rows it names; there is no nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TILES: Final = ("4x32", "8x16", "16x8", "32x4")
MOST_ROWS: Final = 64
S5000: Final = (48, 56, 60)
"""Multiprocessors of the parts called S5000."""
_VLLM_MUSA: Final = "reported by vllm-musa: MooreThreads/vllm-musa csrc/musa/gemv.mu"


@dataclass(frozen=True)
class TileRow:
    """One measured choice.

    Attributes:
        use: the product it was measured for.
        arch, multiprocessors: the devices it is for.
        n, k: rows of the weight, of one group where there are several, and columns.
        rows: M, each of them.
        source: who measured; we have no such device.
    """

    use: str
    arch: str
    multiprocessors: tuple[int, ...]
    n: int
    k: int
    rows: tuple[int, ...]
    tile: str
    source: str


MEASURED: Final = (
    TileRow("output projection", "mp_31", S5000, 1024, 4096, (1, 2, 8), "4x32", _VLLM_MUSA),
    TileRow("output projection", "mp_31", S5000, 1024, 4096, (4, 32, 64), "8x16", _VLLM_MUSA),
    TileRow("output projection", "mp_31", S5000, 1024, 4096, (16,), "32x4", _VLLM_MUSA),
    TileRow("shared gate and up", "mp_31", S5000, 512, 4096, (1,), "4x32", _VLLM_MUSA),
    # The routed experts' products at one row, with 256 experts. No route of ours takes a tile for them.
    TileRow("routed gate and up", "mp_31", S5000, 512, 4096, (6,), "4x32", _VLLM_MUSA),
    TileRow("routed down", "mp_31", S5000, 4096, 256, (1,), "32x4", _VLLM_MUSA),
)
_ROUTED: Final = ("routed gate and up", "routed down")


def measured(arch: str, multiprocessors: int, n: int, k: int, rows: int) -> TileRow | None:
    """The measured row for this product on this device, or None."""
    for row in MEASURED:
        if row.use in _ROUTED or row.arch != arch or multiprocessors not in row.multiprocessors:
            continue
        if (row.n, row.k) == (n, k) and rows in row.rows:
            return row
    return None


def tile_of(arch: str, multiprocessors: int, n: int, k: int, rows: int) -> tuple[str, str]:
    """The tile of a product, and why: the measured row's source, or the rule.

    The rule gives a row of the weight as many threads as its columns feed with 16 bytes each. It does not look at the
    rows of x, so that their number does not change a row's bits; measured rows do.
    """
    found = measured(arch, multiprocessors, n, k, rows)
    if found is not None:
        return found.tile, found.source
    return next((tile for tile in TILES if int(tile.partition("x")[2]) * 16 <= k), TILES[-1]), "rule"
