"""Every protocol that was looked at, as data: ours with the calls it was searched on, and the broken ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from halma.hal.testing.protocol.explorer import HANG
from halma.hal.testing.protocol.model import Call, Rules, Script
from halma.hal.testing.protocol.system import WRONG

HOLDS = "holds"

OURS = Rules()


@dataclass(frozen=True)
class Variant:
    """A protocol, the calls and numbers of ranks to search it on, and what has to come out.

    Args:
        name: for the command line.
        about: one line.
        rules: the protocol.
        worlds: numbers of ranks.
        scripts: lists of calls; or
        alphabet, length: every list of so many calls out of these.
        verdict: what has to come out, ``HOLDS``, ``HANG`` or ``WRONG``.
        skew: with ``HOLDS``, the most calls that a rank may be ahead of another.
        whole: search every single action, not the reduced system.
        nightly: it takes more than a few seconds.
        cure: with another verdict than ``HOLDS``: the rules under which the same calls are right.
    """

    name: str
    about: str
    rules: Rules
    scripts: tuple[Script, ...] = ()
    worlds: tuple[int, ...] = (2,)
    alphabet: tuple[Call, ...] = ()
    length: int = 0
    verdict: str = HOLDS
    skew: int = 1
    whole: bool = False
    nightly: bool = False
    cure: Rules = OURS

    def cases(self) -> Iterator[tuple[int, Script]]:
        """Every (number of ranks, list of calls)."""
        for world in self.worlds:
            for script in self.scripts:
                yield world, script
            if self.alphabet:
                for script in product(self.alphabet, repeat=self.length):
                    yield world, script


SMALL = Call()
TALL = Call(words=2)
WIDE = Call(words=2, grid=2)
THIN = Call(words=1, grid=2)  # block 1 has nothing to do
GATHER = Call("all_gather", words=2, grid=2)
CAST = Call("broadcast")
CAST_WIDE = Call("broadcast", words=2, grid=2, root=1)
ONE_WAY = Call("dispatch", words=2, grid=2, silent=frozenset({(1, 0)}))
OTHER_WAY = Call("dispatch", silent=frozenset({(0, 1)}))
NOTHING = Call("dispatch", words=0)
TWO = Call("two_shot")
TWO_WIDE = Call("two_shot", words=2, grid=2)
VALUE = Call(wire="sentinel")
VALUE_TALL = Call(words=2, wire="sentinel")
VALUE_WIDE = Call(words=2, grid=2, wire="sentinel")
VALUE_CAST = Call("broadcast", words=1, grid=2, wire="sentinel")
VALUE_TWO = Call("two_shot", wire="sentinel")
VALUE_TWO_WIDE = Call("two_shot", words=2, grid=2, wire="sentinel")
CHUNK = Call(words=2, wire="chunk")
CHUNK_TWO = Call("two_shot", wire="chunk")
CHUNK_TWO_WIDE = Call("two_shot", words=2, grid=2, wire="chunk")
BYSTANDER = Call("bystander")
RUNAWAY = Call("bystander", waits=False)

_MIXED = (WIDE, CAST, TWO_WIDE, VALUE_WIDE, ONE_WAY, TALL, VALUE_TWO, NOTHING, CHUNK_TWO_WIDE, GATHER)
_KINDS = (SMALL, WIDE, CAST, ONE_WAY, TWO_WIDE, VALUE_WIDE)
_ALL_KINDS = (*_KINDS, TALL, THIN, OTHER_WAY, VALUE_TWO_WIDE, CHUNK_TWO_WIDE, CHUNK)
# With a largest epoch of 5 the flag 5 comes back four calls later, and so does every other but 1.
_STALE = (
    (SMALL,) * 4 + (TALL,) + (SMALL,) * 3 + (TALL,),
    (SMALL,) * 5 + (TALL,) + (SMALL,) * 3 + (TALL, SMALL),
    (TALL, WIDE, TWO_WIDE, CAST, SMALL, SMALL, TWO_WIDE, SMALL, SMALL, CHUNK_TWO_WIDE, TWO_WIDE),
)
_WRAPS = Rules(last=5)
_FAULTS = Rules(timeout="sticky", stops=True)

PROVED: tuple[Variant, ...] = (
    Variant("ours", "every kind of call, sizes and grids that change", OURS, (_MIXED[:7],), (2, 3, 4)),
    Variant("ours-every", "every list of four calls out of six", OURS, alphabet=_KINDS, length=4),
    Variant("ours-whole", "every single action, not reduced", OURS, ((SMALL, WIDE, CAST, TALL, WIDE),), whole=True),
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
    Variant("wrap", "epochs 1 to 5, then 2 to 5 again and again", _WRAPS, _STALE, (2, 3)),
    Variant("sticky", "any wait may time out, one rank may stop, anywhere", _FAULTS, (_MIXED[:5],), (2,)),
    Variant("sticky-3", "the same on three ranks", _FAULTS, ((WIDE, CAST, VALUE, TWO),), (3,)),
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
    Variant(
        "ours-every-12", "every list of four calls out of twelve", OURS, alphabet=_ALL_KINDS, length=4, nightly=True
    ),
    Variant("ours-every-3", "every list of four out of six, three ranks", OURS, (), (3,), _KINDS, 4, nightly=True),
    Variant("ours-4", "ten calls, four ranks", Rules(ahead=2), (_MIXED,), (4,), nightly=True),
    Variant("ours-whole-mixed", "every single action, all kinds", OURS, (_MIXED[:8],), whole=True, nightly=True),
    Variant(
        "ours-whole-3",
        "every single action, three ranks",
        OURS,
        ((SMALL, CAST, SMALL, SMALL),),
        (3,),
        whole=True,
        nightly=True,
    ),
    Variant(
        "together",
        "early start, wrap, timeouts and a stop at once",
        Rules(ahead=2, last=5, timeout="sticky", stops=True),
        _STALE,
        (2, 3),
        nightly=True,
    ),
    Variant("sticky-4", "timeouts and a stop, four ranks", _FAULTS, ((WIDE, CAST, VALUE, SMALL),), (4,), nightly=True),
    Variant(
        "wrap-every",
        "every list of ten out of two, and every wrap",
        _WRAPS,
        alphabet=(SMALL, TALL),
        length=10,
        nightly=True,
    ),
)

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
        cure=_WRAPS,
    ),
    Variant(
        "wrap-to-1",
        "epochs 1 to 5, then 1: parity repeats",
        Rules(last=5, restart=1),
        ((SMALL,) * 8,),
        verdict=HANG,
        cure=_WRAPS,
    ),
    Variant(
        "wrap-to-0",
        "epochs 1 to 5, then 0, which a word never written holds",
        Rules(last=5, restart=0),
        ((SMALL,) * 5 + (TALL,),),
        verdict=WRONG,
        cure=_WRAPS,
    ),
    Variant(
        "unscrubbed",
        "words of the last round are left at the wrap",
        Rules(last=5, scrub="never"),
        _STALE,
        verdict=WRONG,
        cure=_WRAPS,
    ),
    Variant(
        "scrubbed-once",
        "they are scrubbed in the last epoch's call alone",
        Rules(last=5, scrub="once"),
        _STALE,
        verdict=WRONG,
        cure=_WRAPS,
    ),
    Variant(
        "scrub-unfenced",
        "they are scrubbed without a fence",
        Rules(last=5, scrub="unfenced"),
        (_STALE[1],),
        verdict=HANG,
        cure=_WRAPS,
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
        cure=_FAULTS,
    ),
    Variant(
        "no-bound",
        "waits without a bound, and a rank stops",
        Rules(stops=True),
        ((SMALL,) * 4,),
        verdict=HANG,
        cure=_FAULTS,
    ),
)

VARIANTS = PROVED + REFUTED


def variant(name: str) -> Variant | None:
    """The variant of that name."""
    return next((one for one in VARIANTS if one.name == name), None)
