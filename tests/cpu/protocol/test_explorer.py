"""The search itself, on systems whose answers are known without it."""

from __future__ import annotations

from math import comb

import pytest

from halma.hal.testing.protocol.explorer import HANG, TooManyStates, explore

pytestmark = pytest.mark.torchfree

Counts = tuple[int, ...]


class Counters:
    """Counters that each go from 0 to ``top``, in any order."""

    def __init__(self, counters: int, top: int, bad: Counts | None = None) -> None:
        self.counters, self.top, self.bad = counters, top, bad

    def start(self) -> Counts:
        return (0,) * self.counters

    def steps(self, state: Counts) -> list[tuple[int, Counts]]:
        return [(i, (*state[:i], n + 1, *state[i + 1 :])) for i, n in enumerate(state) if n < self.top]

    def violation(self, state: Counts) -> str | None:
        return "planted" if state == self.bad else None

    def done(self, state: Counts) -> bool:
        return min(state) == self.top


class Forks:
    """Philosophers at a table: each takes one fork, then the other. The first may be left-handed."""

    def __init__(self, seats: int, *, left_handed: bool) -> None:
        self.seats, self.left_handed = seats, left_handed

    def start(self) -> Counts:
        return (0,) * self.seats  # forks each has; 3 is done with the meal

    def _order(self, seat: int) -> tuple[int, int]:
        forks = (seat, (seat + 1) % self.seats)
        return (forks[1], forks[0]) if self.left_handed and seat == 0 else forks

    def steps(self, state: Counts) -> list[tuple[str, Counts]]:
        taken = {fork for seat, has in enumerate(state) if has < 3 for fork in self._order(seat)[:has]}
        found: list[tuple[str, Counts]] = []
        for seat, has in enumerate(state):
            if has == 2 or (has < 2 and self._order(seat)[has] not in taken):
                found.append((f"{seat}:{has}", (*state[:seat], has + 1, *state[seat + 1 :])))
        return found

    def violation(self, state: Counts) -> str | None:
        return None

    def done(self, state: Counts) -> bool:
        return set(state) == {3}


@pytest.mark.parametrize(("counters", "top"), [(1, 9), (2, 5), (3, 4), (5, 2)])
def test_it_sees_every_state_once(counters: int, top: int) -> None:
    seen = explore(Counters(counters, top))
    assert seen.states == (top + 1) ** counters
    assert seen.steps == counters * top * (top + 1) ** (counters - 1)
    assert seen.depth == counters * top
    assert seen.violations == frozenset()


def test_it_finds_a_planted_violation_by_a_shortest_way() -> None:
    seen = explore(Counters(3, 4, bad=(2, 0, 1)))
    assert seen.violations == {"planted"}
    assert sorted(seen.trace) == [0, 0, 2]


def test_it_goes_round_a_violation_when_all_kinds_are_asked_for() -> None:
    seen = explore(Counters(2, 3, bad=(3, 3)), first=False)
    assert seen.violations == {"planted"}
    assert seen.states == 16
    # A state that is wrong is not searched further: the one behind it alone is not seen.
    assert explore(Counters(1, 3, bad=(2,)), first=False).states == 3


@pytest.mark.parametrize("seats", [2, 3, 4])
def test_it_finds_a_planted_deadlock(seats: int) -> None:
    seen = explore(Forks(seats, left_handed=False))
    assert seen.violations == {HANG}
    assert sorted(seen.trace) == [f"{seat}:0" for seat in range(seats)]
    assert explore(Forks(seats, left_handed=True)).violations == frozenset()


def test_an_end_is_no_deadlock() -> None:
    system = Counters(2, 1)
    assert explore(system).violations == frozenset()
    system.done = lambda state: False  # type: ignore[method-assign]
    assert explore(system).violations == {HANG}


def test_a_search_that_is_cut_short_has_no_verdict() -> None:
    with pytest.raises(TooManyStates, match="more than 100 states"):
        explore(Counters(4, 9), limit=100)
    assert explore(Counters(4, 1), limit=100).states == sum(comb(4, k) for k in range(5))
