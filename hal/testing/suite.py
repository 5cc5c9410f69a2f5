"""Running the conformance suite in a child process, and what it shows, rule by rule.

A child, because a backend under test may crash, and because the suite must not see the caller's pytest settings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from halma.hal.errors import RequestError
from halma.hal.testing.rules import RULES, SUITE, Rule, rule, written_tests

SETTINGS = "[pytest]\nenable_assertion_pass_hook = true\naddopts = --import-mode=importlib\n"
SECONDS_A_TEST = 300
NEEDED = ("pytest", "hypothesis")
_RAN = (0, 1)
_PASSED, _SKIPPED = ("passed", "xfailed"), ("skipped",)


@dataclass
class RuleResult:
    """What the suite showed of one rule. Counts are of tests and control arms together, each parameter its own.

    Attributes:
        tests, controls: pytest's ids.
        reasons: why tests of it were skipped.
        not_applicable: why this backend is not asked.
        held: which kinds passed, ``tests`` and ``controls``: one alone shows nothing of the rule.
    """

    rule: Rule
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    tests: list[str] = field(default_factory=list[str])
    controls: list[str] = field(default_factory=list[str])
    reasons: list[str] = field(default_factory=list[str])
    not_applicable: str = ""
    held: set[str] = field(default_factory=set[str])

    @property
    def verdict(self) -> str:
        """One of passed, failed, not covered, skipped, not applicable."""
        if self.failed:
            return "failed"
        if self.tests and self.controls:
            return "passed" if self.held == {"tests", "controls"} else "skipped"
        return "not applicable" if self.not_applicable else "not covered"

    @property
    def why(self) -> str:
        """The reason of a verdict that needs one."""
        if self.verdict == "not covered":
            return "no control arm" if self.tests else "no test"
        if self.verdict == "not applicable":
            return self.not_applicable
        return "; ".join(self.reasons) if self.verdict == "skipped" else ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it; a skip is the backend's declared lack, not a failure."""
        return self.verdict not in ("failed", "not covered")


@dataclass
class SuiteResult:
    """A run of the suite.

    Attributes:
        other_failures: failed tests that name no rule that was asked for.
        broken: what pytest said where it could not run the suite to its end.
        output: all that it said.
    """

    backend: str
    evidence: str
    rules: list[RuleResult]
    other_failures: list[str]
    broken: str
    output: str

    @property
    def ok(self) -> bool:
        """Whether the backend conforms; a run in which nothing ran shows nothing."""
        ran = any(result.verdict == "passed" for result in self.rules)
        return ran and not self.broken and not self.other_failures and all(result.ok for result in self.rules)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "backend": self.backend,
            "evidence": self.evidence,
            "passed": self.ok,
            "broken": self.broken or None,
            "other_failures": self.other_failures,
            "rules": {
                result.rule.id: {
                    "title": result.rule.title,
                    "verdict": result.verdict,
                    "why": result.why,
                    "passed": result.passed,
                    "failed": result.failed,
                    "skipped": result.skipped,
                    "tests": result.tests,
                    "controls": result.controls,
                }
                for result in self.rules
            },
        }


def chosen_rules(names: Sequence[str]) -> list[Rule]:
    """The rules of these ids, in order of the list; all without names.

    Raises:
        RequestError: no such rule.
    """
    unknown = [name for name in names if rule(name) is None]
    if unknown:
        raise RequestError(
            f"no rule is called {', '.join(unknown)}",
            found=f"rules: {', '.join(one.id for one in RULES)}",
            do="halma conformance --list",
        )
    wanted = {name.upper() for name in names}
    return [one for one in RULES if not wanted or one.id in wanted]


def run_suite(backend: str, rules: Sequence[Rule] = RULES, *, suite: Path = SUITE) -> SuiteResult:
    """Run the tests of ``rules`` on a backend; with all of them the tests that name no rule run too.

    Raises:
        RequestError: pytest, or what else the suite needs, is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"the conformance suite needs {' and '.join(missing)}",
            found=f"not installed for {sys.executable}",
            do="pip install 'halma[testing]'",
        )
    chosen = _chosen_tests(backend, rules, suite)
    if not chosen:
        return _gathered(backend, rules, {"tests": []}, "", "")
    with tempfile.TemporaryDirectory(prefix="halma-conformance-") as folder:
        report, settings = Path(folder, "report.json"), Path(folder, "pytest.ini")
        settings.write_text(SETTINGS, encoding="utf-8")
        line = [sys.executable, "-m", "pytest", *chosen, "-c", str(settings), "--rootdir", str(suite), "-q"]
        line += ["-p", "no:cacheprovider", "-p", "halma.hal.testing.plugin"]
        if importlib.util.find_spec("pytest_timeout") is not None:
            line += ["-p", "pytest_timeout", "--timeout", str(SECONDS_A_TEST)]
        line += ["--halma-backend", backend, "--halma-require-backend", backend, "--halma-report", str(report)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
        output = done.stdout + done.stderr
        ran = done.returncode in _RAN and report.exists()
        broken = "" if ran else f"pytest ended with status {done.returncode}: {_last_line(output)}"
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"tests": []}
    return _gathered(backend, rules, found, broken, output)


def _chosen_tests(backend: str, rules: Sequence[Rule], suite: Path) -> list[str]:
    """The suite, or the tests of some rules; another backend is not asked for what is the CPU's own."""
    if len(rules) == len(RULES):
        return [str(suite)]
    wanted = {one.id for one in rules}
    return [
        str(suite / test.id)
        for test in written_tests(suite)
        if wanted & {*test.rules, *test.controls} and (backend == "cpu" or not test.id.startswith("test_cpu_"))
    ]


def _gathered(backend: str, rules: Sequence[Rule], found: dict[str, Any], broken: str, output: str) -> SuiteResult:
    results = {one.id: RuleResult(one, not_applicable=one.not_applicable(backend)) for one in rules}
    others: list[str] = []
    for test in cast("list[dict[str, Any]]", found["tests"]):
        named = [results[name] for name in {*test["invariants"], *test["controls"]} if name in results]
        failed = test["outcome"] not in (*_PASSED, *_SKIPPED)
        if failed and not named:
            others.append(test["id"])
        for result in named:
            result.passed += test["outcome"] in _PASSED
            result.skipped += test["outcome"] in _SKIPPED
            result.failed += failed
            for kind, key in (("tests", "invariants"), ("controls", "controls")):
                if result.rule.id in test[key]:
                    getattr(result, kind).append(test["id"])
                    result.held |= {kind} if test["outcome"] in _PASSED else set()
            reason = str(test["reason"]).removeprefix("Skipped: ")
            if reason and reason not in result.reasons:
                result.reasons.append(reason)
    evidence = str(found.get("backend_evidence", "unknown"))
    return SuiteResult(backend, evidence, list(results.values()), others, broken, output)


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1].strip()
