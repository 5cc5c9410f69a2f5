"""What a protocol variant is, as data, and the calls that variants are searched on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from halma.hal.testing.protocol.model import Call, Rules, Script

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
        alphabet, length: every list of so many calls out of these, the first out of ``opening`` where there is one.
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
    opening: tuple[Call, ...] = ()
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
                for script in product(self.opening or self.alphabet, *[self.alphabet] * (self.length - 1)):
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
# Dispatch and combine of an exchange; `_ONE`: one of two ranks has nothing to send; `_NONE`: none has.
OUT = Call("dispatch", words=2, grid=2, wire="chunk")
OUT_ONE = Call("dispatch", words=2, wire="chunk", silent=frozenset({(0, 1)}))
OUT_NONE = Call("dispatch", words=0, wire="chunk")
BACK = Call("dispatch", words=2, grid=2, wire="sentinel")
BACK_ONE = Call("dispatch", words=2, wire="sentinel", silent=frozenset({(1, 0)}))
BACK_NONE = Call("dispatch", words=0, wire="sentinel")
BYSTANDER = Call("bystander")
RUNAWAY = Call("bystander", waits=False)

MIXED = (WIDE, CAST, TWO_WIDE, VALUE_WIDE, ONE_WAY, TALL, VALUE_TWO, NOTHING, CHUNK_TWO_WIDE, GATHER)
KINDS = (SMALL, WIDE, CAST, TWO_WIDE, VALUE_WIDE)
ALL_KINDS = (*KINDS, ONE_WAY, TALL, THIN, OTHER_WAY, VALUE_TWO_WIDE, CHUNK_TWO_WIDE, CHUNK)
# With a largest epoch of 5 the flag 5 comes back four calls later, and so does every other but 1.
STALE = (
    (SMALL,) * 4 + (TALL,) + (SMALL,) * 3 + (TALL,),
    (SMALL,) * 5 + (TALL,) + (SMALL,) * 3 + (TALL, SMALL),
    (TALL, WIDE, TWO_WIDE, CAST, SMALL, SMALL, TWO_WIDE, SMALL, SMALL, CHUNK_TWO_WIDE, TWO_WIDE),
)
WRAPS = Rules(last=5)
FAULTS = Rules(timeout="sticky", stops=True)
