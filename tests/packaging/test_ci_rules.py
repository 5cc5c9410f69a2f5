"""Rules T1 to T5: real pytest sessions in a scratch folder, judged as CI judges them.

Each rule has a control arm: the same session done right, which must pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ci.judge import SENTINEL, Verdict, judge, main
from ci.schema import Row
from halma.hal.testing.counting import count_wordlessly

PASSES = "def test_passes():\n    assert 1 + 1 == 2\n"
SKIPPED = "import pytest\n\n@pytest.mark.skip(reason='no such device')\ndef test_needs_a_device():\n    assert False\n"
SENTINEL_FILE = f"import pytest\n\n@pytest.mark.skip(reason='on purpose')\ndef {SENTINEL}():\n    assert False\n"


@dataclass
class Session:
    """A finished pytest session and its report, None if it left none."""

    status: int
    output: str
    report: dict[str, Any] | None


def session(tmp_path: Path, *options: str, row: str | None = "cpu", autoload: bool = False, **files: str) -> Session:
    """Run pytest over ``files`` in a process of its own, as a row does.

    Loads our plugin alone, which halves the time a session takes; ``autoload`` finds it as everybody does.
    """
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nenable_assertion_pass_hook = true\n", encoding="utf-8")
    report = tmp_path / "report.json"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--halma-report", str(report), *options]
    if not autoload:
        line += ["-p", "halma.hal.testing.plugin"]
    if row is not None:
        line += ["--halma-row", row]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HALMA_"))}
    if not autoload:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    data = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    return Session(done.returncode, done.stdout + done.stderr, data)


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        **{"id": "cpu", "tier": "pr", "backend": "cpu", "evidence": "cpu", "python": ("3.11",), "torch": ""},
        **{"runner": "ubuntu-24.04", "gate": "blocking", "select": ()},
        **changes,
    }
    return Row(**values)


def verdict(done: Session, *, whole_tier: bool = False, **changes: Any) -> Verdict:
    return judge([row(**changes)], [done.report] if done.report else [], whole_tier=whole_tier)


# ------------------------------------------------------------------------------------------------ T1


@pytest.mark.invariant("T1")
def test_a_required_backend_that_is_missing_ends_the_session_with_its_reason(tmp_path: Path) -> None:
    done = session(tmp_path, "--halma-require-backend", "nowhere", test_a=PASSES)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert "backend 'nowhere' is required and cannot be used" in done.output
    assert "--halma-require-backend=nowhere" in done.output
    assert "1 passed" not in done.output
    assert any("left no report" in problem for problem in verdict(done).problems)


@pytest.mark.invariant("T1", control=True)
def test_without_the_requirement_the_same_session_passes(tmp_path: Path) -> None:
    done = session(tmp_path, test_a=PASSES)
    assert done.status == 0
    assert verdict(done).ok


# ------------------------------------------------------------------------------------------------ T2


@pytest.mark.invariant("T2")
@pytest.mark.parametrize("files", [{"test_a": SKIPPED}, {"test_a": "x = 1\n"}], ids=["all skipped", "no test"])
def test_a_row_that_ran_nothing_fails(tmp_path: Path, files: dict[str, str]) -> None:
    done = session(tmp_path, **files)
    assert done.status == pytest.ExitCode.TESTS_FAILED
    assert "ran no test" in done.output
    assert any("T2" in problem for problem in verdict(done).problems)


@pytest.mark.invariant("T2")
def test_the_judge_does_not_trust_the_status_of_an_empty_row() -> None:
    only_sentinel = report(test(f"t.py::{SENTINEL}", outcome="skipped"))
    assert any("T2" in problem for problem in judge([row()], [only_sentinel], whole_tier=False).problems)


@pytest.mark.invariant("T2")
def test_a_selected_folder_of_which_nothing_ran_fails() -> None:
    ran = report(test("tests/cpu/test_a.py::test_x"), test("tests/contract/test_b.py::test_y", outcome="skipped"))
    for select, lost in ((("tests/cpu", "tests/contract"), "tests/contract"), (("tests/cp", "tests/cpu"), "tests/cp")):
        found = judge([row(select=select)], [ran], whole_tier=False)
        assert found.problems == [f"cpu: {lost} is selected, and no test of it ran (T2)"]


@pytest.mark.invariant("T2", control=True)
def test_a_folder_is_known_by_either_name() -> None:
    both = report(test("hal/testing/conformance/test_a.py::test_x"), test("tests/cpu/test_a.py::test_x"))
    select = ("src/halma/hal/testing/conformance", "tests/cpu/test_a.py", "tests/test_sentinel.py")
    assert judge([row(select=select)], [both], whole_tier=False).ok


@pytest.mark.invariant("T5")
def test_a_row_without_a_machine_that_left_a_report_is_not_green() -> None:
    declared = row(runner="none", gate="informational", reason="no hardware")
    assert any("never green" in problem for problem in judge([declared], [report(test("a"))]).problems)
    assert judge([declared], [], whole_tier=False).ok


@pytest.mark.invariant("T1")
def test_a_row_of_several_pythons_wants_a_report_of_each() -> None:
    several = row(python=("3.1", "3.11"))
    found = judge([several], [report(test("t.py::a"))], whole_tier=False).problems
    assert found == ["cpu: left no report of Python 3.1 (T1)"]
    both = [report(test("t.py::a")), {**report(test("t.py::a")), "python": "3.1.9"}]
    assert judge([several], both, whole_tier=False).ok


@pytest.mark.invariant("T2", control=True)
def test_one_test_that_ran_is_enough_and_no_row_no_rule(tmp_path: Path) -> None:
    done = session(tmp_path, test_a=SKIPPED, test_b=PASSES)
    assert done.status == 0
    assert verdict(done).ok
    assert session(tmp_path, "test_a.py", row=None).status == 0  # a person at the keyboard may skip all


# ------------------------------------------------------------------------------------------------ T3


@pytest.mark.invariant("T3")
def test_tests_skipped_in_every_row_are_listed() -> None:
    first = report(test("a", outcome="skipped"), test("b", outcome="skipped"), test(SENTINEL, outcome="skipped"))
    second = report(test("a", outcome="skipped"), test("b"), test(SENTINEL, outcome="skipped"), row="other")
    assert judge([], [first, second]).skipped_everywhere == ["a", SENTINEL]


@pytest.mark.invariant("T3")
@pytest.mark.parametrize("outcome", ["passed", None])
def test_a_sentinel_that_ran_or_is_gone_fails_the_run(outcome: str | None) -> None:
    tests = [test("a")] + ([test(SENTINEL, outcome=outcome)] if outcome else [])
    assert any("T3" in problem for problem in judge([row()], [report(*tests)]).problems)


@pytest.mark.invariant("T3", control=True)
def test_a_real_sentinel_is_found_in_a_real_report(tmp_path: Path) -> None:
    done = session(tmp_path, test_a=PASSES, test_sentinel=SENTINEL_FILE)
    found = verdict(done, whole_tier=True)
    assert found.ok
    assert found.skipped_everywhere == [f"test_sentinel.py::{SENTINEL}"]
    assert done.report is not None
    assert [t["reason"] for t in done.report["tests"] if t["outcome"] == "skipped"] == ["Skipped: on purpose"]


# ------------------------------------------------------------------------------------------------ T4

COUNTS = """
import pytest
from halma.hal.testing import check

def test_three():
    assert 1 == 1
    for number in range(2):
        check(number < 2)

def test_none():
    for number in []:
        assert number
"""


SPEAKS = """
class Loud:
    said = 0
    def __repr__(self):
        Loud.said += 1
        return "loud"

def test_one():
    assert Loud()

def test_two():
    assert Loud.said == 0
"""
OTHER_PYTEST = """
import halma.hal.testing.plugin as plugin
plugin.count_wordlessly = lambda: None
"""


@pytest.mark.invariant("T4")
@pytest.mark.parametrize("more", [{}, {"conftest": OTHER_PYTEST}], ids=["counted", "by the hook"])
def test_assertions_are_counted_one_by_one(tmp_path: Path, more: dict[str, str]) -> None:
    done = session(tmp_path, test_a=COUNTS, **more)
    assert done.report is not None
    assert [t["assertions"] for t in done.report["tests"]] == [3, 0]
    assert verdict(done, assertions=3).ok
    assert any("counted 3 assertions" in problem for problem in verdict(done, assertions=4).problems)


def test_what_holds_is_not_put_into_words(tmp_path: Path) -> None:
    """The words of 900,000 assertions, with tensors in them, were half of a pull request's time."""
    done = session(tmp_path, test_a=SPEAKS)
    assert done.report is not None and done.report["counts"] == {"passed": 2}
    assert [t["assertions"] for t in done.report["tests"]] == [1, 1]


def test_a_pytest_of_another_form_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr("_pytest.assertion.rewrite._check_if_assertion_pass_impl")
        stop = count_wordlessly()
    assert stop is None
    undo = count_wordlessly()
    assert undo is not None
    undo()


@pytest.mark.invariant("T4")
def test_a_device_claim_that_asserted_nothing_fails() -> None:
    claims = report(test("a", evidence="cuda", assertions=0), test("b", evidence="cuda"))
    assert any("a claims cuda and asserted nothing" in p for p in judge([row(evidence="cuda")], [claims]).problems)


@pytest.mark.invariant("T4", control=True)
def test_a_device_claim_with_assertions_holds() -> None:
    claims = report(test("a", evidence="cuda", assertions=1))
    assert judge([row(evidence="cuda")], [claims], whole_tier=False).ok


# ------------------------------------------------------------------------------------------------ T5


@pytest.mark.invariant("T5")
def test_a_result_that_does_not_say_how_it_was_obtained_fails() -> None:
    silent = test("a")
    del silent["evidence"]
    assert any("does not say how" in p for p in judge([row()], [report(silent)], whole_tier=False).problems)


@pytest.mark.invariant("T5")
def test_a_result_of_a_device_is_refused_in_another_devices_row() -> None:
    mixed = report(test("a"), test("b", evidence="musa"))
    assert any("b claims musa in a row whose evidence is cpu" in p for p in judge([row()], [mixed]).problems)


@pytest.mark.invariant("T5")
def test_a_device_row_that_ran_only_on_the_cpu_fails() -> None:
    found = judge([row(evidence="cuda")], [report(test("a"))], whole_tier=False)
    assert any("no passed test has the row's evidence, cuda" in problem for problem in found.problems)


@pytest.mark.invariant("T5")
def test_a_marker_with_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    text = "import pytest\n\n@pytest.mark.evidence('hearsay')\n" + PASSES
    done = session(tmp_path, test_a=text)
    assert done.status != 0
    assert "evidence takes one of cpu, contract, simulated, cuda, musa" in done.output


@pytest.mark.invariant("T5", control=True)
def test_evidence_and_rules_of_a_real_session_are_in_its_report(tmp_path: Path) -> None:
    text = (
        "import pytest\n\n@pytest.mark.evidence('simulated')\n@pytest.mark.invariant('X1')\n"
        + PASSES
        + "\n@pytest.mark.invariant('X1', control=True)\ndef test_control():\n    assert True\n"
    )
    done = session(tmp_path, test_a=text, test_sentinel=SENTINEL_FILE)
    assert done.report is not None
    first, second = done.report["tests"][:2]
    assert (first["evidence"], first["invariants"], first["controls"]) == ("simulated", ["X1"], [])
    assert (second["evidence"], second["invariants"], second["controls"]) == ("cpu", [], ["X1"])
    found = verdict(done, whole_tier=True)
    assert found.ok
    assert found.rules == {"X1": (1, 1)}


def test_a_guard_without_a_control_arm_fails_the_tier() -> None:
    guard = report(test("a", invariants=["X1"]), test(SENTINEL, outcome="skipped"))
    assert any("rule X1 has 1 guards and no control arm" in p for p in judge([row()], [guard]).problems)


def test_failures_and_unexpected_passes_fail_whatever_the_status_says() -> None:
    for outcome in ("failed", "error", "xpassed"):
        assert not judge([row()], [report(test("a", outcome=outcome))], whole_tier=False).ok


def test_workers_of_xdist_report_the_same(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = session(tmp_path, "-n", "2", autoload=True, test_a=COUNTS, test_b=PASSES)
    assert done.report is not None
    assert sorted(t["assertions"] for t in done.report["tests"]) == [0, 1, 3]
    assert done.report["counts"] == {"passed": 3}


def test_the_judge_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(report(test("a"), row="nobody")), encoding="utf-8")
    assert main(["--tier", "pr", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "cpu: left no report" in shown
    assert shown.rstrip().endswith("1 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": "halma.test-report/2", "row": "cpu"}', "its schema is 'halma.test-report/2'"),
        ("[1]", "its schema is 'list'"),
        ('{"schema": "halma', "perhaps cut short"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_report_is_said_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["--tier", "pr", str(path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"ci: {path} ") and says in shown


def test(name: str, **changes: Any) -> dict[str, Any]:
    """One test of a report."""
    plain = {"outcome": "passed", "evidence": "cpu", "invariants": [], "controls": [], "assertions": 1, "seconds": 0.0}
    return {"id": name, "reason": "", **plain, **changes}


test.__test__ = False  # type: ignore[attr-defined]


def report(*tests: dict[str, Any], row: str = "cpu") -> dict[str, Any]:
    """A report as the plugin writes it."""
    counts: dict[str, int] = {}
    for one in tests:
        counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
    head = {"schema": "halma.test-report/1", "row": row, "backend": "cpu", "backend_evidence": "cpu", "exit": 0}
    held = sum(one["assertions"] for one in tests)
    return {**head, "python": "3.11", "torch": None, "counts": counts, "assertions": held, "tests": list(tests)}
