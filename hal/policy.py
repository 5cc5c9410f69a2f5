"""Guards on facts: an option is for exactly the model, execution and device that its guard names, and for no other.

A *fact* is a plain value under a dotted name: ``model.hidden_size``, ``device.arch``. Whoever builds the operators of
a program says the facts that it knows (``Ops(..., facts=...)``); a route that was calibrated elsewhere names the
values that it is for. The first field that differs, or is not known, refuses it by name: a guard fails closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from halma.hal.decisions import Candidate, Decision
from halma.hal.routes import Call, Requirement

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class OneOf:
    """Any of some values, each as exact as a single one."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@dataclass(frozen=True)
class Guard:
    """Values that facts must have.

    Args:
        wanted: name of a fact, and its value or :class:`OneOf` some, in the order in which they are looked at.
        source: who reported that the option pays there.
    """

    wanted: tuple[tuple[str, Any], ...]
    source: str = ""

    def refusal(self, facts: Facts) -> str | None:
        """The first fact that differs, as a clause that names it, or None where all are equal."""
        for name, value in self.wanted:
            if name not in facts:
                return f"{name} is not known, it is for {value}"
            found = facts[name]
            allowed: tuple[Any, ...] = value.values if isinstance(value, OneOf) else (value,)
            # By type as well: True is no 1, and 8.0 experts are none.
            if not any(type(found) is type(one) and found == one for one in allowed):
                return f"{name} is {found}, it is for {value}"
        return None

    def and_also(self, other: Guard) -> Guard:
        """Both; the source of the first that has one."""
        return Guard((*self.wanted, *other.wanted), self.source or other.source)

    @property
    def names(self) -> tuple[str, ...]:
        """The facts that it looks at."""
        return tuple(name for name, _ in self.wanted)


@dataclass(frozen=True)
class Headroom:
    """Device memory that must stay free beside everything that a program plans, for what its kernels take as they run.

    A backend says what its programs need in an attribute ``headroom``, a sequence of these; one without it needs none.

    Args:
        name: what for.
        guard: the programs that need it.
        need: most tokens of a step -> bytes.
    """

    name: str
    guard: Guard
    need: Callable[[int], int]


@dataclass(frozen=True)
class Kept:
    """What one :class:`Headroom` comes to for a program: its bytes, or 0 with the reason why it needs none."""

    name: str
    nbytes: int
    reason: str

    def decision(self) -> Decision:
        """For reports."""
        chosen = "kept free" if self.nbytes else "nothing"
        other = "for another program" if self.nbytes else self.reason
        return Decision(
            "memory",
            self.name,
            chosen,
            (
                Candidate("kept free", bool(self.nbytes), self.reason),
                Candidate("nothing", not self.nbytes, other),
            ),
        )


def headroom_for(backend: object, facts: Facts, tokens: int) -> tuple[Kept, ...]:
    """What ``backend`` wants kept free for a program of ``facts`` whose largest step has ``tokens`` tokens."""
    wanted: tuple[Headroom, ...] = tuple(getattr(backend, "headroom", ()))
    found: list[Kept] = []
    for one in wanted:
        refusal = one.guard.refusal(facts)
        nbytes = 0 if refusal is not None else one.need(tokens)
        source = f"; {one.guard.source}" if one.guard.source else ""
        found.append(Kept(one.name, nbytes, refusal or f"{nbytes:,} bytes for steps of {tokens} tokens{source}"))
    return tuple(found)


def guarded(guard: Guard) -> Requirement:
    """A route's requirement: the facts of the program are the guard's."""
    return partial(_need, guard)


def _need(guard: Guard, call: Call) -> str | None:
    return guard.refusal(call.facts)
