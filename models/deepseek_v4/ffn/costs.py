"""Bucket, worst case or eager: by what they were measured to cost, not by a constant.

Each bucket was measured at both ends of the sizes that it serves, (the bucket below it, itself]: a replay of it, a
replay of the largest bucket, an eager item. Between the ends a cost is taken to be a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Way = Literal["bucket", "worst case", "eager"]
WAYS: Final[tuple[Way, ...]] = ("worst case", "bucket", "eager")
"""In the order in which equals are preferred: the worst case needs no look at an item's size."""
EQUAL: Final = 1.01
"""Costs that differ by less are one: two runs of one thing do."""


@dataclass(frozen=True)
class Span:
    """Seconds at both ends of what a bucket serves.

    Attributes:
        low, high: routed rows at the ends; ``high`` is the bucket's own size.
        cost: way -> (seconds at ``low``, seconds at ``high``).
    """

    low: int
    high: int
    cost: dict[Way, tuple[float, float]]

    def at(self, way: Way, rows: int) -> float | None:
        """Seconds of an item of ``rows`` that way, or None where it was not measured."""
        ends = self.cost.get(way)
        if ends is None:
            return None
        if self.high == self.low:
            return ends[1]
        part = min(max((rows - self.low) / (self.high - self.low), 0.0), 1.0)
        return ends[0] + part * (ends[1] - ends[0])


@dataclass(frozen=True)
class CostTable:
    """Spans by the size of their bucket."""

    spans: dict[int, Span]

    def choose(self, bucket: int, rows: int) -> Way | None:
        """The cheapest way for ``rows`` that ``bucket`` holds; None where nothing was measured."""
        span = self.spans.get(bucket)
        if span is None:
            return None
        found: dict[Way, float] = {way: seconds for way in WAYS if (seconds := span.at(way, rows)) is not None}
        least = min(found.values(), default=0.0) * EQUAL
        return next((way for way, seconds in found.items() if seconds <= least), None)

    def where_worst_case_is_dearer(self) -> str:
        """The size at which the largest bucket costs most beside the cheapest way, in words; empty where it never costs
        more."""
        found = ""
        most = 1.0
        for span in self.spans.values():
            for rows in (span.low, span.high):
                chosen, worst = self.choose(span.high, rows), span.at("worst case", rows)
                least = None if chosen is None else span.at(chosen, rows)
                if chosen in (None, "worst case") or worst is None or not least or worst / least <= most:
                    continue
                most = worst / least
                found = f"{rows} routed rows cost {least * 1e6:.1f} us by {chosen}, {worst * 1e6:.1f} in the worst case"
        return found or ("" if self.worst_case_pays else "not every size was measured")

    @property
    def worst_case_pays(self) -> bool:
        """Whether the largest bucket costs no more than any other way at every size: no header need be read."""
        ends = [(span, rows) for span in self.spans.values() for rows in (span.low, span.high)]
        chosen = [self.choose(span.high, rows) for span, rows in ends]
        return bool(chosen) and all(one == "worst case" for one in chosen)
