"""How many tokens to draft: what was accepted so far, what a step costs, and the choice that follows.

Everything here is arithmetic on numbers that all ranks of a divided model share: results of steps, which are equal on
all of them, and step costs, which rank 0 measured for all. So the ranks choose alike, at the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import RequestError
from halma.models.deepseek_v4.runner import MAX_DRAFTS

AUTO_LENGTHS = (1, 2, 4, 8)
"""Draft lengths that are captured to choose from; each is a ladder of graphs of its own, so they are few."""
DECIDE_EVERY = 16
"""Verify steps between two choices for one number of requests."""
PRIOR, PRIOR_WEIGHT = 0.7, 4.0
"""Acceptance of a first draft that was never seen (vllm-project/vllm#41044 has 0.70 on random text), as if this many
drafts had shown it. A later draft starts from what the one before it shows, so a length that was never tried is not
ruled out by that."""
MEMORY = 1024.0
"""First drafts that are remembered; beyond them all counts are halved, so that older text fades."""
KEPT_CHOICES = 256
"""Choices that a report lists; the newest ones."""


def auto_lengths(most: int) -> tuple[int, ...]:
    """The draft lengths to capture for a choice among at most ``most`` drafts."""
    return tuple(sorted({min(length, most) for length in AUTO_LENGTHS}))


@dataclass
class Acceptance:
    """What became of drafts, over the verify steps of all requests.

    A draft counts as *judged* where the step could have accepted it: not behind a request's last token, nor behind a
    stop token, and only where it was drafted.

    Attributes:
        judged, accepted: by position; a draft behind a rejected one is judged, and not accepted.
        rows: verify steps, counted once for each request that got a token in them.
        tokens: that they gave.
        full_rows, full_tokens: of those in which as many drafts were judged as the step verifies.
    """

    judged: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    rows: int = 0
    tokens: int = 0
    full_rows: int = 0
    full_tokens: int = 0

    def count(self, *, verified: int, judged: int, accepted: int) -> None:
        """One request's part of a step that verified ``verified`` drafts."""
        self.rows += 1
        self.tokens += accepted + 1
        if judged == verified:
            self.full_rows += 1
            self.full_tokens += accepted + 1
        for position in range(judged):
            self.judged[position] += 1
            self.accepted[position] += position < accepted

    def as_json(self) -> dict[str, Any]:
        """For reports; a ratio of nothing is null."""
        depth = max((at + 1 for at, count in enumerate(self.judged) if count), default=0)
        return {
            "acceptance": [self.accepted[at] / self.judged[at] for at in range(depth)],
            "judged": self.judged[:depth],
            "accepted": self.accepted[:depth],
            "mean_accepted_length": self.full_tokens / self.full_rows if self.full_rows else None,
            "tokens_per_step": self.tokens / self.rows if self.rows else None,
            "verified": self.rows,
        }


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a verify step by (requests that it was captured for, drafts)."""

    seconds: Mapping[tuple[int, int], float]

    @property
    def lengths(self) -> list[int]:
        """Draft lengths, rising."""
        return sorted({drafts for _, drafts in self.seconds})

    def rung(self, requests: int) -> int:
        """The number of requests that a step of ``requests`` is captured for."""
        return min(size for size, _ in self.seconds if size >= requests)


class Drafts(Protocol):
    """How many drafts the next step verifies and makes."""

    asked: int | str

    def choose(self, requests: int) -> int:
        """For the next step, of ``requests`` requests; called once a step."""
        ...

    def seen(self, judged: int, accepted: int) -> None:
        """What became of one request's drafts in a step."""
        ...

    def as_json(self) -> dict[str, Any]:
        """What was asked and chosen, and why."""
        ...


class FixedDrafts:
    """Always as many."""

    def __init__(self, drafts: int) -> None:
        self.asked: int | str = drafts
        self._drafts = drafts

    def choose(self, requests: int) -> int:
        """The number that was asked for."""
        return self._drafts

    def seen(self, judged: int, accepted: int) -> None:
        """Changes nothing."""

    def as_json(self) -> dict[str, Any]:
        """See :meth:`Drafts.as_json`."""
        return {"asked": self.asked, "choices": []}


@dataclass(frozen=True)
class Choice:
    """A choice that was made: before which verify step, for how many requests, and what each length promised."""

    step: int
    requests: int
    drafts: int
    promised: Mapping[int, float]
    """Tokens a second and request, by draft length."""
    seconds: Mapping[int, float]
    """Of a step, by draft length."""

    def as_decision(self) -> Decision:
        """As the layer records choices."""
        candidates = tuple(
            Candidate(
                f"{drafts} drafts",
                drafts == self.drafts,
                f"{rate * self.seconds[drafts]:.2f} tokens expected in {self.seconds[drafts] * 1e3:.3f} ms: "
                f"{rate:.1f} tokens/s a request",
            )
            for drafts, rate in self.promised.items()
        )
        return Decision("drafts", f"{self.requests} requests", f"{self.drafts} drafts", candidates, "drafts=auto")

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "step": self.step,
            "requests": self.requests,
            "drafts": self.drafts,
            "tokens_per_second": {str(drafts): rate for drafts, rate in self.promised.items()},
        }


class AdaptiveDrafts:
    """The length that promises the most tokens a second.

    Chosen anew every :data:`DECIDE_EVERY` verify steps, and where the number of requests moves to another captured
    size; from results that the engine reads a fixed number of steps late. Two engines with the same requests and
    costs choose the same at every step.

    Args:
        costs: of every captured length, at every captured number of requests; None: not measured yet.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.asked: int | str = "auto"
        self.costs = None if costs is None else check_costs(costs)
        self.choices: list[Choice] = []
        self._passed = [0.0] * MAX_DRAFTS
        self._tried = [0.0] * MAX_DRAFTS
        self._steps = 0
        self._decided = -DECIDE_EVERY
        self._rung = 0

    def choose(self, requests: int) -> int:
        """See :meth:`Drafts.choose`."""
        assert self.costs is not None
        rung = self.costs.rung(requests)
        if rung != self._rung or self._steps - self._decided >= DECIDE_EVERY:
            self._decide(self.costs, rung)
        self._steps += 1
        return self.choices[-1].drafts

    def seen(self, judged: int, accepted: int) -> None:
        """See :meth:`Drafts.seen`. A draft tells something only where all before it were accepted."""
        for position in range(min(accepted + 1, judged)):
            self._tried[position] += 1
            self._passed[position] += position < accepted
        if self._tried[0] > MEMORY:
            self._tried = [count / 2 for count in self._tried]
            self._passed = [count / 2 for count in self._passed]

    def expected(self, drafts: int) -> float:
        """Tokens that a step with ``drafts`` drafts is expected to give a request."""
        tokens, reached, chance = 1.0, 1.0, PRIOR
        for position in range(drafts):
            chance = (self._passed[position] + PRIOR_WEIGHT * chance) / (self._tried[position] + PRIOR_WEIGHT)
            reached *= chance
            tokens += reached
        return tokens

    def as_json(self) -> dict[str, Any]:
        """See :meth:`Drafts.as_json`."""
        measured = {} if self.costs is None else self.costs.seconds
        costs = [
            {"requests": requests, "drafts": drafts, "milliseconds": seconds * 1e3}
            for (requests, drafts), seconds in sorted(measured.items())
        ]
        return {"asked": self.asked, "choices": [one.as_json() for one in self.choices], "step_costs": costs}

    def _decide(self, costs: StepCosts, rung: int) -> None:
        seconds = {drafts: costs.seconds[rung, drafts] for drafts in costs.lengths}
        promised = {drafts: self.expected(drafts) / spent for drafts, spent in seconds.items()}
        best = max(promised, key=lambda drafts: promised[drafts])  # among equals the first, which is the shortest
        choice = Choice(self._steps, rung, best, promised, seconds)
        if not self.choices or (self.choices[-1].drafts, self._rung) != (best, rung):
            decisions.record(choice.as_decision())
        self.choices = [*self.choices[1 - KEPT_CHOICES :], choice]
        self._rung, self._decided = rung, self._steps


def check_drafts(asked: int | str, captured: Sequence[int]) -> None:
    """Whether an engine can draft so many.

    Raises:
        RequestError: the runner was made without MTP, or without graphs of that length.
    """
    known = isinstance(asked, int) and not isinstance(asked, bool) and asked in captured
    if known or (asked == "auto" and captured):
        return
    lengths = ", ".join(map(str, captured))
    raise RequestError(
        "this runner has no steps with so many drafts",
        asked=f"drafts={asked!r}",
        found=f"it was made for {lengths} drafts" if captured else "it was made without MTP",
        do=f'drafts={captured[0]}, or "auto"' if captured else "RunnerOptions(mtp=...), with a model that has MTP",
    )


def drafts_of(asked: int | str | None, costs: StepCosts | None = None) -> Drafts | None:
    """Who chooses, for what an engine was asked; ``costs`` are for ``"auto"``."""
    if asked is None:
        return None
    return FixedDrafts(asked) if isinstance(asked, int) else AdaptiveDrafts(costs)


def check_costs(costs: StepCosts) -> StepCosts:
    """The costs, if they are such that a choice can follow from them.

    Raises:
        RequestError: a length was not measured at every number of requests, or a cost is no positive number.
    """
    sizes, lengths = {size for size, _ in costs.seconds}, costs.lengths
    holes = [(size, drafts) for size in sorted(sizes) for drafts in lengths if (size, drafts) not in costs.seconds]
    wrong = [key for key, spent in costs.seconds.items() if not (math.isfinite(spent) and spent > 0)]
    if holes or wrong or not sizes:
        raise RequestError(
            "step costs cannot be compared",
            asked='drafts="auto"',
            found=[f"not measured, as (requests, drafts): {holes}", f"no positive number: {wrong}"],
            do="measure every captured length at every captured number of requests",
        )
    return costs
