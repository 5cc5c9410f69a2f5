"""Launch geometry: a pure function of a call, its algorithm and the device's room, equal on every rank (C5, C16).

Threads are those that move data; every block has one warp more, for the protocol. Grids are small enough that two
calls in a row, both spinning under dependent launch, fit the device together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from halma.hal.arena.layout import MAX_BLOCKS
from halma.hal.capabilities import Capabilities, Unknown
from halma.hal.collectives.contract import Algorithm, Call, Kind, Wire

MOST_THREADS: Final = 512
THREADS_A_PROCESSOR: Final = 2048
"""What ``resident_threads`` counts on a multiprocessor of the devices known to us; only the ratio matters."""
WORLD_WITH_FEW_REGISTERS: Final = 4
"""Up to this world size two blocks share a multiprocessor (``KERNEL`` in channel.h), beyond it one has it alone."""


@dataclass(frozen=True)
class Geometry:
    """Blocks that move data, threads of each that do, and the pieces that a block cuts its part of a shard into."""

    blocks: int
    threads: int
    pieces: int = 1


@dataclass(frozen=True)
class Step:
    """A row of the table: up to ``nbytes`` of payload in blocks of ``threads`` with ``units`` units each."""

    nbytes: int
    threads: int
    units: int = 1
    pieces: int = 1


_EVER: Final = 1 << 62
TABLE: Final = {
    # Units of 8 bytes. Measured on two H200s over NVLink, as all of this: 128 threads a block are best to 64 KB.
    Wire.WORDS: (Step(128 << 10, 128), Step(_EVER, 512)),
    # Units of 16 bytes.
    Wire.SENTINEL: (Step(192 << 10, 128), Step(768 << 10, 256), Step(_EVER, 512)),
    # Units of 16 bytes of a shard. Two pieces hide the flags' way behind the payload's where there is enough of it.
    Wire.CHUNKS: (Step(12 << 20, 512), Step(_EVER, 512, 1, 2)),
    Wire.FLAGS: (Step(_EVER, 512),),
}
"""By wire, rows in order of size; the first that holds the payload counts."""


def most_blocks(size: int, resident_threads: int) -> int:
    """Blocks of a grid of which two fit the device together, whatever their threads."""
    processors = max(1, resident_threads // THREADS_A_PROCESSOR)
    return max(1, min(MAX_BLOCKS, processors if size <= WORLD_WITH_FEW_REGISTERS else processors // 2))


def room(capabilities: Capabilities) -> int:
    """``resident_threads``, or one multiprocessor's where nobody knows: unknown means the least."""
    resident = capabilities.resident_threads
    return THREADS_A_PROCESSOR if isinstance(resident, Unknown) else resident


def norm_threads(row_units: int, warp_width: int) -> int:
    """Threads of a block for a row of ``row_units`` units: of nothing else, since the row's sum depends on it (C1)."""
    return min(MOST_THREADS, -(-row_units // warp_width) * warp_width)


def geometry(
    call: Call, algorithm: Algorithm, wire: Wire, size: int, resident_threads: int, warp_width: int, row_units: int = 0
) -> Geometry:
    """Where the table and its rule put a call.

    Args:
        row_units: units of 16 bytes in a row of a fused norm by one-shot push, else 0.
    """
    most = most_blocks(size, resident_threads)
    if call.kind is Kind.BARRIER or call.nbytes == 0:
        return Geometry(1, warp_width)
    if row_units:
        return Geometry(min(most, -(-call.nbytes // (16 * row_units))), norm_threads(row_units, warp_width))
    step = next(row for row in TABLE[wire] if call.nbytes <= row.nbytes)
    nbytes = call.nbytes
    if call.kind in (Kind.ALL_REDUCE, Kind.ALL_REDUCE_NORM) and algorithm in (
        Algorithm.TWO_SHOT,
        Algorithm.STAGED_TWO_SHOT,
    ):
        nbytes = -(-nbytes // size)
    units = -(-nbytes // (8 if wire is Wire.WORDS else 16))
    if wire in (Wire.CHUNKS, Wire.FLAGS):
        most = max(1, most - 1)  # the header has a block of its own
        most = min(most, MAX_BLOCKS // (2 if wire is Wire.FLAGS else step.pieces))
    blocks = max(1, min(most, -(-units // (step.threads * step.units))))
    pieces = step.pieces if units >= blocks * step.pieces else 1
    return Geometry(blocks, step.threads, pieces)
