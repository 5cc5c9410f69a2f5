"""What items cost: replays and eager items, rows that were real and rows that were charged, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FfnStatistics:
    """Counters of one program.

    Attributes:
        replays, eager_items: items by how they ran.
        real_rows, charged_rows: routed rows of replayed items, and rows of the buckets that they ran in.
        reasons: why items ran eagerly, and how many.
        buckets: routed rows of a bucket -> replays.
        histogram: routed rows -> items, of all items: what a ladder is refitted from.
    """

    replays: int = 0
    eager_items: int = 0
    real_rows: int = 0
    charged_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    buckets: dict[int, int] = field(default_factory=dict[int, int])
    histogram: dict[int, int] = field(default_factory=dict[int, int])

    def replayed(self, rows: int, bucket: int) -> None:
        """An item of ``rows`` routed rows ran in a bucket of ``bucket``."""
        self._seen(rows)
        self.replays += 1
        self.real_rows += rows
        self.charged_rows += bucket
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def eager(self, rows: int, reason: str) -> None:
        """An item of ``rows`` routed rows ran eagerly."""
        self._seen(rows)
        self.eager_items += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _seen(self, rows: int) -> None:
        self.histogram[rows] = self.histogram.get(rows, 0) + 1

    @property
    def ratio(self) -> float:
        """Charged over real rows; 1 where nothing was replayed."""
        return self.charged_rows / self.real_rows if self.real_rows else 1.0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "replays": self.replays,
            "eager_items": self.eager_items,
            "real_rows": self.real_rows,
            "charged_rows": self.charged_rows,
            "charged_over_real": round(self.ratio, 4),
            "reasons": dict(self.reasons),
            "buckets": {str(size): count for size, count in sorted(self.buckets.items())},
        }

    def __str__(self) -> str:
        why = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.items())
        return (
            f"{self.replays} replays, {self.eager_items} eager items{f' ({why})' if why else ''}, "
            f"{self.real_rows} real rows, {self.charged_rows} charged ({self.ratio:.3f})"
        )
