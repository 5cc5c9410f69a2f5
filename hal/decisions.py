"""Why things are as they are: one record for every choice that the layer makes.

``halma explain``, the table at exit and strict mode all read these records; nothing else decides what to
show.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One thing that could have been chosen, and the reason for or against it."""

    name: str
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """A choice.

    Args:
        kind: ``backend``, ``op``, ``graph``, ``collective``, ``memory`` or ``drafts``.
        subject: what was decided about: an op's name, a descriptor.
        chosen: the winner's name.
        candidates: all that were looked at, in order.
        asked: the request, described.
    """

    kind: str
    subject: str
    chosen: str
    candidates: tuple[Candidate, ...] = ()
    asked: str = ""

    @property
    def reason(self) -> str:
        """The winner's reason."""
        return next((candidate.reason for candidate in self.candidates if candidate.chosen), "")

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "kind": self.kind,
            "subject": self.subject,
            "asked": self.asked,
            "chosen": self.chosen,
            "candidates": [{"name": c.name, "chosen": c.chosen, "reason": c.reason} for c in self.candidates],
        }


class DecisionLog:
    """Decisions of this process with how often each was made; at most ``capacity`` distinct ones are kept."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[Decision, int] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, decision: Decision) -> None:
        """Count a decision; the oldest is dropped when the log is full."""
        with self._lock:
            self._counts[decision] = self._counts.get(decision, 0) + 1
            while len(self._counts) > self._capacity:
                self._counts.popitem(last=False)

    def all(self, kind: str | None = None) -> list[tuple[Decision, int]]:
        """Decisions in the order they were first made, with counts."""
        with self._lock:
            return [(d, n) for d, n in self._counts.items() if kind is None or d.kind == kind]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()


decisions = DecisionLog()
