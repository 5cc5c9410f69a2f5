"""What ranks must have in common, compared before anybody waits on the device (C6, C12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from halma.hal.collectives.choice import name_of
from halma.hal.collectives.contract import Call, Choice, Refusal
from halma.hal.collectives.deciding import VENDOR
from halma.hal.collectives.ranks import AnsweringRanks
from halma.hal.errors import CollectiveError


class Comparing:
    """The calls of one channel on this rank, as the other ranks' are compared with them."""

    def __init__(self, channel: str, ranks: AnsweringRanks) -> None:
        self._channel, self._ranks = channel, ranks
        self._eager_calls = 0
        self.filed: list[str] = []
        """Calls captured since the last comparison."""

    def eager(self, call: Call, choice: Choice | Refusal) -> None:
        """Compare an eager call with the other ranks'; all ranks come.

        Raises:
            CollectiveError: the first difference.
        """
        self._eager_calls += 1
        way = VENDOR if isinstance(choice, Refusal) else name_of((choice.algorithm, choice.wire))
        mine = (call.describe(), way)
        stage = f"eager call {self._eager_calls} of channel {self._channel}"
        refuse_difference(self._ranks, stage, self._ranks.exchange(stage, mine))

    def file(self, call: Call, choice: Choice) -> None:
        """A call was captured."""
        self.filed.append(f"{call.describe()} by {name_of((choice.algorithm, choice.wire))}")

    def captured(self) -> int:
        """Compare the calls captured since the last comparison; all ranks come. Returns how many.

        Raises:
            CollectiveError: the first difference.
        """
        filed, self.filed = self.filed, []
        lists = self._ranks.exchange(f"captured calls of channel {self._channel}", filed)
        for position in range(max(map(len, lists))):
            rows = [one[position] if position < len(one) else "nothing" for one in lists]
            refuse_difference(self._ranks, f"captured call {position + 1}", rows)
        return len(filed)


def refuse_difference(ranks: AnsweringRanks, what: str, values: Sequence[Any]) -> None:
    """Refuse values, one a rank, that are not all equal.

    Raises:
        CollectiveError: with rank 0's and the first that differs from it.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CollectiveError(
                f"ranks do not agree on {what}: rank {rank} ({ranks.names[rank]}) differs from rank 0",
                found=(f"rank 0: {_shown(values[0])}", f"rank {rank}: {_shown(value)}"),
                do="every rank makes the same calls, with the same shapes, in the same order",
            )


def _shown(value: Any) -> str:
    return ", by ".join(map(str, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else str(value)
