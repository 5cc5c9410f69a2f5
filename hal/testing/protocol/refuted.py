"""Protocols that have to fail: each is one shortcut, with the rules under which the same calls are right."""

from __future__ import annotations

from halma.hal.testing.protocol.cases import (
    CAST,
    CHUNK,
    FAULTS,
    ONE_WAY,
    RUNAWAY,
    SMALL,
    STALE,
    TALL,
    TWO,
    VALUE,
    VALUE_CAST,
    VALUE_TALL,
    VALUE_TWO,
    VALUE_WIDE,
    WIDE,
    WRAPS,
    Variant,
)
from halma.hal.testing.protocol.explorer import HANG
from halma.hal.testing.protocol.model import Rules
from halma.hal.testing.protocol.system import WRONG

REFUTED: tuple[Variant, ...] = (
    Variant("one-buffer", "one buffer", Rules(buffers=1), ((SMALL,) * 3,), verdict=HANG),
    Variant(
        "one-slot",
        "the slot of a one-call graph, replayed back to back",
        Rules(cycle=(0,)),
        ((SMALL,) * 3,),
        verdict=HANG,
    ),
    Variant(
        "odd-graph",
        "buffers baked into a graph of three calls, replayed",
        Rules(cycle=(0, 1, 0)),
        ((SMALL,) * 6,),
        verdict=HANG,
    ),
    Variant(
        "block-epochs", "an epoch a block, grids vary", Rules(epoch="block"), ((TALL, WIDE, WIDE, TALL),), verdict=WRONG
    ),
    Variant(
        "block-epochs-3",
        "the same with three buffers",
        Rules(epoch="block", buffers=3),
        ((TALL, WIDE, WIDE, TALL, TALL),),
        verdict=WRONG,
        cure=Rules(buffers=3),
    ),
    *(
        Variant(
            f"broadcast-{buffers}",
            f"broadcast without headers, {buffers} buffers",
            Rules(buffers=buffers, header=False),
            ((CAST,) * (buffers + 2),),
            verdict=HANG,
            cure=Rules(buffers=buffers),
        )
        for buffers in (2, 3, 4)
    ),
    *(
        Variant(
            f"silent-pair-{buffers}",
            f"a pair sends nothing and no header, {buffers} buffers",
            Rules(buffers=buffers, header=False),
            ((ONE_WAY,) * (buffers + 2),),
            verdict=HANG,
            cure=Rules(buffers=buffers),
        )
        for buffers in (2, 3)
    ),
    Variant(
        "silent-pair-of-3",
        "one pair of three ranks sends nothing and no header",
        Rules(header=False),
        ((ONE_WAY,) * 4,),
        (3,),
        verdict=HANG,
    ),
    Variant(
        "push-first-3",
        "push before the wait, one call ahead, three buffers",
        Rules(buffers=3, ahead=1, push_first=True),
        ((SMALL,) * 5,),
        verdict=HANG,
        cure=Rules(buffers=4, ahead=1, push_first=True),
    ),
    Variant(
        "push-first-5",
        "push before the wait, two calls ahead, five buffers",
        Rules(buffers=5, ahead=2, push_first=True),
        ((SMALL,) * 7,),
        verdict=HANG,
        cure=Rules(buffers=6, ahead=2, push_first=True),
    ),
    Variant(
        "no-wait",
        "a kernel between two calls ends without the grid-dependency wait",
        Rules(ahead=2),
        ((SMALL, RUNAWAY, SMALL, RUNAWAY, SMALL, SMALL),),
        verdict=HANG,
        cure=Rules(ahead=0),
    ),
    Variant(
        "sentinel-unfenced",
        "the call before is cleared without a fence, two buffers",
        Rules(clear="overlapped", fenced=False),
        ((VALUE,) * 4,),
        verdict=HANG,
        cure=Rules(clear="overlapped"),
    ),
    Variant(
        "sentinel-idle-block",
        "a fenced clear by a block that then pushes nothing",
        Rules(clear="overlapped", clear_by="owner"),
        ((VALUE_WIDE, VALUE_CAST, VALUE_WIDE),),
        verdict=HANG,
        cure=Rules(clear="overlapped"),
    ),
    Variant(
        "sentinel-size",
        "only the current call's size is cleared",
        Rules(clear="overlapped", clear_size="current"),
        ((VALUE_TALL, VALUE, VALUE_TALL, VALUE),),
        verdict=WRONG,
        cure=Rules(clear="overlapped"),
    ),
    Variant(
        "sentinel-size-3",
        "the same with three buffers, no fence",
        Rules(clear="overlapped", clear_size="current", fenced=False, buffers=3),
        ((VALUE_TALL, VALUE, VALUE, VALUE_TALL, VALUE),),
        verdict=WRONG,
        cure=Rules(clear="overlapped", fenced=False, buffers=3),
    ),
    Variant(
        "sentinel-two-shot",
        "the scatter phase's clear is not fenced before the gather's push",
        Rules(fenced=False),
        ((VALUE_TWO,) * 4,),
        verdict=HANG,
    ),
    Variant(
        "shared-formats",
        "words with flags and with sentinels in one memory",
        Rules(shared="formats"),
        ((SMALL, SMALL, VALUE, VALUE),),
        verdict=WRONG,
    ),
    Variant(
        "shared-phases",
        "a two-shot's phases in the one-shot's buffers",
        Rules(shared="phases"),
        ((TWO, SMALL, TWO, TWO),),
        verdict=HANG,
    ),
    Variant(
        "chunk-unreleased", "a chunk's flag without release", Rules(released=False), ((CHUNK,) * 4,), verdict=WRONG
    ),
    Variant(
        "odd-modulus",
        "epochs 1 to 4, then 2: parity repeats",
        Rules(last=4),
        ((SMALL,) * 6,),
        verdict=HANG,
        cure=WRAPS,
    ),
    Variant(
        "wrap-to-1",
        "epochs 1 to 5, then 1: parity repeats",
        Rules(last=5, restart=1),
        ((SMALL,) * 8,),
        verdict=HANG,
        cure=WRAPS,
    ),
    Variant(
        "wrap-to-0",
        "epochs 1 to 5, then 0, which a word never written holds",
        Rules(last=5, restart=0),
        ((SMALL,) * 5 + (TALL,),),
        verdict=WRONG,
        cure=WRAPS,
    ),
    Variant(
        "unscrubbed",
        "words of the last round are left at the wrap",
        Rules(last=5, scrub="never"),
        STALE,
        verdict=WRONG,
        cure=WRAPS,
    ),
    Variant(
        "scrubbed-once",
        "they are scrubbed in the last epoch's call alone",
        Rules(last=5, scrub="once"),
        STALE,
        verdict=WRONG,
        cure=WRAPS,
    ),
    Variant(
        "scrub-unfenced",
        "they are scrubbed without a fence",
        Rules(last=5, scrub="unfenced"),
        (STALE[1],),
        verdict=HANG,
        cure=WRAPS,
    ),
    Variant(
        "at-least",
        "flags compare by >=, and a rank goes on after a timeout",
        Rules(compare="at least", timeout="goes on"),
        ((SMALL,) * 4,),
        verdict=WRONG,
        cure=Rules(timeout="goes on"),
    ),
    Variant(
        "sentinel-goes-on",
        "sentinels, and a rank goes on after a timeout",
        Rules(timeout="goes on"),
        ((VALUE,) * 4,),
        verdict=WRONG,
        cure=FAULTS,
    ),
    Variant(
        "no-bound",
        "waits without a bound, and a rank stops",
        Rules(stops=True),
        ((SMALL,) * 4,),
        verdict=HANG,
        cure=FAULTS,
    ),
)
