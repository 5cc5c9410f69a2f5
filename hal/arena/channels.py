"""Where the lanes of a channel go: what each needs at a world size, and the cap of one-shot that makes all fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halma.hal.arena.layout import HEADER_BYTES, MAX_BLOCKS, ChannelLayout, Lane
from halma.hal.arena.sizes import Cursor, down, up
from halma.hal.collectives.control import CONTROL_BYTES
from halma.hal.collectives.mixing import PART_BYTES

BUFFERS: Final = 2
"""By parity of the epoch; two are enough as long as every call exchanges headers (docs/protocol.md)."""
PHASES: Final = 2
"""Of a two-shot: scatter and gather. One buffer each is enough."""
WORDS_PAYLOAD: Final = 64 * 1024
"""Most payload of a {data, flag} message: half of its wire is flags, and above this the sentinel is faster."""
CAP_STEP: Final = 4096
"""A cap below the largest message is rounded down to it, so that it reads as a number and not as a remainder."""
SENTINEL_FILL: Final = 0xFF


@dataclass(frozen=True)
class Lanes:
    """Which lanes a channel gets.

    Args:
        words: {data, flag} pairs, which need stores of 8 bytes that are seen whole.
        push: sentinel one-shot, two-shot in chunks; they need stores of 4 bytes that are seen whole.
        staged: what peers pull; nothing is assumed of stores.
    """

    words: bool
    push: bool
    staged: bool

    def __str__(self) -> str:
        named = (("words", self.words), ("push", self.push), ("staged", self.staged))
        return " and ".join(name for name, there in named if there)


def shard(nbytes: int, size: int) -> int:
    """Bytes of a box that holds one rank's part of ``nbytes``."""
    return up(-(-nbytes // size))


def place(name: str, size: int, start: int, largest: int, lanes: Lanes, share: int) -> ChannelLayout:
    """A channel from ``start`` on, with as large a cap of sentinel one-shot as ``share`` bytes allow.

    The layout may end beyond ``start + share``: then it does not fit, even without sentinel.
    """
    without = _place(name, size, start, largest, lanes, cap=0)
    if not lanes.push:
        return without
    smallest = _place(name, size, start, largest, lanes, cap=up(1))
    fits = up(1) + (start + share - smallest.end) // (BUFFERS * size)
    cap = up(largest) if fits >= up(largest) else down(fits, CAP_STEP)
    return _place(name, size, start, largest, lanes, cap=cap) if cap > 0 else without


def _place(name: str, size: int, start: int, largest: int, lanes: Lanes, cap: int) -> ChannelLayout:
    cursor = Cursor(start)
    layout = head(cursor, name, size, largest)
    if lanes.words:
        payload = min(WORDS_PAYLOAD, up(largest, 8))
        layout = replace(layout, words=_lane(cursor, BUFFERS, size, 2 * payload, payload))
    if lanes.push and cap:
        layout = replace(layout, sentinel=_lane(cursor, BUFFERS, size, cap, cap, SENTINEL_FILL))
    if lanes.push:
        part = shard(largest, size)
        scatter, gather = (_lane(cursor, 1, size, part, part) for _ in range(PHASES))
        layout = replace(layout, scatter=scatter, gather=gather, chunk_flags=flags(cursor, size))
        layout = replace(layout, parts=_lane(cursor, 1, 1, PART_BYTES, PART_BYTES))
    if lanes.staged:
        layout = replace(layout, stage_flags=flags(cursor, size))
        layout = staging(cursor, layout, up(largest), shard(largest, size))
    return finished(cursor, layout)


def head(cursor: Cursor, name: str, size: int, largest: int) -> ChannelLayout:
    """What every channel begins with: control block and header words."""
    control = cursor.take(CONTROL_BYTES)
    headers = Lane(cursor.take(BUFFERS * size * HEADER_BYTES), BUFFERS, size, HEADER_BYTES, HEADER_BYTES)
    return ChannelLayout(name, size, control, headers, largest, end=0)


def flags(cursor: Cursor, size: int) -> Lane:
    """A flag word for each phase, rank and block."""
    return _lane(cursor, PHASES, size, 4 * MAX_BLOCKS, 4 * MAX_BLOCKS)


def staging(cursor: Cursor, layout: ChannelLayout, box: int, part: int) -> ChannelLayout:
    """``layout`` with the memory that peers pull messages and sums from; this rank is its only writer."""
    message = _lane(cursor, BUFFERS, 1, box, box)
    return replace(layout, staging=message, stage_sum=_lane(cursor, BUFFERS, 1, part, part))


def finished(cursor: Cursor, layout: ChannelLayout) -> ChannelLayout:
    """``layout`` with its end and guard zones."""
    return replace(layout, end=cursor.end, guards=tuple(cursor.guards))


def _lane(cursor: Cursor, buffers: int, senders: int, box: int, largest: int, fill: int = 0) -> Lane:
    box = up(box)
    return Lane(cursor.take(buffers * senders * box), buffers, senders, box, largest, fill)
