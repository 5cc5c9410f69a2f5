"""A group of ranks as the host sees it: exchanges of small values that name whoever does not come.

Exchanges go through the key-value store that a torch.distributed group was made with, not through the group's own
collectives: there a missing rank is a time-out without a name, and one that died takes the others' connections with
it, so that the survivors could not tell each other what they saw.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from halma.hal.collectives.contract import Ranks
from halma.hal.errors import CollectiveError, RankError, RankLeft
from halma.hal.process import Home

SHORTEST_NAP: Final = 0.0002
LONGEST_NAP: Final = 0.01
"""Seconds between two looks at the store; a look costs it about 0.1 ms."""


class AnsweringRanks(Ranks, Protocol):
    """Ranks that can also be asked where some may not answer."""

    def answers(self, stage: str, value: Any, seconds: float) -> Mapping[int, Any]:
        """Values of the ranks that say something at ``stage`` within ``seconds``, this one's included."""
        ...


@dataclass(frozen=True)
class _Left:
    """In place of a rank's value: it does not come to this exchange."""

    reason: str


class SoloRanks:
    """One rank, which has nobody to wait for."""

    rank = 0
    size = 1
    names: Sequence[str] = ("the only rank",)

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def leave(self, reason: str) -> None:
        """Nobody waits."""

    def answers(self, stage: str, value: Any, seconds: float) -> Mapping[int, Any]:
        """Its own value."""
        return {0: value}


class DistributedRanks:
    """The members of a torch.distributed group, numbered 0..size-1 whatever their global ranks are (A13).

    Every member makes its objects of one group in the same order.

    Args:
        group: a process group of any backend; its store is used.
        seconds: how long an exchange waits.

    Raises:
        CollectiveError: this process is no member, or torch.distributed is not initialised.
        RankError: a member did not come.
    """

    _made: Counter[str] = Counter()

    def __init__(self, group: Any, seconds: float = 300.0) -> None:
        import torch.distributed as distributed
        from torch.distributed import distributed_c10d as internal

        if not distributed.is_available() or not distributed.is_initialized():
            raise CollectiveError(
                "torch.distributed is not initialised",
                asked="a group of ranks",
                do="start with torchrun and call torch.distributed.init_process_group() first",
            )
        if group is None or group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise CollectiveError(
                "this process is no member of the group",
                asked="collectives of an explicit group",
                found=f"global rank {distributed.get_rank()} got {group!r}",
                do="only members make collectives of a group; all ranks together are torch.distributed.group.WORLD",
            )
        if not isinstance(group, distributed.ProcessGroup):
            raise CollectiveError(
                "that is no group of ranks",
                found=repr(group),
                do="torch.distributed.group.WORLD, or what torch.distributed.new_group() returned",
            )
        self.rank = int(distributed.get_rank(group))
        self.size = int(distributed.get_world_size(group))
        # The one accessor there is; torch's own symmetric memory uses it too.
        self._store: Any = internal._get_process_group_store(group)  # pyright: ignore[reportPrivateUsage]
        name = str(getattr(group, "group_name", "group"))
        self._prefix = f"halma/{self._made[name]}"
        self._made[name] += 1
        self._home = Home()
        self._seconds = seconds
        self._count = 0
        self._said: list[int] = []
        """Exchanges whose value of this rank is still in the store."""
        self.names: Sequence[str] = [f"rank {rank} of the group" for rank in range(self.size)]
        self.names = self.exchange("names", f"global rank {distributed.get_rank()} on {socket.gethostname()}")

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's value, by rank of the group; nobody returns before all have come.

        Raises:
            RankLeft: a rank said that it does not come; at once, whoever else is still missing.
            RankError: a rank did not come in time, or is at another stage; named.
        """
        self._home.refuse_other("the group", f"an exchange at {stage!r}", RankError)
        number = self._next()
        found = self._gather(f"{number}", (stage, value), self._seconds)
        left = {rank: one.reason for rank, (_, one) in found.items() if isinstance(one, _Left)}
        if left:
            raise RankLeft(
                f"{self._listed(sorted(left))} left before {stage!r}",
                asked=f"an exchange of {self.size} ranks; this is rank {self.rank} ({self.names[self.rank]})",
                found=[f"rank {rank}: {left[rank]}" for rank in sorted(left)],
                do="mend that rank's error; every rank must take part in what the others wait for",
            )
        missing = [rank for rank in range(self.size) if rank not in found]
        if missing:
            raise RankError(
                f"{self._listed(missing)} did not come to {stage!r} within {self._seconds:g} s",
                asked=f"a value of each of {self.size} ranks; this is rank {self.rank} ({self.names[self.rank]})",
                found=[f"rank {rank} is there, at {found[rank][0]!r}" for rank in sorted(found)],
                do="look at that rank's own output: it ended, hangs, or makes other calls",
            )
        for rank in range(self.size):
            if found[rank][0] != found[0][0]:
                raise RankError(
                    f"ranks are at different stages: {self._listed([rank])} is not where rank 0 is",
                    found=[f"rank {other}: {found[other][0]!r}" for other in range(self.size)],
                    do="every rank of a group must make the same calls in the same order",
                )
        done, self._said = self._said[:-1], self._said[-1:]
        for one in done:  # whoever came to this exchange has read those before
            self._ask(lambda key=self._key(f"{one}", self.rank): self._store.delete_key(key))
        return [found[rank][1] for rank in range(self.size)]

    def leave(self, reason: str) -> None:
        """See :meth:`halma.hal.collectives.contract.Ranks.leave`. Where the store is gone nobody can be told."""
        with suppress(RankError):
            self._home.refuse_other("the group", "leave()", RankError)
            self._say(f"{self._next()}", ("", _Left(reason)))

    def _next(self) -> int:
        number, self._count = self._count, self._count + 1
        self._said.append(number)
        return number

    def answers(self, stage: str, value: Any, seconds: float) -> Mapping[int, Any]:
        """Values of the ranks that say something at ``stage`` within ``seconds``, this one's included.

        For reports after a fault: apart from the order of exchanges, and nobody has to come.

        Raises:
            RankError: this process is a fork of the rank.
        """
        self._home.refuse_other("the group", f"answers to {stage!r}", RankError)
        try:
            found = self._gather(f"answers/{stage}", (stage, value), seconds)
        except RankError:
            return {self.rank: value}  # the store is gone
        return {rank: answer for rank, (_, answer) in sorted(found.items())}

    def _say(self, name: str, value: Any) -> None:
        self._ask(lambda: self._store.set(self._key(name, self.rank), pickle.dumps(value)))

    def _gather(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        self._say(name, value)
        found: dict[int, Any] = {}
        end, nap = time.monotonic() + seconds, SHORTEST_NAP
        while True:
            for rank in range(self.size):
                key = self._key(name, rank)
                if rank not in found and self._ask(lambda key=key: self._store.check([key])):
                    found[rank] = pickle.loads(self._ask(lambda key=key: self._store.get(key)))
            told = any(isinstance(one, _Left) for _, one in found.values())
            if told or len(found) == self.size or time.monotonic() > end:
                return found
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise RankError(
                "the store of the group cannot be reached",
                asked=f"an exchange of {self.size} ranks; this is rank {self.rank}",
                found=str(error).splitlines()[0],
                do="the process that hosts it ended: the launcher, or global rank 0 where there is none",
            ) from error

    def _listed(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self.names[rank]})" for rank in ranks)
