"""A protocol and a list of calls, turned into one small straight program for each block of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "all_gather", "broadcast", "dispatch", "two_shot", "bystander"]
Wire = Literal["flag", "sentinel", "chunk"]


@dataclass(frozen=True)
class Call:
    """One kernel, the same on every rank.

    Args:
        kind: all_reduce (one-shot) and all_gather move words from every rank to every other, broadcast from ``root``
            alone, dispatch between all pairs but the silent ones; two_shot is a reduce-scatter and then an all-gather;
            a bystander is a kernel of somebody else between two calls and touches nothing.
        words: words for each pair (two_shot: for each pair and phase); block b has words b, b + grid, ...
        grid: blocks.
        root: who broadcasts.
        silent: (sender, reader) pairs of a dispatch that have nothing to send.
        wire: each word carries a flag; or none, and one that is not the sentinel counts as arrived; or each block has
            one flag a pair, stored with release behind its words, which are read without a check once it is there.
        waits: whether a bystander makes the grid-dependency wait before it ends.
    """

    kind: Kind = "all_reduce"
    words: int = 1
    grid: int = 1
    root: int = 0
    silent: frozenset[tuple[int, int]] = frozenset()
    wire: Wire = "flag"
    waits: bool = True

    def sends(self, sender: int, reader: int) -> bool:
        """Whether the pair has words in this call."""
        if self.kind == "broadcast":
            return sender == self.root
        return (sender, reader) not in self.silent


class ModelError(Exception):
    """The model has no meaning for what is asked."""


Script = tuple[Call, ...]
"""The calls that every rank makes, in this order."""


@dataclass(frozen=True)
class Rules:
    """A protocol; the defaults are ours.

    Args:
        buffers: copies of a one-shot's receive memory, chosen by epoch modulo this number.
        cycle: the buffers by the call's place in a captured graph of this many calls, in place of the epoch's choice.
        header: every call sends each peer one header word and waits for one from each.
        epoch: counted by the channel, or by each block for itself over the calls that it took part in.
        last: the largest epoch, 0 where none is reached; ``restart`` follows it.
        scrub: how words that a call does not receive are zeroed in the calls that carry the epochs ``last`` and then
            ``restart``: by the block that sends the headers and behind a fence, without the fence, in the first of
            the two calls alone, or never.
        compare: a word counts as arrived when its flag equals the expected one, or when it is at least that.
        clear: a sentinel word is cleared by the block that read it, before the call ends; or all words of the call
            before are cleared while this one is under way.
        fenced: a clear that others rely on within the same kernel is fenced before the pushes that tell them.
        clear_by: who clears the call before: the block that sends headers, or each block its own words.
        clear_size: how much it clears: what that call received, or only as many words as this call has.
        released: a chunk's flag is visible only after its words are.
        shared: what lies in one memory: nothing; words with flags and words with sentinels; a two-shot's phases and
            the one-shot's two buffers.
        ahead: kernels that may start before the one before them has ended.
        push_first: a call pushes before the grid-dependency wait and not after.
        timeout: a wait never ends by itself; or the rank is then in error for good and neither pushes nor waits; or
            it goes on.
        stops: one rank may stop for good, anywhere.
    """

    buffers: int = 2
    cycle: tuple[int, ...] = ()
    header: bool = True
    epoch: Literal["channel", "block"] = "channel"
    last: int = 0
    restart: int = 2
    scrub: Literal["fenced", "unfenced", "once", "never"] = "fenced"
    compare: Literal["equal", "at least"] = "equal"
    clear: Literal["own", "overlapped"] = "own"
    fenced: bool = True
    clear_by: Literal["header block", "owner"] = "header block"
    clear_size: Literal["previous", "current"] = "previous"
    released: bool = True
    shared: Literal["nothing", "formats", "phases"] = "nothing"
    ahead: int = 0
    push_first: bool = False
    timeout: Literal["never", "sticky", "goes on"] = "never"
    stops: bool = False


class Location(NamedTuple):
    """One word of a receive buffer of ``reader``, written by ``sender``."""

    sender: int
    reader: int
    area: str
    buffer: int
    word: int


class Word(NamedTuple):
    """A word of a call on its way: where it goes, the flag it carries (None: none), the call that it belongs to;
    ``unchecked`` when its reader takes whatever is there, because a chunk's flag spoke for it."""

    location: Location
    flag: int | None
    call: int
    unchecked: bool = False


class Op(IntEnum):
    """What a step of a block does. WAIT: the grid-dependency wait. RUN: nothing. PUSH: store all words. READ: wait
    for all words, in any order. CLEAR: clear all locations. FENCE: wait until those clears are visible."""

    WAIT = 0
    RUN = 1
    PUSH = 2
    READ = 3
    CLEAR = 4
    FENCE = 5


class Step(NamedTuple):
    """One step; FENCE and CLEAR use the words' locations alone."""

    op: Op
    words: tuple[Word, ...] = ()


Block = tuple[Step, ...]

HEADER = "header"


@dataclass(frozen=True)
class Program:
    """What every block does.

    Args:
        rules, world, script: what it was made of.
        blocks: steps by rank, call and block.
        flags: the flag that the word of a call carries to a location.
        behind: the words that are visible before the flag of a call at a location is.
    """

    rules: Rules
    world: int
    script: Script
    blocks: tuple[tuple[tuple[Block, ...], ...], ...]
    flags: dict[tuple[Location, int], int | None]
    behind: dict[tuple[Location, int], tuple[Location, ...]]

    @property
    def locations(self) -> list[Location]:
        """Every location that is written to."""
        return sorted({location for location, _ in self.flags})


def program(rules: Rules, world: int, script: Script) -> Program:
    """Make the blocks' programs for ``world`` ranks.

    Raises:
        ModelError: the rules say nothing about such a call.
    """
    return _Compiler(rules, world, script).program()


def epoch_flag(rules: Rules, count: int) -> int:
    """The epoch of the count-th call from 1 on: it goes up to ``last`` and then on from ``restart``."""
    if not rules.last or count <= rules.last:
        return count
    period = rules.last - rules.restart + 1
    return rules.restart + (count - rules.last - 1) % period


class _Compiler:
    def __init__(self, rules: Rules, world: int, script: Script) -> None:
        self.rules, self.world, self.script = rules, world, script
        self._ranks = range(world)
        self._pairs = [(s, r) for s, r in product(self._ranks, self._ranks) if s != r]
        self.flags = {
            (word.location, word.call): word.flag
            for call, made in enumerate(script)
            for sender, reader in self._pairs
            for block, phase in product(range(made.grid), (0, 1))
            for word in self._words(call, sender, reader, block, phase)
        }

    def program(self) -> Program:
        blocks = tuple(
            tuple(
                tuple(self._block(rank, call, block) for block in range(made.grid))
                for call, made in enumerate(self.script)
            )
            for rank in self._ranks
        )
        return Program(self.rules, self.world, self.script, blocks, self.flags, self._behind())

    def _behind(self) -> dict[tuple[Location, int], tuple[Location, ...]]:
        found: dict[tuple[Location, int], tuple[Location, ...]] = {}
        for call, made in enumerate(self.script):
            for (sender, reader), block, phase in product(self._pairs, range(made.grid), (0, 1)):
                words = self._words(call, sender, reader, block, phase)
                unchecked = tuple(word.location for word in words if word.unchecked)
                if unchecked and self.rules.released:
                    found[words[-1].location, call] = unchecked
        return found

    def _count(self, call: int, block: int) -> int:
        """How many calls of the channel the epoch has seen, this one included."""
        before = [made for made in self.script[: call + 1] if made.kind != "bystander"]
        if self.rules.epoch == "channel":
            return len(before)
        return sum(block < made.grid for made in before)

    def _epoch(self, call: int, block: int) -> tuple[int, int]:
        """(flag, buffer) of a block's words."""
        count = self._count(call, block)
        flag = epoch_flag(self.rules, count)
        cycle = self.rules.cycle
        return flag, cycle[(count - 1) % len(cycle)] if cycle else flag % self.rules.buffers

    def _words(self, call: int, sender: int, reader: int, block: int, phase: int) -> list[Word]:
        """What a sender's block sends a reader in a phase, and the reader's block of that number waits for."""
        made = self.script[call]
        if made.kind == "bystander" or (phase and made.kind != "two_shot"):
            return []
        flag, buffer = self._epoch(call, block)
        words: list[Word] = []
        if self.rules.header and block == 0 and phase == 0:
            words.append(Word(Location(sender, reader, HEADER, buffer, 0), flag, call))
        if made.sends(sender, reader):
            area, buffer = self._area(made, buffer, phase)
            carried = flag if made.wire == "flag" else None
            owned = [Location(sender, reader, area, buffer, word) for word in range(block, made.words, made.grid)]
            words += [Word(location, carried, call, made.wire == "chunk") for location in owned]
            if owned and made.wire == "chunk":
                words.append(Word(Location(sender, reader, area + " flag", buffer, block), flag, call))
        return words

    def _area(self, made: Call, buffer: int, phase: int) -> tuple[str, int]:
        """The memory of a phase, and which copy of it."""
        wire = "" if made.wire == "flag" or self.rules.shared == "formats" else f" {made.wire}"
        if made.kind != "two_shot":
            return "one-shot" + wire, buffer
        if self.rules.shared == "phases":
            return "one-shot" + wire, (buffer + phase) % self.rules.buffers
        return ("gather" if phase else "scatter") + wire, 0

    def _pushed(self, rank: int, call: int, block: int, phase: int) -> tuple[Word, ...]:
        peers = (peer for peer in self._ranks if peer != rank)
        return tuple(word for peer in peers for word in self._words(call, rank, peer, block, phase))

    def _read(self, rank: int, call: int, block: int, phase: int) -> tuple[Word, ...]:
        peers = (peer for peer in self._ranks if peer != rank)
        return tuple(word for peer in peers for word in self._words(call, peer, rank, block, phase))

    def _block(self, rank: int, call: int, block: int) -> Block:
        made, rules = self.script[call], self.rules
        if made.kind == "bystander":
            return (Step(Op.WAIT if made.waits else Op.RUN),)
        scrub = self._scrubbed(rank, call, block)
        previous = self._previous(rank, call, block)
        first = scrub if rules.scrub != "unfenced" else ()
        late = scrub if rules.scrub == "unfenced" else ()
        first, late = (first + previous, late) if rules.fenced else (first, late + previous)
        own = rules.clear == "own" and made.wire == "sentinel"
        steps = [Step(Op.CLEAR, first), Step(Op.FENCE, first), Step(Op.PUSH, self._pushed(rank, call, block, 0))]
        steps = [*steps, Step(Op.WAIT)] if rules.push_first else [Step(Op.WAIT), *steps]
        steps.append(Step(Op.CLEAR, late))
        for phase in (0, 1) if made.kind == "two_shot" else (0,):
            if phase:
                steps.append(Step(Op.PUSH, self._pushed(rank, call, block, 1)))
            read = self._read(rank, call, block, phase)
            steps.append(Step(Op.READ, tuple(word for word in read if not word.unchecked)))
            steps.append(Step(Op.READ, tuple(word for word in read if word.unchecked)))
            if own:
                payload = _payload(read)
                steps.append(Step(Op.CLEAR, payload))
                if rules.fenced and made.kind == "two_shot" and not phase:
                    steps.append(Step(Op.FENCE, payload))
                else:
                    late += payload
        steps.append(Step(Op.FENCE, late))
        return tuple(step for step in steps if step.words or step.op == Op.WAIT)

    def _scrubbed(self, rank: int, call: int, block: int) -> tuple[Word, ...]:
        """All words with flags in this rank's memory that the call does not receive, in a call at the wrap. The block
        that sends the headers does it: nobody ends this call, and so pushes the next, before that block has pushed."""
        rules = self.rules
        count = self._count(call, 0)
        at_last = count >= rules.last and epoch_flag(rules, count) == rules.last
        after = count > rules.last and epoch_flag(rules, count - 1) == rules.last
        if block or not rules.last or rules.scrub == "never" or not (at_last or (after and rules.scrub != "once")):
            return ()
        received = {
            word.location
            for number, phase in product(range(self.script[call].grid), (0, 1))
            for word in self._read(rank, call, number, phase)
        }
        return tuple(
            Word(location, None, call)
            for location in sorted({where for (where, _), flag in self.flags.items() if flag is not None})
            if location.reader == rank and location.area != HEADER and location not in received
        )

    def _previous(self, rank: int, call: int, block: int) -> tuple[Word, ...]:
        """What an overlapped clear clears in this call: the payload of the call before."""
        rules, made = self.rules, self.script[call]
        channel = [number for number in range(call) if self.script[number].kind != "bystander"]
        before = channel[-1] if channel else -1
        if rules.clear != "overlapped" or before < 0 or self.script[before].wire != "sentinel":
            return ()
        if self.script[before].kind == "two_shot":
            raise ModelError("an overlapped clear of a two-shot, which has one buffer a phase, means nothing")
        if rules.clear_by == "header block" and block:
            return ()
        words = [
            word
            for number in range(self.script[before].grid)
            for word in _payload(self._read(rank, before, number, 0))
            if rules.clear_size == "previous" or word.location.word < made.words
        ]
        return tuple(w for w in words if rules.clear_by == "header block" or w.location.word % made.grid == block)


def _payload(words: Sequence[Word]) -> tuple[Word, ...]:
    return tuple(word for word in words if word.location.area != HEADER)
