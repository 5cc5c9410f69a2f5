"""Searches a variant, case by case, and has each counterexample replayed before it is believed."""

from __future__ import annotations

from dataclasses import dataclass

from halma.hal.testing.protocol.cases import HOLDS, Variant
from halma.hal.testing.protocol.explorer import explore
from halma.hal.testing.protocol.model import Rules, Script, program
from halma.hal.testing.protocol.replay import Outcome, replay
from halma.hal.testing.protocol.system import WRONG, Move, Reduced, Whole


class Unconfirmed(Exception):
    """A counterexample that its replay does not show: the model has a defect."""


@dataclass(frozen=True)
class Counterexample:
    """A run that goes wrong.

    Args:
        world, script: ranks and calls of the run.
        moves: the run.
        outcome: what its replay showed.
    """

    world: int
    script: Script
    moves: tuple[Move, ...]
    outcome: Outcome


@dataclass(frozen=True)
class Finding:
    """What came out of a variant.

    Args:
        verdict: ``HOLDS``, or the first violation's kind.
        cases: lists of calls searched, once for each number of ranks.
        states: distinct states, all cases together.
        skew: the most calls that a rank was ahead of another.
        counterexample: the run that shows the violation, confirmed by its replay.
    """

    verdict: str
    cases: int
    states: int
    skew: int
    counterexample: Counterexample | None = None


def find(searched: Variant, *, rules: Rules | None = None, whole: bool | None = None) -> Finding:
    """Search all cases of a variant, or its calls under other rules; end at the first violation.

    Raises:
        Unconfirmed: the replay of a counterexample does not go wrong, or not in that way.
    """
    whole = searched.whole if whole is None else whole
    cases = states = skew = 0
    for world, script in searched.cases():
        made = program(rules or searched.rules, world, script)
        system = Whole(made) if whole else Reduced(made)
        seen = explore(system)
        cases, states, skew = cases + 1, states + seen.states, max(skew, system.skew)
        for kind in seen.violations:
            opening = system.opening if isinstance(system, Reduced) else ()
            moves = opening + tuple(move for run in seen.trace for move in run)
            outcome = replay(made, moves)
            if not (outcome.wrong if kind == WRONG else outcome.stuck):
                raise Unconfirmed(f"{searched.name}: {kind} after {len(moves)} moves, and the replay shows none")
            return Finding(kind, cases, states, skew, Counterexample(world, script, moves, outcome))
    return Finding(HOLDS, cases, states, skew)


def as_expected(searched: Variant, finding: Finding) -> bool:
    """Whether the verdict is the variant's and, where it holds, no rank was further ahead than allowed."""
    return finding.verdict == searched.verdict and (finding.verdict != HOLDS or finding.skew <= searched.skew)
