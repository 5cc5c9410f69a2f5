"""All that a program's blocks, stores and clears can do: as a transition system, whole or reduced.

:class:`Whole` takes one action at a time: a store becomes visible, a block reads a word, a clear lands, and so on. A
block's stores are issued together, which loses nothing: one that is issued and not visible is as good as not issued.

:class:`Reduced` has the same actions but makes a run of them at a time, and only in one of the orders that cannot be
told apart. Why nothing is lost, with "later" and "earlier" meaning as far as the run goes on to be one:

* only the reader sees a location, so a store becoming visible commutes with all but that reader's reads and clears
  of the location, and may be put off until the next of them;
* a read commutes with all but stores to its location becoming visible, so it may be put off, with them, until the
  last read of the block's step: a step reads all its words at once, each from the first visible store that fits.
  Nothing depends on the reads of a step that is never completed: its values are not used;
* that the reader comes too late for a store, or passes one that fits, needs a further store to the location, so
  "one store more becomes visible" is an action of its own (an overrun) where there is one;
* a push and the issue of a clear only make possible what may happen later, as does the wait once it can return, so
  each may be put earlier, directly behind the step before it;
* a clear landing commutes with all but stores to its location becoming visible, so it may be put off until its fence;
  that such a store is overtaken by the clear is an overrun again;
* a rank that stops or is in error does less: pushes put earlier by it may stay invisible for ever.

The order in which calls end on different ranks is kept, so the skew is too. ``tests/cpu/protocol`` compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from halma.hal.testing.protocol.model import ModelError, Op, Program, Step, Word

WRONG = "wrong value"
"""The verdict of a state in which a block completed a step with a word of another call."""

State = bytes


class Move(NamedTuple):
    """One action. ``location`` is an index into the program's locations; -1 stands where nothing applies."""

    kind: str
    rank: int = -1
    call: int = -1
    block: int = -1
    location: int = -1


Run = tuple[Move, ...]

_LIVE, _STOPPED, _IN_ERROR = 0, 1, 2
_WRONG_READ = 0x80


class _Read(NamedTuple):
    location: int
    fits: int  # a bit for each content that is taken for the word
    content: int


class _Memory:
    """What a location can hold, numbered: (content, stores not visible yet, a clear under way). Content 0 is cleared
    or never written, 1 + call is that call's word."""

    def __init__(self) -> None:
        self.of: list[tuple[int, tuple[int, ...], bool]] = []
        self._number: dict[tuple[int, tuple[int, ...], bool], int] = {}
        self._matched: dict[tuple[int, int], tuple[int, int] | None] = {}
        self.number(0, (), False)

    def number(self, content: int, coming: tuple[int, ...], clearing: bool) -> int:
        key = (content, coming, clearing)
        if key not in self._number:
            if len(self.of) > 255:
                raise ModelError("a location can be in more than 256 states: make the script shorter")
            self._number[key] = len(self.of)
            self.of.append(key)
        return self._number[key]

    def issue(self, number: int, content: int) -> int:
        held, coming, clearing = self.of[number]
        return self.number(held, (*coming, content), clearing)

    def deliver(self, number: int) -> int:
        _, coming, clearing = self.of[number]
        return self.number(coming[0], coming[1:], clearing)

    def clear(self, number: int) -> int:
        held, coming, clearing = self.of[number]
        if clearing:
            raise ModelError("a location is cleared twice at a time")
        return self.number(held, coming, True)

    def land(self, number: int) -> int:
        return self.number(0, self.of[number][1], False)

    def match(self, number: int, fits: int) -> tuple[int, int] | None:
        """(state, stores made visible) once the first content that fits is visible, or None while there is none."""
        key = (number, fits)
        if key not in self._matched:
            held, coming, clearing = self.of[number]
            if clearing:
                raise ModelError("a word is read that the same rank is clearing")
            contents = (held, *coming)
            found = next((i for i, content in enumerate(contents) if fits >> content & 1), None)
            self._matched[key] = None if found is None else (self.number(contents[found], coming[found:], False), found)
        return self._matched[key]


class _Base:
    """What both systems share: the state's layout and the effect of a step.

    A state is a byte string: a flag for a wrong value; calls done and condition of each rank; for each block its step
    and the words read in it; for each location its number in :class:`_Memory`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory = _Memory()
        self.skew = 0
        """The most calls of the channel that one rank was ahead of another, in any state seen."""
        rules = program.rules
        self._world, self._calls = program.world, len(program.script)
        self._ahead, self._timeout, self._stops = rules.ahead, rules.timeout, rules.stops
        self._index = {location: i for i, location in enumerate(program.locations)}
        self._on_channel = [0]
        for made in program.script:
            self._on_channel.append(self._on_channel[-1] + (made.kind != "bystander"))
        self._behind = {
            (self._index[location], call + 1): tuple(self._index[word] for word in words)
            for (location, call), words in program.behind.items()
        }
        at = 1 + 2 * self._world
        self._blocks: list[list[list[tuple[int, tuple[Step, ...]]]]] = []
        for rank in range(self._world):
            self._blocks.append([])
            for call in range(self._calls):
                made = program.blocks[rank][call]
                self._blocks[rank].append([(at + 2 * i, steps) for i, steps in enumerate(made)])
                at += 2 * len(made)
        self._memory_at = at
        self._reads = {
            (step, call): tuple(self._compiled(word) for word in step.words)
            for ranks in program.blocks
            for call, blocks in enumerate(ranks)
            for steps in blocks
            for step in steps
            if step.op == Op.READ
        }

    def _compiled(self, word: Word) -> _Read:
        """Which contents of its location a reader takes for this word."""
        equal = self.program.rules.compare == "equal"
        fits = 0
        for (location, call), flag in self.program.flags.items():
            if location == word.location:
                if word.flag is None:
                    taken = True  # anything but the sentinel; unchecked words: anything at all
                else:
                    taken = flag is not None and (flag == word.flag if equal else flag >= word.flag)
                fits |= taken << (call + 1)
        fits |= word.flag == 0 or word.unchecked  # never written, and cleared, both read as flag 0
        return _Read(self._memory_at + self._index[word.location], fits, word.call + 1)

    def start(self) -> State:
        return bytes(self._memory_at + len(self._index))

    def violation(self, state: State) -> str | None:
        return WRONG if state[0] else None

    def done(self, state: State) -> bool:
        return all(state[1 + 2 * rank] == self._calls or state[2 + 2 * rank] != _LIVE for rank in range(self._world))

    def _active(self, state: bytes | bytearray, rank: int) -> Iterator[tuple[int, int, int, Step]]:
        """(call, block, its place in the state, its step) of every started block that is not done."""
        done = state[1 + 2 * rank]
        if state[2 + 2 * rank] != _LIVE:
            return
        for call in range(done, min(self._calls, done + self._ahead + 1)):
            for block, (at, steps) in enumerate(self._blocks[rank][call]):
                if state[at] < len(steps):
                    yield call, block, at, steps[state[at]]

    def _ended(self, state: bytes | bytearray, rank: int, call: int) -> bool:
        return call < 0 or all(state[at] == len(steps) for at, steps in self._blocks[rank][call])

    def _next_step(self, state: bytearray, rank: int, at: int) -> None:
        state[at] += 1
        state[at + 1] = 0
        done = state[1 + 2 * rank]
        while done < self._calls and self._ended(state, rank, done):
            done += 1
        if done != state[1 + 2 * rank]:
            state[1 + 2 * rank] = done
            finished = [self._on_channel[state[1 + 2 * other]] for other in range(self._world)]
            self.skew = max(self.skew, max(finished) - min(finished))

    def _push(self, state: bytearray, step: Step) -> None:
        for word in step.words:
            at = self._memory_at + self._index[word.location]
            state[at] = self.memory.issue(state[at], word.call + 1)

    def _clear(self, state: bytearray, step: Step) -> None:
        for word in step.words:
            at = self._memory_at + self._index[word.location]
            state[at] = self.memory.clear(state[at])

    def _hidden(self, state: bytes | bytearray, location: int) -> list[int]:
        """The locations whose words have to be visible before the next store to this one is."""
        content = self.memory.of[state[self._memory_at + location]][1][0]
        words = self._behind.get((location, content), ())
        return [word for word in words if content in self.memory.of[state[self._memory_at + word]][1]]

    def _may_stop(self, state: State, rank: int) -> bool:
        live = state[2 + 2 * rank] == _LIVE and state[1 + 2 * rank] < self._calls
        return self._stops and live and all(state[2 + 2 * one] != _STOPPED for one in range(self._world))

    def _gave_up(self, state: bytearray, rank: int, at: int) -> None:
        if self._timeout == "sticky":
            state[2 + 2 * rank] = _IN_ERROR
        else:
            self._next_step(state, rank, at)


class Whole(_Base):
    """Every action by itself."""

    def steps(self, state: State) -> list[tuple[Run, State]]:
        found: list[tuple[Run, State]] = []
        for rank in range(self._world):
            for call, block, at, step in self._active(state, rank):
                for move, after in self._of_block(state, rank, call, block, at, step):
                    found.append(((move,), bytes(after)))
            if self._may_stop(state, rank):
                after = bytearray(state)
                after[2 + 2 * rank] = _STOPPED
                found.append(((Move("stop", rank),), bytes(after)))
        for location in range(len(self._index)):
            at = self._memory_at + location
            _, coming, clearing = self.memory.of[state[at]]
            for kind, possible in (("deliver", coming and not self._hidden(state, location)), ("land", clearing)):
                if possible:
                    after = bytearray(state)
                    after[at] = self.memory.deliver(state[at]) if kind == "deliver" else self.memory.land(state[at])
                    found.append(((Move(kind, location=location),), bytes(after)))
        return found

    def _of_block(
        self, state: State, rank: int, call: int, block: int, at: int, step: Step
    ) -> Iterator[tuple[Move, bytearray]]:
        if step.op == Op.READ:
            yield from self._reading(state, rank, call, block, at, step)
            return
        if step.op == Op.WAIT and not self._ended(state, rank, call - 1):
            return
        if step.op == Op.FENCE and any(
            self.memory.of[state[self._memory_at + self._index[word.location]]][2] for word in step.words
        ):
            return
        after = bytearray(state)
        if step.op == Op.PUSH:
            self._push(after, step)
        elif step.op == Op.CLEAR:
            self._clear(after, step)
        self._next_step(after, rank, at)
        yield Move(step.op.name.lower(), rank, call, block), after

    def _reading(
        self, state: State, rank: int, call: int, block: int, at: int, step: Step
    ) -> Iterator[tuple[Move, bytearray]]:
        reads = self._reads[step, call]
        if len(reads) > 7:
            raise ModelError(f"a block waits for {len(reads)} words at a time; the whole system takes 7")
        for bit, read in enumerate(reads):
            content, _, clearing = self.memory.of[state[read.location]]
            if clearing:
                raise ModelError("a word is read that the same rank is clearing")
            if not state[at + 1] >> bit & 1 and read.fits >> content & 1:
                after = bytearray(state)
                after[at + 1] |= 1 << bit | (_WRONG_READ if content != read.content else 0)
                if after[at + 1] & ~_WRONG_READ == (1 << len(reads)) - 1:
                    after[0] |= after[at + 1] >= _WRONG_READ
                    self._next_step(after, rank, at)
                yield Move("read", rank, call, block, read.location - self._memory_at), after
        if self._timeout != "never":
            after = bytearray(state)
            self._gave_up(after, rank, at)
            yield Move("timeout", rank, call, block), after


class Reduced(_Base):
    """Runs of actions, one order of those that cannot be told apart."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        state = bytearray(super().start())
        moves: list[Move] = []
        for rank in range(self._world):
            self._forward(state, rank, moves)
        self._first = bytes(state)
        self.opening: Run = tuple(moves)
        """The actions that lie before the initial state."""

    def start(self) -> State:
        return self._first

    def steps(self, state: State) -> list[tuple[Run, State]]:
        found: list[tuple[Run, State]] = []
        for rank in range(self._world):
            for call, block, at, step in self._active(state, rank):
                if step.op == Op.READ:
                    self._reading(found, state, rank, call, block, at, step)
                elif step.op == Op.FENCE:
                    self._fencing(found, state, rank, call, block, at, step)
            if self._may_stop(state, rank):
                after = bytearray(state)
                after[2 + 2 * rank] = _STOPPED
                found.append(((Move("stop", rank),), bytes(after)))
        return found

    def _reading(
        self, found: list[tuple[Run, State]], state: State, rank: int, call: int, block: int, at: int, step: Step
    ) -> None:
        after: bytearray | None = bytearray(state)
        moves: list[Move] = []
        for read in self._reads[step, call]:
            match = self.memory.match(state[read.location], read.fits)
            if match is None:
                after = None
                continue
            number, count = match
            location = read.location - self._memory_at
            content, coming, _ = self.memory.of[number]
            if coming:
                passed = bytearray(state)
                found.append((self._deliver(passed, location, count + 1), bytes(passed)))
            if after is not None:
                moves += self._deliver(after, location, count)
                after[0] |= content != read.content
                moves.append(Move("read", rank, call, block, location))
        if after is not None:
            self._next_step(after, rank, at)
            self._forward(after, rank, moves)
            found.append((tuple(moves), bytes(after)))
        if self._timeout != "never":
            after = bytearray(state)
            moves = [Move("timeout", rank, call, block)]
            self._gave_up(after, rank, at)
            self._forward(after, rank, moves)
            found.append((tuple(moves), bytes(after)))

    def _fencing(
        self, found: list[tuple[Run, State]], state: State, rank: int, call: int, block: int, at: int, step: Step
    ) -> None:
        after = bytearray(state)
        moves: list[Move] = []
        for word in step.words:
            location = self._index[word.location]
            place = self._memory_at + location
            _, coming, clearing = self.memory.of[state[place]]
            if clearing:
                after[place] = self.memory.land(state[place])
                moves.append(Move("land", location=location))
                if coming:
                    passed = bytearray(state)
                    found.append((self._deliver(passed, location, 1), bytes(passed)))
        self._next_step(after, rank, at)
        moves.append(Move("fence", rank, call, block))
        self._forward(after, rank, moves)
        found.append((tuple(moves), bytes(after)))

    def _deliver(self, state: bytearray, location: int, count: int) -> Run:
        """Make so many stores visible, and before each what has to be visible before it."""
        moves: list[Move] = []
        for _ in range(count):
            for word in self._hidden(state, location):
                content = self.memory.of[state[self._memory_at + location]][1][0]
                moves += self._deliver(state, word, self.memory.of[state[self._memory_at + word]][1].index(content) + 1)
            place = self._memory_at + location
            state[place] = self.memory.deliver(state[place])
            moves.append(Move("deliver", location=location))
        return tuple(moves)

    def _forward(self, state: bytearray, rank: int, moves: list[Move]) -> None:
        """Take every wait that returns, push and issue of a clear, until each block reads, fences or waits."""
        moved = True
        while moved:
            moved = False
            for call, block, at, step in list(self._active(state, rank)):
                if step.op in (Op.READ, Op.FENCE) or (step.op == Op.WAIT and not self._ended(state, rank, call - 1)):
                    continue
                if step.op == Op.PUSH:
                    self._push(state, step)
                elif step.op == Op.CLEAR:
                    self._clear(state, step)
                self._next_step(state, rank, at)
                moves.append(Move(step.op.name.lower(), rank, call, block))
                moved = True
