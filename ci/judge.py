"""Rules T1 to T5 over the reports of a run: what exit statuses alone would let through.

``python -m ci.judge [--tier pr] REPORT.json...`` prints every problem and exits 1 if there is one, a file that is no
report included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.schema import EVIDENCE, ON_DEVICE, TIERS, Row, load, of_tier

SCHEMA = "halma.test-report/1"
SENTINEL_FILE = "tests/test_sentinel.py"
SENTINEL = "test_sentinel_is_skipped_in_every_row"
_DID_RUN = frozenset({"passed", "failed", "error", "xfailed", "xpassed"})

Report = Mapping[str, Any]


class ReportError(Exception):
    """A file that cannot be judged, with the reason."""


@dataclass
class Verdict:
    """What is wrong, and what a person should know."""

    problems: list[str] = field(default_factory=list)
    skipped_everywhere: list[str] = field(default_factory=list)
    rules: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rule id to the number of its passed guards and passed control arms."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def read(paths: Iterable[Path]) -> list[Report]:
    """The reports in ``paths``.

    Raises:
        ReportError: a file that cannot be read, or is no report of this version.
    """
    reports: list[Report] = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ReportError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ReportError(f"{path} is no whole JSON document, perhaps cut short: {error}") from None
        version = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if version != SCHEMA:
            raise ReportError(f"{path} is not a report of the form {SCHEMA}: its schema is {version!r}")
        reports.append(data)
    return reports


def judge(rows: Sequence[Row], reports: Sequence[Report], *, whole_tier: bool = True) -> Verdict:
    """Apply the rules.

    Args:
        rows: the rows that should have run.
        reports: what they left behind.
        whole_tier: also look across rows (T3, control arms); false when one row was run by hand.
    """
    verdict = Verdict()
    for row in rows:
        mine = [report for report in reports if report["row"] == row.id]
        if row.runs and not mine:
            verdict.problems.append(f"{row.id}: left no report (it did not start, or its session was refused: T1)")
        for version in row.python if mine and len(row.python) > 1 else ():
            if not any(f"{report['python']}.".startswith(f"{version}.") for report in mine):
                verdict.problems.append(f"{row.id}: left no report of Python {version} (T1)")
        if mine and not row.runs:
            verdict.problems.append(f"{row.id}: is declared as not run ({row.reason}) and left a report: never green")
        for report in mine:
            verdict.problems.extend(f"{row.id}: {problem}" for problem in _row_problems(row, report))
    if whole_tier and reports:
        _skipped_everywhere(reports, verdict)
        _rules(reports, verdict)
    return verdict


def _row_problems(row: Row, report: Report) -> Iterable[str]:
    tests = report["tests"]
    ran = [test for test in tests if test["outcome"] in _DID_RUN and SENTINEL not in test["id"]]
    bad = [test for test in ran if test["outcome"] in ("failed", "error", "xpassed")]
    if not ran:
        yield f"ran no test: {len(tests)} collected, all skipped (T2)"
    for selected in row.select:
        if not any(_below(test["id"], selected) for test in ran) and SENTINEL_FILE not in selected:
            yield f"{selected} is selected, and no test of it ran (T2)"
    if report["exit"] != 0:
        yield f"pytest ended with status {report['exit']}, {len(bad)} tests failed"
    elif bad:
        yield f"{len(bad)} tests failed although pytest ended with status 0"
    passed = [test for test in ran if test["outcome"] == "passed"]
    held = sum(test["assertions"] for test in passed)
    if held < row.assertions:
        yield f"counted {held} assertions in {len(passed)} passed tests, needs {row.assertions} (T4)"
    for test in passed:
        if test.get("evidence") in ON_DEVICE and test["assertions"] == 0:
            yield f"{test['id']} claims {test['evidence']} and asserted nothing (T4)"
    yield from _evidence_problems(row, tests, passed)


def _below(test: str, selected: str) -> bool:
    """Whether a test is of a file or folder; pytest names tests below its root folder, links resolved."""
    file = test.split("::")[0]
    places = (selected, selected.removeprefix("src/halma/"))
    return any(file == place or file.startswith(f"{place}/") for place in places)


def _evidence_problems(row: Row, tests: Sequence[Report], passed: Sequence[Report]) -> Iterable[str]:
    for test in tests:
        evidence = test.get("evidence")
        if evidence not in EVIDENCE:
            yield f"{test['id']} does not say how it was obtained: evidence {evidence!r} (T5)"
        elif evidence in ON_DEVICE and evidence != row.evidence:
            yield f"{test['id']} claims {evidence} in a row whose evidence is {row.evidence} (T5)"
    if passed and not any(test.get("evidence") == row.evidence for test in passed):
        yield f"no passed test has the row's evidence, {row.evidence} (T5)"


def _skipped_everywhere(reports: Sequence[Report], verdict: Verdict) -> None:
    outcomes: dict[str, set[str]] = {}
    for report in reports:
        for test in report["tests"]:
            outcomes.setdefault(test["id"], set()).add(test["outcome"])
    verdict.skipped_everywhere = sorted(name for name, seen in outcomes.items() if seen == {"skipped"})
    if not any(SENTINEL in name for name in verdict.skipped_everywhere):
        verdict.problems.append(
            f"the sentinel {SENTINEL} is not among the tests skipped in every row: the report cannot be trusted (T3)"
        )


def _rules(reports: Sequence[Report], verdict: Verdict) -> None:
    guards: dict[str, set[str]] = {}
    controls: dict[str, set[str]] = {}
    for report in reports:
        for test in report["tests"]:
            if test["outcome"] != "passed":
                continue
            for kind, found in (("invariants", guards), ("controls", controls)):
                for rule in test[kind]:
                    found.setdefault(rule, set()).add(test["id"])
    verdict.rules = {
        rule: (len(guards.get(rule, ())), len(controls.get(rule, ()))) for rule in sorted({*guards, *controls})
    }
    for rule, (guarding, control) in verdict.rules.items():
        if guarding and not control:
            verdict.problems.append(f"rule {rule} has {guarding} guards and no control arm that passed")


def show(verdict: Verdict, reports: Sequence[Report]) -> None:
    """Print the verdict, ending in a line that gives the run's totals."""
    for report in reports:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(report["counts"].items()))
        print(
            f"row {report['row']:<18} evidence {report['backend_evidence']:<10} "
            f"python {report['python']:<8} torch {report['torch'] or '-':<12} {counts}; "
            f"{report['assertions']} assertions"
        )
    if verdict.skipped_everywhere:
        print("skipped in every row that ran:")
        for name in verdict.skipped_everywhere:
            print(f"  {name}")
    if verdict.rules:
        print("rules held (guards + control arms): " + ", ".join(f"{r} {g}+{c}" for r, (g, c) in verdict.rules.items()))
    for problem in verdict.problems:
        print(f"ci: {problem}")
    totals: dict[str, int] = {}
    for report in reports:
        for outcome, number in report["counts"].items():
            totals[outcome] = totals.get(outcome, 0) + number
    failed = sum(totals.get(outcome, 0) for outcome in ("failed", "error", "xpassed"))
    print(f"{totals.get('passed', 0)} passed, {failed} failed, {totals.get('skipped', 0)} skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge report files; see the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.judge")
    parser.add_argument("--tier", choices=TIERS, default="pr")
    parser.add_argument("reports", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    try:
        reports = read(options.reports)
    except ReportError as error:
        print(f"ci: {error}", file=sys.stderr)
        return 1
    verdict = judge([row for row in of_tier(load(), options.tier) if row.gate == "blocking"], reports)
    show(verdict, reports)
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
