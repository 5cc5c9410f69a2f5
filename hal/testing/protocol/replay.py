"""Runs one trace again, on real words: a memory of (flag, value) pairs, values that name their sender, call and word.

It is the second opinion on a counterexample, so it shares only the blocks' programs and the names of the moves with
the searched systems: flags are compared as flags here, and memory is a dictionary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from halma.hal.testing.protocol.model import HEADER, Location, Op, Program, Step, Word
from halma.hal.testing.protocol.system import Move


class IllegalMove(Exception):
    """The trace does something that was not possible at that point."""


@dataclass(frozen=True)
class Value:
    """What a word says: who sent it, in which call."""

    sender: int
    call: int
    word: int


@dataclass(frozen=True)
class Outcome:
    """How a replay ended.

    Args:
        wrong: (rank, call, what was expected, what was taken) of every wrong word in a completed step.
        stuck: what each block waits for that nothing can move any more, with all stores visible; empty when
            somebody can, or all is done.
        lines: the trace in words.
    """

    wrong: tuple[tuple[int, int, Value, Value], ...]
    stuck: tuple[str, ...]
    lines: tuple[str, ...]


def replay(program: Program, moves: Iterable[Move]) -> Outcome:
    """Run the moves from the start.

    Raises:
        IllegalMove: naming the first move that is not possible where it stands.
    """
    machine = _Machine(program)
    lines = [machine.make(move) for move in moves]
    return Outcome(tuple(machine.wrong), machine.stuck(), tuple(lines))


class _Machine:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.locations = program.locations
        self.memory: dict[Location, tuple[int, Value | None]] = {}
        self.coming: dict[Location, deque[tuple[int, Value]]] = {location: deque() for location in self.locations}
        self.clearing: set[Location] = set()
        self.at: dict[tuple[int, int, int], int] = {}
        self.taken: dict[tuple[int, int, int], dict[Location, tuple[Value, Value]]] = {}
        self.out: set[int] = set()  # ranks that stopped or are in error
        self.wrong: list[tuple[int, int, Value, Value]] = []

    # -- what is where --------------------------------------------------------------------------------------

    def _steps(self, rank: int, call: int, block: int) -> tuple[Step, ...]:
        return self.program.blocks[rank][call][block]

    def _ended(self, rank: int, call: int) -> bool:
        return all(
            self.at.get((rank, call, block), 0) == len(steps)
            for block, steps in enumerate(self.program.blocks[rank][call])
        )

    def _started(self, rank: int, call: int) -> bool:
        return all(self._ended(rank, before) for before in range(call - self.program.rules.ahead))

    def _holds(self, word: Word) -> bool:
        """Whether a reader who waits for this word would take what is there."""
        flag, value = self.memory.get(word.location, (0, None))
        if word.unchecked:
            return True
        if word.flag is None:
            return value is not None
        return flag == word.flag if self.program.rules.compare == "equal" else flag >= word.flag

    # -- moves ----------------------------------------------------------------------------------------------

    def make(self, move: Move) -> str:
        """Make a move and say in words what happened."""
        if move.kind in ("deliver", "land"):
            return getattr(self, f"_{move.kind}")(move, self.locations[move.location])
        if move.rank in self.out:
            raise IllegalMove(f"{move}: the rank is out")
        if move.kind == "stop":
            self.out.add(move.rank)
            return f"rank {move.rank} stops"
        place = (move.rank, move.call, move.block)
        steps, at = self._steps(*place), self.at.get(place, 0)
        if at >= len(steps) or not self._started(move.rank, move.call):
            raise IllegalMove(f"{move}: the block has ended or not begun")
        step = steps[at]
        who = f"rank {move.rank} call {move.call} block {move.block}"
        if move.kind == "timeout" and step.op == Op.READ:
            return f"{who} {self._timeout(place)}"
        if move.kind != step.op.name.lower():
            raise IllegalMove(f"{move}: the block's step is {step.op.name}")
        return f"{who} {getattr(self, f'_{move.kind}')(move, place, step)}"

    def _deliver(self, move: Move, where: Location) -> str:
        if not self.coming[where]:
            raise IllegalMove(f"{move}: no store is on its way to {where}")
        flag, value = self.coming[where][0]
        for word in self.program.behind.get((where, value.call), ()):
            if any(store.call == value.call for _, store in self.coming[word]):
                raise IllegalMove(f"{move}: a store to {word} is to be visible before")
        self.coming[where].popleft()
        self.memory[where] = (flag, value)
        return f"visible at {_named(where)}: call {value.call}, flag {flag or 'none'}"

    def _land(self, move: Move, where: Location) -> str:
        if where not in self.clearing:
            raise IllegalMove(f"{move}: {where} is not being cleared")
        self.clearing.remove(where)
        self.memory.pop(where, None)
        return f"cleared: {_named(where)}"

    def _wait(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        if move.call and not self._ended(move.rank, move.call - 1):
            raise IllegalMove(f"{move}: the kernel before has not ended")
        self._advance(place)
        return "finds the kernel before it ended"

    def _run(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        self._advance(place)
        return "ends without waiting"

    def _push(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        for word in step.words:
            value = Value(move.rank, word.call, word.location.word)
            self.coming[word.location].append((word.flag or 0, value))
        self._advance(place)
        return "pushes to " + ", ".join(_named(word.location) for word in step.words)

    def _clear(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        self.clearing |= {word.location for word in step.words}
        self._advance(place)
        return "begins to clear " + ", ".join(_named(word.location) for word in step.words)

    def _fence(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        if self.clearing & {word.location for word in step.words}:
            raise IllegalMove(f"{move}: a clear has not landed")
        self._advance(place)
        return "passes its fence"

    def _read(self, move: Move, place: tuple[int, int, int], step: Step) -> str:
        where = self.locations[move.location]
        taken = self.taken.setdefault(place, {})
        word = next((word for word in step.words if word.location == where), None)
        if word is None or where in taken or not self._holds(word):
            raise IllegalMove(f"{move}: the block does not take {where} now")
        found = self.memory.get(where, (0, None))[1]
        wanted = Value(where.sender, word.call, where.word)
        taken[where] = (wanted, found if found is not None else Value(-1, -1, -1))
        if len(taken) == len(step.words):
            self.wrong += [(move.rank, move.call, a, b) for a, b in taken.values() if a != b]
            self._advance(place)
        from_call = "nobody's" if found is None else f"call {found.call}'s"
        return f"takes {from_call} word from {_named(where)}" + ("" if found == wanted else "   <-- wrong")

    def _timeout(self, place: tuple[int, int, int]) -> str:
        how = self.program.rules.timeout
        if how == "never":
            raise IllegalMove("waits have no bound here")
        if how == "sticky":
            self.out.add(place[0])
            return "gives up: the rank is in error"
        self._advance(place)
        return "gives up and goes on"

    def _advance(self, place: tuple[int, int, int]) -> None:
        self.at[place] = self.at.get(place, 0) + 1
        self.taken.pop(place, None)

    # -- the end --------------------------------------------------------------------------------------------

    def stuck(self) -> tuple[str, ...]:
        """Go on as long as anybody can move, with every store and clear visible at once. What each block then still
        waits for; empty when all is done."""
        while self._all_visible() or any([self._moved(place) for place in self._waiting()]):
            pass
        return tuple(self._why(place) for place in self._waiting())

    def _all_visible(self) -> bool:
        for where in list(self.clearing):
            self._land(Move("land"), where)
        moved = False
        # A chunk's flag has no word behind it that is not in the same list: words go first.
        for where, stores in sorted(self.coming.items(), key=lambda item: item[0].area.endswith(" flag")):
            while stores:
                self._deliver(Move("deliver"), where)
                moved = True
        return moved

    def _waiting(self) -> list[tuple[int, int, int]]:
        """The blocks that began and did not end."""
        return [
            (rank, call, block)
            for rank in range(self.program.world)
            if rank not in self.out
            for call, blocks in enumerate(self.program.blocks[rank])
            for block, steps in enumerate(blocks)
            if self.at.get((rank, call, block), 0) < len(steps) and self._started(rank, call)
        ]

    def _moved(self, place: tuple[int, int, int]) -> bool:
        """Whether the block could do anything; it has done it."""
        rank, call, block = place
        step = self._steps(*place)[self.at.get(place, 0)]
        try:
            if step.op == Op.READ:
                where = next(word.location for word in self._unread(place) if self._holds(word))
                self.make(Move("read", rank, call, block, self.locations.index(where)))
            else:
                self.make(Move(step.op.name.lower(), rank, call, block))
        except (IllegalMove, StopIteration):
            return False
        return True

    def _unread(self, place: tuple[int, int, int]) -> list[Word]:
        words = self._steps(*place)[self.at.get(place, 0)].words
        return [word for word in words if word.location not in self.taken.get(place, {})]

    def _why(self, place: tuple[int, int, int]) -> str:
        who = f"rank {place[0]} call {place[1]} block {place[2]} waits"
        if self._steps(*place)[self.at.get(place, 0)].op == Op.WAIT:
            return f"{who} for the kernel before it"
        word = self._unread(place)[0]
        flag, value = self.memory.get(word.location, (0, None))
        held = "nothing" if value is None else f"flag {flag or 'none'} of call {value.call}"
        return f"{who} for flag {'any' if word.flag is None else word.flag} at {_named(word.location)}: it holds {held}"


def _named(where: Location) -> str:
    what = "header" if where.area == HEADER else f"{where.area} word {where.word}"
    return f"{where.sender}>{where.reader} {what} buffer {where.buffer}"
