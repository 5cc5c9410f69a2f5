"""The outcome of a test session as data: what ran, what it rests on, what was skipped and why (T3, T4, T5).

Written by the pytest plugin, judged by ``ci/judge.py``; the form has a version because the two may differ.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "halma.test-report/1"
EVIDENCE = ("cpu", "contract", "simulated", "cuda", "musa")
"""How a result can have been obtained; see section 8 of the design."""


@dataclass
class TestResult:
    """One test.

    Args:
        id: pytest's node id.
        outcome: passed, failed, error, skipped, xfailed or xpassed.
        evidence: how the result was obtained.
        invariants: ids of the rules it guards.
        controls: ids of the rules it is the control arm of.
        assertions: assertions that held while it ran.
        seconds: set-up, call and tear-down together.
        reason: why it was skipped, verbatim.
    """

    __test__ = False  # pytest would take the name for a test class

    id: str
    outcome: str = "passed"
    evidence: str = "cpu"
    invariants: list[str] = field(default_factory=list[str])
    controls: list[str] = field(default_factory=list[str])
    assertions: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass
class SessionReport:
    """A session: which row it ran for, in which environment, and its tests."""

    row: str
    backend: str
    backend_evidence: str
    exit: int = 0
    tests: dict[str, TestResult] = field(default_factory=dict[str, TestResult])

    def counts(self) -> dict[str, int]:
        """Number of tests by outcome."""
        counted: dict[str, int] = {}
        for test in self.tests.values():
            counted[test.outcome] = counted.get(test.outcome, 0) + 1
        return counted

    def executed(self) -> int:
        """Tests that did something; a skipped one did not."""
        return sum(test.outcome != "skipped" for test in self.tests.values())

    def as_json(self) -> dict[str, Any]:
        """Plain data, as written."""
        return {
            "schema": SCHEMA,
            "row": self.row,
            "backend": self.backend,
            "backend_evidence": self.backend_evidence,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "exit": self.exit,
            "counts": self.counts(),
            "assertions": sum(test.assertions for test in self.tests.values()),
            "tests": [asdict(test) for test in self.tests.values()],
        }

    def write(self, path: Path) -> None:
        """Write it as JSON; folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
