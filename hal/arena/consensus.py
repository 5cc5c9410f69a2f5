"""Stages that all ranks of an arena go through together: each does its work, and hears how it went for the others.

No rank raises before it has told: a failure goes into the exchange first (G26). So nobody waits for a rank that
failed, and all see its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from halma.hal.arena.ledger import first_difference
from halma.hal.collectives.contract import Ranks
from halma.hal.errors import ArenaError, CaptureError, RankError, RankLeft
from halma.hal.graph.agreement import Vote

T = TypeVar("T")


def together(ranks: Ranks, stage: str, work: Callable[[], T]) -> list[T]:
    """Do ``work`` on every rank; returns what it returned on each, by rank of the group.

    Raises:
        ArenaError: it failed on another rank; all that failed are named with their messages.
        RankError: a rank did not come.
        What ``work`` raised, on the rank that it failed on, once the others know.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    answers = ranks.exchange(stage, (text, value))
    if failure is not None:
        raise failure
    failed = [f"{ranks.names[rank]}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if failed:
        raise ArenaError(
            f"{failed[0].split(':', 1)[0]} failed at {stage!r}, so no rank goes on",
            asked=f"{stage} on {ranks.size} ranks",
            found=failed,
            do="mend that rank's error, and start all ranks again",
        )
    return cast("list[T]", [answer for _, answer in answers])


def refuse_difference(ranks: Ranks, what: str, lines: Sequence[Sequence[str]], do: str) -> None:
    """Refuse, on every rank alike, what is not equal on all of them.

    Raises:
        ArenaError: with the first difference, and whose it is.
    """
    difference = first_difference(lines, ranks.names)
    if difference is not None:
        raise ArenaError(f"ranks do not agree on {what}", found=difference, do=do)


class RanksAgreement:
    """The ranks of an arena, as those that a capture session votes with."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank = ranks.rank

    def exchange(self, vote: Vote) -> Sequence[Vote]:
        """Every rank's vote. The stage is part of it and is compared by the session, which names what differs.

        Raises:
            RankLeft: a rank said that it does not come.
            CaptureError: a rank did not vote in time.
        """
        try:
            return self._ranks.exchange("vote", vote)
        except RankLeft:
            raise
        except RankError as error:
            raise CaptureError(
                "a rank did not take part in a capture",
                asked=f"votes of {self._ranks.size} ranks on {vote.stage!r}; this is rank {self.rank}",
                found=str(error).splitlines(),
                do="look at the other ranks' own errors: one of them ended, or captures other descriptors",
            ) from error

    def leave(self, reason: str) -> None:
        """See :meth:`halma.hal.collectives.contract.Ranks.leave`."""
        self._ranks.leave(reason)
