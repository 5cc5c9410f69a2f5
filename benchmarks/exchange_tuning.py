"""What of an exchange's launch can be chosen, measured on the ranks at hand: the best numbers as a row of the table.

One choice after the other is tried, the others as they are best so far; a candidate takes the place of the best when
its dispatches and combines together take at least :data:`GAIN` less, by the geometric mean over the numbers of tokens.
Times are those of the slowest rank, so that all ranks choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_limits import COMBINE_UNITS
from halma.hal.collectives.exchange_tuning import Key, Measured, Tuning, choose_tuning

GAIN = 0.02
"""Two runs of one candidate differ by up to this."""


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Attributes:
        us: by tokens of a rank.
        ratio: to the first candidate, the computed numbers; the geometric mean.
    """

    tuning: Tuning
    us: Mapping[int, float]
    ratio: float


FIELDS = ("units", "blocks", "parts", "warps")


def candidates(best: Tuning, field: str, blocks: int) -> list[Tuning]:
    """What a field of the best so far could be; ``blocks`` are the most."""
    values: dict[str, Sequence[int]] = {
        "units": COMBINE_UNITS,
        "blocks": [max(2, blocks * share // 8) for share in (8, 6, 4, 3, 2)],
        "parts": (1, 2, 4, 8),
        "warps": (256, 512, 1024, 2048, 4096),
    }
    return [replace(best, **{field: value}) for value in values[field]]


class Search:
    """A search from the computed numbers.

    Args:
        measure: us of dispatch and combine by tokens, the same on every rank.
        blocks: most blocks of which two grids fit the device.
    """

    def __init__(
        self, key: Key, geometry: Geometry, blocks: int, measure: Callable[[Tuning], Mapping[int, float]]
    ) -> None:
        self._key, self._geometry, self._blocks, self._measure = key, geometry, blocks, measure
        self.trials: list[Trial] = []

    def run(self) -> Tuning:
        """The best that was found."""
        best = self._try(choose_tuning(self._key, self._geometry, self._blocks, {}))
        for field in FIELDS:
            for tuning in candidates(best.tuning, field, self._blocks):
                if any(one.tuning == tuning for one in self.trials):
                    continue
                trial = self._try(tuning)
                if trial.ratio < best.ratio * (1 - GAIN):
                    best = trial
        return best.tuning

    def _try(self, tuning: Tuning) -> Trial:
        choose_tuning(self._key, self._geometry, self._blocks, {self._key: tuning})  # what a table may hold, no more
        us = self._measure(tuning)
        first = self.trials[0].us if self.trials else us
        ratio = math.exp(sum(math.log(us[tokens] / first[tokens]) for tokens in us) / len(us))
        self.trials.append(Trial(tuning, us, ratio))
        return self.trials[-1]


def row_of(key: Key, tuning: Tuning, day: str, device: str) -> str:
    """A line of ``TABLE`` in hal/collectives/exchange_tuning.py."""
    return f"{key!r}: {replace(tuning, measured=Measured(key, day, device))!r},"
