"""Where everything of a channel lies in the arena: pure arithmetic, equal on every rank (A4).

Offsets depend on capacity alone, never on a message's size. All sizes are Python ints, so 64 bits and more (A11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 256
GUARD_BYTES: Final = 256
GUARD_BYTE: Final = 0xA5
"""Guard zones are filled with it, and looked at in checked mode (A7)."""

MAX_BLOCKS: Final = 512
"""Most blocks of a call: each reads its own copy of the channel's epoch, and writes all copies that are its own."""

HEADER_BYTES: Final = 16
"""A header word on the wire: {digest, flag, spare, flag}."""


@dataclass(frozen=True)
class Lane:
    """Boxes that messages of one wire format arrive in: ``buffers x senders`` of ``box`` bytes from ``offset``.

    Attributes:
        largest: payload bytes that fit a box.
        fill: what every byte of it holds before the first use: 0, or 0xFF for the sentinel.
    """

    offset: int
    buffers: int
    senders: int
    box: int
    largest: int
    fill: int = 0

    @property
    def nbytes(self) -> int:
        """All boxes together."""
        return self.buffers * self.senders * self.box

    def at(self, buffer: int, sender: int) -> int:
        """Offset of one box."""
        return self.offset + (buffer * self.senders + sender) * self.box


@dataclass(frozen=True)
class ChannelLayout:
    """One channel's offsets.

    Attributes:
        control: offset of the control block: the epoch cells, u32 [MAX_BLOCKS]; then the words of
            :mod:`halma.hal.collectives.control`.
        headers: header words, 2 buffers x ranks, 16 bytes each.
        words, sentinel: one-shot push; None where the plan has none.
        scatter, gather: the two phases of two-shot push, one buffer each; a box holds a shard.
        chunk_flags: u32 [2 phases][ranks][MAX_BLOCKS].
        staging: what peers pull: 2 buffers, this rank the only sender. ``stage_sum`` likewise for a two-shot's sums.
        stage_flags: u32 [2 phases][ranks][MAX_BLOCKS].
        parts: what the blocks of one call on one rank tell each other (:mod:`halma.hal.collectives.mixing`); no peer
            touches it, and one buffer is enough, since a call writes it only after the call before has ended.
        largest: largest message of the channel in bytes.
        end: first byte behind it.
    """

    name: str
    size: int
    control: int
    headers: Lane
    largest: int
    end: int
    words: Lane | None = None
    sentinel: Lane | None = None
    scatter: Lane | None = None
    gather: Lane | None = None
    chunk_flags: Lane | None = None
    staging: Lane | None = None
    stage_sum: Lane | None = None
    stage_flags: Lane | None = None
    parts: Lane | None = None
    guards: tuple[int, ...] = ()
    """Offsets of the guard zones."""

    @property
    def lanes(self) -> dict[str, Lane]:
        """Every lane by name."""
        named = {
            name: getattr(self, name)
            for name in (
                "headers",
                "words",
                "sentinel",
                "scatter",
                "gather",
                "chunk_flags",
                "staging",
                "stage_sum",
                "stage_flags",
                "parts",
            )
        }
        return {name: lane for name, lane in named.items() if lane is not None}
