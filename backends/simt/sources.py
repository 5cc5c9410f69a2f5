"""The translation units of the collectives: which kernels are in which, and the macros they are built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from halma.backends.simt import memory_order
from halma.hal.arena.layout import HEADER_BYTES
from halma.hal.backend import KernelPart, KernelSource
from halma.hal.capabilities import Capabilities, Unknown
from halma.hal.collectives import control, exchange_limits, mixing, ring_plan
from halma.hal.collectives.contract import FLIGHT_BYTES, WORLD_SIZES
from halma.hal.errors import KernelError

DTYPES: Final = ("bfloat16", "float16", "float32")
MIXED_DTYPES: Final = ("bfloat16", "float16")
ROW_COUNTS: Final = (1, 2, 4, 8)
"""That the kernels of streams.cu are written for; a call takes the first that holds its rows."""
HEADERS: Final = (
    "dialect.h",
    "dialect_musa.h",
    "channel.h",
    "payload.h",
    "numbers.h",
    "push.h",
    "chunks.h",
    "norm.h",
    "streams.h",
    "ring.h",
    "ring_serve.h",
    "exchange.h",
    "exchange_send.h",
    "exchange_sort.h",
    "exchange_sums.h",
    "combine_many.h",
)
EXCHANGE: Final = ("dispatch", "dispatch_kept", "combine")
"""Units that an exchange loads (:class:`halma.backends.simt.exchange.SimtExchange`), and no channel; with them
``combine_2`` or ``combine_4`` where its tuning asks for so many units a thread."""
COMBINE_THREADS: Final = {1: 512, 2: 256, 4: 192}
"""Threads of a block that move data, by units that each has under way: of all the registers that half a multiprocessor
has, none needs more than is there."""
SITE_FIELDS: Final = (
    "headers",
    "words",
    "words_box",
    "chunk_flags",
    "chunk_flags_phase",
    "stage_flags",
    "stage_flags_phase",
    "flags_box",
    "scatter",
    "scatter_box",
    "gather",
    "gather_box",
    "staging",
    "staging_stride",
    "stage_sum",
    "stage_sum_stride",
    "recorder",
    "recorder_entries",
    "parts",
)
"""Names of ``SiteField`` in channel.h, in its order."""
RING_FIELDS: Final = (
    "rank",
    "attention",
    "ffn",
    "depth",
    "max_tokens",
    "choices",
    "row_units",
    "reply_units",
    "slots",
    "credits",
    "item_bytes",
    "item_ids",
    "item_weights",
    "item_rows",
    "reply_bytes",
    "reply_rows",
    "sent",
    "collected",
    "filled",
    "taken",
    "header",
    "tokens",
    "place",
    "item_header",
    "layers",
    "served",
    "replied",
    "turn",
    "item",
    "totals",
)
"""Names of ``RingField`` in ring.h, in its order."""
COLLECTED: Final = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "float32"),
)
"""Dtypes of replies, and of what they are added up to."""


@dataclass(frozen=True)
class Unit:
    """A translation unit and its kernels.

    Attributes:
        push: it needs loads that bypass the first-level cache.
        channel: it is for channels; the others' drivers load their own.
    """

    file: str
    entries: tuple[str, ...]
    push: bool
    channel: bool = True


def _by_dtype(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_{dtype}" for name in names for dtype in DTYPES)


UNITS: Final = {
    "reduce": Unit(
        "reduce.cu",
        _by_dtype(*(f"all_reduce_{way}" for way in ("words", "words_one", "sentinel", "sentinel_one", "chunks"))),
        True,
    ),
    "move": Unit(
        "move.cu",
        (
            *(f"{kind}_{way}" for kind in ("all_gather", "broadcast") for way in ("words", "sentinel", "chunks")),
            "barrier_words",
        ),
        True,
    ),
    "norm": Unit("norm.cu", _by_dtype("norm_words", "norm_words_wide", "norm_sentinel", "norm_sentinel_wide"), True),
    "streams": Unit(
        "streams.cu",
        tuple(f"streams_{rows}_{dtype}" for dtype in MIXED_DTYPES for rows in (*ROW_COUNTS, "wide")),
        True,
    ),
    "dispatch": Unit("dispatch.cu", ("dispatch_plain", "dispatch_fp8"), True, channel=False),
    "dispatch_kept": Unit("dispatch_kept.cu", ("dispatch_kept_plain", "dispatch_kept_fp8"), True, channel=False),
    "combine": Unit(
        "combine.cu",
        ("combine_bfloat16", "combine_bfloat16_wide", "combine_float32"),
        True,
        channel=False,
    ),
    **{
        f"combine_{units}": Unit(
            f"combine_{units}.cu",
            tuple(f"combine_{units}_{how}" for how in ("bfloat16", "bfloat16_wide", "float32")),
            True,
            channel=False,
        )
        for units in exchange_limits.COMBINE_UNITS[1:]
    },
    "norm_alone": Unit("norm_alone.cu", _by_dtype("norm_alone", "norm_alone_wide"), False),
    "staged": Unit(
        "staged.cu",
        (
            *_by_dtype("all_reduce_staged", "all_reduce_staged_two_shot"),
            "all_gather_staged",
            "broadcast_staged",
            "barrier_staged",
        ),
        False,
    ),
    "ring": Unit(
        "ring.cu",
        (
            "ring_plan",
            "ring_send",
            *(f"ring_collect_{a}_{b}" for a, b in COLLECTED),
            "ring_take",
            "ring_reply",
            "ring_next",
            "ring_take_next",
            "ring_reply_next",
        ),
        False,
        channel=False,
    ),
}


@dataclass(frozen=True)
class Target:
    """What a device is to the kernels; from its capabilities (:meth:`of`).

    Attributes:
        dialect: ``cuda`` or ``musa``.
        atomicity: bytes of a store to a peer that are never seen in part, 0 where nobody has probed.
        clock_khz: rate of the device's clock where it does not count nanoseconds itself (MUSA).
    """

    dialect: str
    warp_width: int
    dependent_launch: bool
    atomicity: int
    clock_khz: int | None = None

    @staticmethod
    def of(kernels: KernelPart, capabilities: Capabilities, clock_khz: int | None = None) -> Target:
        """Unknown counts as off (B8); a warp's width must be known. ``clock_khz``: instead of the kernel part's.

        Raises:
            CapabilityError: it is not.
        """
        atomicity = capabilities.remote_store_atomicity
        return Target(
            kernels.dialect,
            int(capabilities.need("warp_width", for_="the collective kernels")),
            capabilities.dependent_launch is True,
            0 if isinstance(atomicity, Unknown) else atomicity,
            kernels.clock_khz if clock_khz is None else clock_khz,
        )


@cache
def text_of(name: str) -> str:
    """The text of a file of ``kernels/``."""
    return (files("halma.backends.simt") / "kernels" / name).read_text(encoding="utf-8")


def source(unit: str, size: int, target: Target, *, without: tuple[str, ...] = ()) -> KernelSource:
    """One translation unit for a world of ``size`` ranks.

    Args:
        without: ``header``, ``bounds`` or ``recorder``, to measure what each costs. Never in a channel that is used.

    Raises:
        KernelError: a world size that the kernels are not written for.
    """
    if size not in WORLD_SIZES:
        raise KernelError(
            f"no collective kernels for {size} ranks", found=f"world sizes {', '.join(map(str, WORLD_SIZES))}"
        )
    defines = {
        f"HALMA_{target.dialect.upper()}": "1",
        "HALMA_SIZE": str(size),
        "HALMA_WARP": f"{target.warp_width}u",
        "HALMA_DEPENDENT_LAUNCH": str(int(target.dependent_launch)),
        "HALMA_STORE_ATOMICITY": str(target.atomicity),
        "HALMA_HEADER_FENCED": str(int(target.atomicity < 8)),
        "HALMA_HEADER_BYTES": f"{HEADER_BYTES}u",
        "HALMA_FLIGHT_BYTES": f"{FLIGHT_BYTES}u",
        "HALMA_SITE_FIELDS": str(len(SITE_FIELDS)),
        "HALMA_RING_FIELDS": str(len(RING_FIELDS)),
        "HALMA_RING_FLAGS": f"{ring_plan.FLAGS}u",
        "HALMA_RING_SPLITS": f"{ring_plan.SPLITS}u",
        "HALMA_RING_HEADER_WORDS": f"{len(ring_plan.HEADER_WORDS)}u",
        "HALMA_RING_SLOT_WORDS": f"{ring_plan.SLOT_WORDS}u",
        "HALMA_RING_TOTALS": f"{ring_plan.TOTALS}u",
        "HALMA_RING_NOBODY": f"{ring_plan.NOBODY}u",
        "HALMA_RING_HEADER_BYTES": f"{ring_plan.HEADER_BYTES}u",
        "HALMA_PART_ROWS": f"{mixing.MOST_ROWS}u",
        "HALMA_PART_SUMS": f"{mixing.SUMS}u",
        "HALMA_PART_BLOCKS": f"{mixing.MOST_BLOCKS}u",
        "HALMA_MIX_GROUPS": f"{mixing.MOST_GROUPS}u",
        "HALMA_EXCHANGE_PARTS": f"{exchange_limits.PARTS}u",
        "HALMA_EXCHANGE_LOCAL": f"{exchange_limits.MOST_EXPERTS}u",
        "HALMA_EXCHANGE_SORTERS": f"{exchange_limits.SORTERS}u",
        **{f"HALMA_COMBINE_{units}_THREADS": f"{threads}" for units, threads in COMBINE_THREADS.items()},
        **({} if target.clock_khz is None else {"HALMA_CLOCK_KHZ": f"{target.clock_khz}ull"}),
        **control.defines(),
        **memory_order.defines(target.dialect),
        **{f"HALMA_MEASURE_WITHOUT_{part.upper()}": "1" for part in without},
    }
    return KernelSource(f"{unit}_{size}", text_of(UNITS[unit].file), headers(), defines)


def headers() -> Mapping[str, str]:
    """Every header of the dialect by the name it is included by."""
    return {name: text_of(name) for name in HEADERS}
