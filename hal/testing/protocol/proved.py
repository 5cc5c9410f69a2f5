"""Protocols that have to hold: ours, on the calls it is searched on, and what else would have been right."""

from __future__ import annotations

from halma.hal.testing.protocol.cases import (
    ALL_KINDS,
    BYSTANDER,
    CAST,
    CHUNK,
    CHUNK_TWO,
    CHUNK_TWO_WIDE,
    FAULTS,
    KINDS,
    MIXED,
    NOTHING,
    OURS,
    SMALL,
    STALE,
    TALL,
    TWO,
    TWO_WIDE,
    VALUE,
    VALUE_CAST,
    VALUE_TALL,
    VALUE_TWO,
    VALUE_TWO_WIDE,
    VALUE_WIDE,
    WIDE,
    WRAPS,
    Variant,
)
from halma.hal.testing.protocol.model import Rules

PROVED: tuple[Variant, ...] = (
    Variant("ours", "every kind of call, sizes and grids that change", OURS, (MIXED[:7],), (2, 3, 4)),
    Variant("ours-every", "every list of four calls out of five kinds", OURS, alphabet=KINDS, length=4),
    Variant("ours-whole", "every single action, not reduced", OURS, ((SMALL, WIDE, CAST, TALL, WIDE),), whole=True),
    Variant(
        "ours-whole-3",
        "every single action, headers and broadcasts",
        OURS,
        ((NOTHING, CAST, NOTHING, CAST, NOTHING),),
        (3,),
        whole=True,
    ),
    Variant(
        "early-start",
        "dependent launch, kernels two ahead, each waits before it touches anything",
        Rules(ahead=2),
        ((WIDE, BYSTANDER, CAST, VALUE_WIDE, BYSTANDER, TWO_WIDE, SMALL),),
        (2, 3),
    ),
    Variant(
        "two-shot",
        "one buffer a phase, mixed with one-shot",
        OURS,
        ((TWO_WIDE, SMALL, TWO, TWO_WIDE, WIDE, TWO_WIDE),),
        (2, 3, 4),
    ),
    Variant(
        "sentinel",
        "no flags, two buffers, each word cleared by its reader",
        OURS,
        ((VALUE, VALUE_WIDE, VALUE_CAST, VALUE_TALL, VALUE_WIDE), (VALUE_TWO_WIDE, VALUE, VALUE_TWO, VALUE_TWO_WIDE)),
        (2, 3),
    ),
    Variant(
        "sentinel-overlapped",
        "the call before is cleared behind a fence before the push",
        Rules(clear="overlapped"),
        ((VALUE_TALL, VALUE, VALUE_TALL, VALUE_CAST, VALUE_WIDE),),
        (2, 3),
    ),
    Variant(
        "sentinel-overlapped-3",
        "the call before is cleared without a fence, three buffers",
        Rules(clear="overlapped", fenced=False, buffers=3),
        ((VALUE_TALL, VALUE, VALUE_TALL, VALUE, VALUE_WIDE),),
        (2, 3),
    ),
    Variant(
        "chunk",
        "a flag a block, stored with release behind its words",
        OURS,
        ((CHUNK_TWO_WIDE, CHUNK_TWO, CHUNK, SMALL, CHUNK_TWO_WIDE, CHUNK),),
        (2, 3),
    ),
    Variant("wrap", "epochs 1 to 5, then 2 to 5 again and again", WRAPS, STALE, (2, 3)),
    Variant("sticky", "any wait may time out, one rank may stop, anywhere", FAULTS, (MIXED[:5],), (2,)),
    Variant("sticky-3", "the same on three ranks", FAULTS, ((WIDE, CAST, VALUE, TWO),), (3,)),
    Variant(
        "slots-2", "slots of a graph of two calls, replayed back to back", Rules(cycle=(0, 1)), ((SMALL, WIDE) * 3,)
    ),
    Variant(
        "push-first-4",
        "push before the wait, one call ahead, four buffers",
        Rules(buffers=4, ahead=1, push_first=True),
        ((SMALL, TALL, CAST, SMALL, SMALL, TALL, SMALL),),
        skew=2,
    ),
    Variant(
        "push-first-6",
        "push before the wait, two calls ahead, six buffers",
        Rules(buffers=6, ahead=2, push_first=True),
        ((SMALL, TALL, CAST) * 3,),
        skew=3,
    ),
    Variant(
        "goes-on-equal",
        "a rank goes on after a timeout; flags compare by equality",
        Rules(timeout="goes on", stops=True),
        ((SMALL, CAST, SMALL, SMALL),),
        skew=4,
    ),
    *(
        Variant(
            f"ours-every-12{part}",
            f"every list of four calls out of twelve kinds, part {part}",
            OURS,
            alphabet=ALL_KINDS,
            length=4,
            opening=(first,),
            nightly=True,
        )
        for part, first in zip("abcdefghijkl", ALL_KINDS, strict=True)
    ),
    Variant(
        "ours-every-3", "every list of four out of five kinds, three ranks", OURS, (), (3,), KINDS, 4, nightly=True
    ),
    Variant("ours-4", "ten calls, four ranks", Rules(ahead=2), (MIXED,), (4,), nightly=True),
    Variant("ours-whole-mixed", "every single action, all kinds", OURS, (MIXED,), whole=True, nightly=True),
    Variant(
        "together",
        "early start, wrap, timeouts and a stop at once",
        Rules(ahead=2, last=5, timeout="sticky", stops=True),
        STALE,
        (2, 3),
        nightly=True,
    ),
    Variant("sticky-4", "timeouts and a stop, four ranks", FAULTS, ((WIDE, CAST, VALUE, SMALL),), (4,), nightly=True),
    Variant(
        "wrap-every",
        "every list of ten out of two, and every wrap",
        WRAPS,
        alphabet=(SMALL, TALL),
        length=10,
        nightly=True,
    ),
)
