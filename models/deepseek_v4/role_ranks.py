"""Who is who among attention and FFN ranks, and how the latter learn of items.

No torch is imported: a command that means nothing is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

from halma.hal.errors import RequestError

ItemsChoice = Literal["headers", "worst-case", "auto"]
ITEMS: Final[tuple[ItemsChoice, ...]] = ("headers", "worst-case", "auto")


@dataclass(frozen=True)
class RoleRanks:
    """Who is who: ranks 0 .. attention - 1 attend, in groups of ``tp`` that follow one another; then FFN ranks.

    With attention=4, ffn=2, tp=2 the groups are ranks 0 1 and 2 3, experts are on 4 and 5, rings between 0 2 and 4 5.

    Raises:
        RequestError: the attention ranks make no whole groups.
    """

    attention: int
    ffn: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.attention % self.tp:
            fitting = [tp for tp in range(1, self.attention + 1) if self.attention % tp == 0]
            raise RequestError(
                "attention ranks make no whole groups",
                asked=f"{self.attention} attention ranks in groups of --tp {self.tp}",
                do=f"--tp {', '.join(map(str, fitting))}; or a multiple of it as --attention-ranks",
            )

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.attention + self.ffn

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The attention ranks of each group; its first one has the rings."""
        return tuple(tuple(range(first, first + self.tp)) for first in range(0, self.attention, self.tp))

    @property
    def rings(self) -> tuple[int, ...]:
        """The ranks that rings are between, attention first."""
        return (*range(0, self.attention, self.tp), *range(self.attention, self.size))

    def terms(self) -> Mapping[str, object]:
        """Every field by name."""
        return asdict(self)


def check_items(asked: str) -> ItemsChoice:
    """How an FFN rank is to learn of items.

    Raises:
        RequestError: there is no such way; names those that are.
    """
    for one in ITEMS:
        if one == asked:
            return one
    raise RequestError(
        "FFN ranks learn of items in no such way", asked=f"--items {asked}", do=f"one of {', '.join(ITEMS)}"
    )
