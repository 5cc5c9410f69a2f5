"""A whole capture ladder against an arena plan, at start-up (A2).

A descriptor that is found missing during capture has put the vendor's collective into a graph, and nobody knows: a
batch of 64 then finished 226 of 65,536 tokens (MooreThreads/vllm-musa#178).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from halma.hal.arena.plan import ArenaPlan
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import ArenaError
from halma.hal.graph.descriptor import Descriptor

POLICIES: Final = ("error", "fall back")


@dataclass(frozen=True)
class Coverage:
    """Which descriptors of a ladder may use an arena.

    Attributes:
        uncovered: the others, each with its reason.
    """

    covered: tuple[Descriptor, ...]
    uncovered: tuple[tuple[Descriptor, str], ...]


def coverage(plan: ArenaPlan, ladder: Iterable[Descriptor]) -> Coverage:
    """The ladder, split in two; allocates and records nothing."""
    covered: list[Descriptor] = []
    uncovered: list[tuple[Descriptor, str]] = []
    for one in ladder:
        reason = plan.refusal(one)
        if reason is None:
            covered.append(one)
        else:
            uncovered.append((one, reason))
    return Coverage(tuple(covered), tuple(uncovered))


def known_policy(policy: str) -> str:
    """``policy``.

    Raises:
        ArenaError: there is none of that name.
    """
    if policy not in POLICIES:
        raise ArenaError(
            f"no policy called {policy!r}", asked=f"policy={policy!r}", do="one of " + ", ".join(map(repr, POLICIES))
        )
    return policy


def check_ladder(plan: ArenaPlan, ladder: Iterable[Descriptor], policy: str = "error") -> Coverage:
    """Check a ladder before anything of it is captured.

    Args:
        policy: ``error`` raises; ``fall back`` records a decision for each uncovered descriptor, whose calls take
            the vendor's collectives.

    Raises:
        ArenaError: no such policy; or there are uncovered descriptors, and every one is named with its reason.
    """
    known_policy(policy)
    wanted = list(ladder)
    found = coverage(plan, wanted)
    if found.uncovered and policy == "error":
        raise ArenaError(
            "the arena plan does not cover the capture ladder",
            asked=f"{len(wanted)} descriptors; the plan is for {plan.asked()}",
            found=[f"{one}: {reason}" for one, reason in found.uncovered],
            do=("plan for the whole ladder", "or policy='fall back': these take the vendor's collectives"),
        )
    for one, reason in found.uncovered:
        candidates = (Candidate("arena", False, reason), Candidate("vendor", True, f"the arena is refused: {reason}"))
        decisions.record(Decision("collective", str(one), "vendor", candidates, plan.asked()))
    return found
