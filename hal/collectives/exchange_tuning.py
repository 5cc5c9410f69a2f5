"""How an exchange is launched: rows of a table by (scale-out, scale-up, architecture), checked when chosen (F11).

A row is for exactly the layout of ranks that it was measured on. There is no nearest one: eight ranks of one machine
and two machines of four have the same number of ranks and other links, and a row of the one handed to the other is
how a public high-throughput test failed before its first launch (an eight-rank row whose chunk was below what the
two-machine kernel needs). A row names the ranks that it was measured on, so that one copied under another key is
refused too. Without a row the numbers are computed; they say *fallback*.

``python -m benchmarks.exchange --tune`` measures what can be chosen and prints a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_limits import COMBINE_UNITS, PARTS
from halma.hal.errors import CollectiveError


@dataclass(frozen=True)
class Key:
    """What a row was measured on.

    Attributes:
        scale_out: machines.
        scale_up: ranks of each.
        arch: the device's architecture, such as ``sm_90``; empty where there is one kind only.
    """

    scale_out: int
    scale_up: int
    arch: str

    def __str__(self) -> str:
        return f"{self.scale_out} x {self.scale_up} ranks of {self.arch or 'any device'}"


FALLBACK: Final = "fallback"
"""The source of launch numbers that nobody measured."""


@dataclass(frozen=True)
class Measured:
    """Where a row of the table comes from.

    Attributes:
        key: the ranks that it was measured on.
        day: as ``2026-11-30``.
        device: its name.
    """

    key: Key
    day: str
    device: str

    def __str__(self) -> str:
        return f"measured {self.day} on {self.device}, {self.key}"


@dataclass(frozen=True)
class Tuning:
    """Launch numbers.

    Attributes:
        blocks: most blocks of a grid.
        parts: most warps that share a row's way out; a power of two up to :data:`PARTS`.
        warps: warps in flight that rows are split for: a row has as many parts as keep so many busy.
        units: units of 16 bytes that a thread of combine has under way where there are many rows.
        measured: where the numbers come from; None: nobody measured them.
    """

    blocks: int
    parts: int = PARTS
    warps: int = 1024
    units: int = 1
    measured: Measured | None = None

    @property
    def source(self) -> str:
        """When and where they were measured, or :data:`FALLBACK`."""
        return FALLBACK if self.measured is None else str(self.measured)


def key_of(hosts: Sequence[str], arch: str) -> Key:
    """The key of ranks on ``hosts``, one a rank; of machines with different numbers of ranks the largest counts."""
    return Key(len(set(hosts)), max(list(hosts).count(host) for host in hosts), arch)


def computed(ranks: int, blocks: int) -> Tuning:
    """What follows from the device: all blocks that it can have. Two units a thread are for two ranks alone: with more,
    fewer of a token's experts are here, and a thread of combine has other loads under way."""
    return Tuning(blocks, units=2 if ranks == 2 else 1)


def choose_tuning(key: Key, geometry: Geometry, blocks: int, table: Mapping[Key, Tuning]) -> Tuning:
    """The row of ``key``, or what follows from the device; checked against what the kernels need.

    Args:
        blocks: most blocks of which two grids fit the device (C16).

    Raises:
        CollectiveError: the row is not one that this geometry or device can have; nothing was launched.
    """
    row = table.get(key)
    chosen = computed(geometry.ranks, blocks) if row is None else row
    found: list[str] = []
    if chosen.measured is not None:
        if chosen.measured.key != key:
            found.append(f"it was measured on {chosen.measured.key}")
        if not chosen.measured.device or not _is_day(chosen.measured.day):
            found.append(f"measured {chosen.measured.day!r} on {chosen.measured.device!r}: a day and a device's name")
    if key.scale_out * key.scale_up != geometry.ranks:
        found.append(f"{key} are {key.scale_out * key.scale_up} ranks, the geometry has {geometry.ranks}")
    if not 2 <= chosen.blocks <= max(blocks, 2):
        found.append(f"blocks {chosen.blocks}: from 2 to {max(blocks, 2)}, of which two grids fit the device")
    if chosen.parts not in (1, 2, 4, 8) or chosen.parts > PARTS:
        found.append(f"parts {chosen.parts}: 1, 2, 4 or 8")
    if chosen.warps < 1:
        found.append(f"warps {chosen.warps}: at least 1")
    if chosen.units not in COMBINE_UNITS:
        found.append(f"units {chosen.units}: {', '.join(map(str, COMBINE_UNITS))}")
    if found:
        raise CollectiveError(
            "the exchange's launch numbers do not hold here",
            asked=f"{key}; {geometry.describe()}",
            found=found,
            do="correct that row of the table; without one the numbers are computed",
        )
    return chosen


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def most_parts(units: int, tuning: Tuning, least: int) -> int:
    """The most parts that a row of ``units`` is cut into, each a multiple of ``least``."""
    parts = 1
    while 2 * parts <= tuning.parts and units % (2 * parts * least) == 0:
        parts *= 2
    return parts


def parts_of(tokens: int, most: int, warps: int) -> int:
    """Into how many parts a row is cut when a rank sends ``tokens``: the same for sender and receiver.

    Kernels have the same lines.
    """
    parts = 1
    while parts < most and tokens * parts < warps:
        parts *= 2
    return parts


TABLE: Final[Mapping[Key, Tuning]] = {}
"""Rows, each with its source."""
