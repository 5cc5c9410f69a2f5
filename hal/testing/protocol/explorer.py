"""A search over all interleavings of a transition system, with a set of the states already seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

HANG = "hang"
"""The verdict of a state from which nothing can happen although somebody is not done."""


class TooManyStates(Exception):
    """The search met its limit: nothing is known about what it has not seen."""


class System(Protocol[S, A_co]):
    """What can be searched. States are compared by equality, and nothing but the state decides what follows."""

    def start(self) -> S:
        """The one initial state."""
        ...

    def steps(self, state: S) -> Iterable[tuple[A_co, S]]:
        """Every action that is possible in this state, with the state after it."""
        ...

    def violation(self, state: S) -> str | None:
        """What is wrong with this state, or nothing. Such a state is not searched further."""
        ...

    def done(self, state: S) -> bool:
        """Whether it is fine that nothing can happen any more."""
        ...


@dataclass(frozen=True)
class Exploration(Generic[A]):
    """What a search found.

    Args:
        violations: every kind met; with ``first`` the search ends at the first one.
        trace: the actions that lead from the start to the first violation; the fewest there are.
        states: distinct states seen.
        steps: actions tried, those into known states included.
        depth: actions on the way to the farthest state.
    """

    violations: frozenset[str]
    trace: tuple[A, ...]
    states: int
    steps: int
    depth: int


def explore(system: System[S, A], *, first: bool = True, limit: int = 5_000_000) -> Exploration[A]:
    """Search breadth first, so that the trace of the first violation is as short as any.

    Args:
        system: what to search.
        first: end at the first violation; otherwise go on and gather all kinds.
        limit: states to see at most.

    Raises:
        TooManyStates: there are more; the search then has no verdict.
    """
    start = system.start()
    parents: dict[S, S | None] = {start: None}
    layer: deque[S] = deque([start])
    kinds: set[str] = set()
    trace: tuple[A, ...] = ()
    tried = depth = 0
    while layer:
        following: deque[S] = deque()
        for state in layer:
            kind = system.violation(state)
            after: Iterable[tuple[A, S]] = ()
            if kind is None:
                after = system.steps(state)
                if not isinstance(after, list):
                    after = list(after)
                if not after and not system.done(state):
                    kind = HANG
            if kind is not None:
                trace = trace if kinds else _path(system, parents, state)
                kinds.add(kind)
                if first:
                    return Exploration(frozenset(kinds), trace, len(parents), tried, depth)
                continue
            for _, next_state in after:
                tried += 1
                if next_state not in parents:
                    parents[next_state] = state
                    following.append(next_state)
        if len(parents) > limit:
            raise TooManyStates(f"more than {limit} states, {depth} actions deep")
        layer = following
        depth += bool(layer)
    return Exploration(frozenset(kinds), trace, len(parents), tried, depth)


def _path(system: System[S, A], parents: dict[S, S | None], state: S) -> tuple[A, ...]:
    """The actions from the start to this state. They are not kept during the search but found again: a third less
    memory."""
    actions: list[A] = []
    before = parents[state]
    while before is not None:
        actions.append(next(action for action, after in system.steps(before) if after == state))
        state, before = before, parents[before]
    return tuple(reversed(actions))
