"""Ranks that capture together agree before and after each capture (G26).

A rank that captures alone, or fails alone, leaves the others waiting in a collective for ever. So every rank
votes on what it is about to do and on how it went, always in the same order, and never while an exception is on
its way: the failure is put into the vote first, and raised after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from halma.hal.errors import CaptureError


@dataclass(frozen=True)
class Vote:
    """What one rank says at one stage.

    Attributes:
        stage: where it is; ranks at different stages have gone apart.
        subjects: what must be equal on all ranks, in order: the mode, then descriptors.
        refusal: why this rank would rather stay eager (memory); empty where it would not.
        error: what went wrong on this rank; empty where nothing did.
    """

    stage: str
    subjects: tuple[str, ...] = ()
    refusal: str = ""
    error: str = ""


class Agreement(Protocol):
    """A group of ranks that exchange votes; also a barrier, since nobody returns before all have voted."""

    @property
    def rank(self) -> int: ...
    def exchange(self, vote: Vote) -> Sequence[Vote]:
        """Every rank's vote, by rank."""
        ...

    def leave(self, reason: str) -> None:
        """Tell whoever comes to the next vote that this rank does not; never waits, never raises."""
        ...


class NoAgreement:
    """One rank, which always agrees."""

    rank = 0

    def exchange(self, vote: Vote) -> Sequence[Vote]:
        """Its own vote."""
        return (vote,)

    def leave(self, reason: str) -> None:
        """Nobody waits."""


class RankAgreement:
    """Votes over ``torch.distributed``.

    Args:
        group: a process group that moves host objects (gloo); None: the default group. Its timeout bounds every
            wait: a rank that died is an error on the others after that time.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as distributed

        self._distributed: Any = distributed
        self._group = group
        self.rank = int(self._distributed.get_rank(group))
        self._size = int(self._distributed.get_world_size(group))

    def exchange(self, vote: Vote) -> Sequence[Vote]:
        """Every rank's vote, by rank of the group.

        Raises:
            CaptureError: a rank did not vote in time, or the connection to it is gone.
        """
        found: list[Vote | None] = [None] * self._size
        try:
            self._distributed.all_gather_object(found, vote, group=self._group)
        except RuntimeError as error:
            raise CaptureError(
                "a rank did not take part in a capture",
                asked=f"votes of {self._size} ranks on {vote.stage!r}; this is rank {self.rank}",
                found=str(error).splitlines()[0],
                do="look at the other ranks' own errors: one of them ended, or captures other descriptors",
            ) from error
        return cast("list[Vote]", found)

    def leave(self, reason: str) -> None:
        """Nothing: a group's own collectives have no way to say so. The others hear of it when the connection goes,
        or by the group's timeout."""


def settle(agreement: Agreement, vote: Vote) -> str | None:
    """Vote, and compare. Returns why all ranks stay eager, or None.

    Raises:
        CaptureError: another rank failed, with its message; or ranks differ in stage or subject, with the first
            difference. What went wrong on this rank is the caller's to raise, after this returned.
    """
    votes = agreement.exchange(vote)
    failed = [rank for rank, other in enumerate(votes) if other.error]
    if failed:
        if vote.error:
            return None  # this rank's own error says more than that there was one
        raise CaptureError(
            f"rank {failed[0]} failed at {votes[failed[0]].stage}, so no rank goes on",
            found=[f"rank {rank}: {votes[rank].error}" for rank in failed],
            do="mend that rank's error; every rank must capture the same descriptors",
        )
    for rank, other in enumerate(votes):
        difference = _difference(votes[0], other)
        if difference is not None:
            raise CaptureError(
                f"ranks do not agree on what to capture: they differ in {difference[0]}",
                found=(f"rank 0: {difference[1]}", f"rank {rank}: {difference[2]}"),
                do="give every rank the same settings (HALMA_GRAPH...), ladder, order and model",
            )
    reasons = [f"rank {rank}: {other.refusal}" for rank, other in enumerate(votes) if other.refusal]
    if not reasons:
        return None
    return vote.refusal if len(votes) == 1 else reasons[0]


def _difference(first: Vote, other: Vote) -> tuple[str, str, str] | None:
    """(what differs, the first's value, the other's), or None."""
    if first.stage != other.stage:
        return "their stage", first.stage, other.stage
    for position, (one, two) in enumerate(zip(first.subjects, other.subjects, strict=False)):
        if one != two:
            return f"entry {position} of {first.stage}", one, two
    if len(first.subjects) != len(other.subjects):
        shorter = min(len(first.subjects), len(other.subjects))
        ends = [vote.subjects[shorter] if len(vote.subjects) > shorter else "nothing" for vote in (first, other)]
        return f"entry {shorter} of {first.stage}", ends[0], ends[1]
    return None
