"""How a call is done: a pure function of the call, the layout and values that all ranks agree on (C5).

The same arguments give the same choice at capture, at replay and on every rank; nothing here looks at a tensor, a
clock or the load of a device. In order: the measured table, where it has a row that can be used; then the first of
:data:`ORDER` whose declared range holds the call; else a :class:`Refusal` with each one's reason.

A call of no bytes (zero tokens) is a call all the same: it exchanges headers and so keeps its place in the channel's
order. A rank that left it out would be one call ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from halma.hal.arena.layout import MAX_BLOCKS, ChannelLayout
from halma.hal.capabilities import Unknown
from halma.hal.collectives.contract import WORLD_SIZES, Algorithm, Call, Choice, Kind, Refusal, Wire
from halma.hal.collectives.mixing import why_not_mixed

Way = tuple[Algorithm, Wire]

ORDER: Final[tuple[Way, ...]] = (
    (Algorithm.ONE_SHOT, Wire.WORDS),
    (Algorithm.ONE_SHOT, Wire.SENTINEL),
    (Algorithm.TWO_SHOT, Wire.CHUNKS),
    (Algorithm.STAGED, Wire.FLAGS),
    (Algorithm.STAGED_TWO_SHOT, Wire.FLAGS),
    (Algorithm.ONE_SHOT, Wire.CHUNKS),
)
"""By falling preference of sums; a small message is fastest with its flags inside. The last is for all else alone."""

MIXING_WAY: Final[Way] = (Algorithm.ONE_SHOT, Wire.SENTINEL)
WORDS_LARGEST: Final = 64 * 1024
"""Bytes. Half of the wire is flags; above, what may not travel with a sentinel takes another way."""
SENTINEL_FROM: Final = 8 * 1024
"""Bytes of a sum from which the sentinel comes first: 1.73 us against 1.94 at 8 KB, 2.06 against 2.23 at 64 KB between
two H200s (docs/results/2026-11-30-allreduce-two-h200.md)."""
STAGED_LARGEST: Final = 256 * 1024
"""Bytes that a staged one-shot sum is used for: every rank pulls the whole message of every peer."""
SUMMED: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""dtypes that are added up, in float32, and their bytes."""
REDUCTIONS: Final = (Kind.ALL_REDUCE, Kind.ALL_REDUCE_NORM)
THREADS: Final = 512
"""Most threads of a block."""
SHARD_UNIT: Final = 16
MIXING_SHARE: Final = 8
"""Of the blocks of ``THREADS`` threads that the device holds, one in so many mixes streams: two calls fit together,
beside kernels that have a multiprocessor of four such blocks to themselves."""


@dataclass(frozen=True)
class Measured:
    """A row of a measured table: calls of ``kind`` at ``size`` ranks of up to ``up_to`` bytes go this way."""

    kind: Kind
    size: int
    up_to: int
    algorithm: Algorithm
    wire: Wire
    blocks: int = 0
    threads: int = 0


Table = Sequence[Measured]


def fingerprint(table: Table) -> int:
    """32 bits that tell tables apart; ranks compare it before the first call."""
    return crc32(repr(sorted(table, key=repr)).encode())


def choose(
    call: Call,
    layout: ChannelLayout,
    size: int,
    atomicity: int | Unknown,
    *,
    table: Table = (),
    threads_there: int | None = None,
    channels: int = 1,
    mixing: bool = False,
) -> Choice | Refusal:
    """The way of a call.

    Args:
        size: ranks of the group.
        atomicity: the capability ``remote_store_atomicity``; unknown means that no flag may lie inside data (C19).
        table: measured rows.
        threads_there: threads that the device holds at once; None: no limit is known to matter.
        channels: channels whose grids may spin at the same time: all of them fit the device together (C16).
        mixing: the capability ``stream_mixing``.
    """
    reason = why_no_channel(call, size, mixing_blocks(threads_there, channels) if mixing else 0)
    if reason is not None:
        return Refusal(reason)
    most = most_blocks(threads_there, channels)
    if most < 1:
        return Refusal(f"{channels} channels of {THREADS} threads do not fit the {threads_there} that the device holds")
    rows = [row for row in table if (row.kind, row.size) == (call.kind, size) and call.nbytes <= row.up_to]
    for row in sorted(rows, key=lambda row: row.up_to):
        if why_not((row.algorithm, row.wire), call, layout, atomicity) is None:
            blocks, threads = min(row.blocks or 1, most), min(row.threads or 1, THREADS)
            return Choice(row.algorithm, row.wire, blocks, threads, "measured table")
    reasons: list[str] = []
    for way in _by_preference(call):
        reason = why_not(way, call, layout, atomicity)
        if reason is None:
            return Choice(*way, why="rule: " + _range(way, layout, call.kind))
        reasons.append(f"{name_of(way)}: {reason}")
    return Refusal("; ".join(reasons))


def _by_preference(call: Call) -> Sequence[Way]:
    if call.kind not in REDUCTIONS:
        return (*ORDER[:2], ORDER[-1], *ORDER[2:-1])
    if call.nbytes >= SENTINEL_FROM:
        return (ORDER[1], ORDER[0], *ORDER[2:])
    return ORDER


def name_of(way: Way) -> str:
    """``one_shot/words``."""
    return f"{way[0].name}/{way[1].name}".lower()


def why_no_channel(call: Call, size: int, mixing: int = 0) -> str | None:
    """Why no way at all can do a call, or None. ``mixing``: blocks that may mix streams; 0: the backend cannot."""
    if size not in WORLD_SIZES:
        return f"{size} ranks: channels are made for {', '.join(map(str, WORLD_SIZES))}"
    if call.kind is Kind.ALL_REDUCE_STREAMS:
        if mixing < 1:
            return "the backend's channels do not mix residual streams (capability stream_mixing)"
        return why_not_mixed(call.nbytes, call.dtype, call.row_length, mixing)
    if call.kind in REDUCTIONS and call.dtype not in SUMMED:
        return f"{call.dtype} is not added up on a channel, only {', '.join(SUMMED)}"
    return None


def why_not(way: Way, call: Call, layout: ChannelLayout, atomicity: int | Unknown) -> str | None:
    """Why a way cannot do a call, or None: its declared range, and what it needs of stores."""
    algorithm, wire = way
    if way not in ORDER:
        return f"{algorithm.name.lower()} does not travel by {wire.name.lower()}"
    needed = {Wire.WORDS: 8, Wire.SENTINEL: 4, Wire.CHUNKS: 4, Wire.FLAGS: 0}[wire]
    if call.kind is Kind.ALL_REDUCE_STREAMS:
        if way != MIXING_WAY:
            return f"streams are mixed by {name_of(MIXING_WAY)} alone"
        if layout.parts is None:
            return "the plan has no lane for what blocks tell each other"
    if needed and (isinstance(atomicity, Unknown) or atomicity < needed):
        return f"it needs stores of {needed} bytes that are seen whole, and remote_store_atomicity is {atomicity}"
    if algorithm in (Algorithm.TWO_SHOT, Algorithm.STAGED_TWO_SHOT) and call.kind not in REDUCTIONS:
        return "only sums are made in two phases"
    if way == (Algorithm.ONE_SHOT, Wire.CHUNKS) and call.kind in REDUCTIONS:
        return "sums that are too large for one phase in words or with a sentinel are made in two"
    if call.gives_fp8 and algorithm is not Algorithm.ONE_SHOT:
        return "the sum would need memory of its own before the norm, which is given as fp8 and is half as large"
    if wire is Wire.SENTINEL and call.dtype not in SUMMED:  # four bytes of a float64 may well be all ones (C9)
        return f"{call.dtype} may hold the sentinel as a value"
    largest = _largest(way, layout, call.kind)
    if largest is None:
        return "the plan has no lane for it"
    if call.nbytes > largest:
        return f"{call.nbytes:,} bytes are more than its {largest:,}"
    return None


def _largest(way: Way, layout: ChannelLayout, kind: Kind) -> int | None:
    """Most payload of a rank, or None where the plan has no lane."""
    algorithm, wire = way
    if wire is Wire.WORDS:
        return None if layout.words is None else min(layout.words.largest, WORDS_LARGEST)
    if wire is Wire.SENTINEL:
        return None if layout.sentinel is None else layout.sentinel.largest
    if wire is Wire.CHUNKS:
        if layout.scatter is None or layout.gather is None:
            return None
        return layout.largest if algorithm is Algorithm.TWO_SHOT else layout.gather.largest
    if layout.staging is None or layout.stage_flags is None:
        return None
    if algorithm is Algorithm.STAGED:
        # Where there is no way in two phases the one phase takes all that fits.
        most, two = layout.staging.largest, kind in REDUCTIONS and layout.stage_sum is not None
        return min(most, STAGED_LARGEST) if two else most
    return None if layout.stage_sum is None else layout.largest


def _range(way: Way, layout: ChannelLayout, kind: Kind) -> str:
    return f"up to {_largest(way, layout, kind) or 0:,} bytes"


def most_blocks(threads_there: int | None, channels: int) -> int:
    """Blocks that one call may have, so that all channels' grids fit the device together."""
    if threads_there is None:
        return MAX_BLOCKS
    return min(MAX_BLOCKS, threads_there // (THREADS * max(channels, 1)))


def mixing_blocks(threads_there: int | None, channels: int) -> int:
    """Blocks of a call that mixes streams; where nobody knows the device's room, the least."""
    return 1 if threads_there is None else max(1, threads_there // (MIXING_SHARE * THREADS * max(channels, 1)))


def verdicts(
    call: Call, layout: ChannelLayout, size: int, atomicity: int | Unknown, mixing: int = 0
) -> Iterable[tuple[str, str | None]]:
    """(name, reason against it) of every way, for the decision record. ``mixing``: blocks, as above."""
    everything = why_no_channel(call, size, mixing)
    for way in ORDER:
        yield name_of(way), everything or why_not(way, call, layout, atomicity)


def shard(nbytes: int, size: int, rank: int) -> tuple[int, int]:
    """(start, end) of the bytes that ``rank`` adds up in a two-shot: 16-byte pieces, the last ranks may get less."""
    part = -(-nbytes // (size * SHARD_UNIT)) * SHARD_UNIT
    return min(rank * part, nbytes), min((rank + 1) * part, nbytes)
