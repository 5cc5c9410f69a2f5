"""``halma conformance``: rules, tests, results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halma.cli import conformance as command
from halma.hal.testing import suite as suite_module
from halma.hal.testing.rules import RULES, Rule, rule, written_tests
from halma.hal.testing.suite import SuiteResult, run_suite
from tests.cpu.cli.conftest import Halma

HEAD = "import pytest\n"
GUARD = '@pytest.mark.invariant("W1")\ndef test_guard():\n    assert {guard}\n'
CONTROL = '@pytest.mark.invariant("W1", control=True)\ndef test_control():\n    assert {control}\n'
SKIPPED = '@pytest.mark.skip(reason="no such part")\n'


def ran(folder: Path, text: str, *rules: Rule, name: str = "test_a.py") -> SuiteResult:
    """A suite of one file, run for the rule W1."""
    (folder / name).write_text(HEAD + text, encoding="utf-8")
    return run_suite("cpu", rules or (Rule("W1", "does not grow"),), suite=folder)


def test_a_rule_of_the_real_suite(halma: Halma) -> None:
    done = halma("conformance", "--backend", "cpu", "--rule", "w4", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert (answer["schema"], answer["backend"], answer["evidence"]) == ("halma.conformance/1", "cpu", "cpu")
    assert list(answer["rules"]) == ["W4"]
    facts = answer["rules"]["W4"]
    assert facts["verdict"] == "passed" and facts["failed"] == facts["skipped"] == 0
    assert facts["passed"] == len(facts["tests"]) + len(facts["controls"]) >= 2


def test_the_table_has_a_line_a_rule(halma: Halma) -> None:
    done = halma("conformance", "--backend", "cpu", "--rule", "W4", "--rule", "G27")
    assert done.code == 0, done.err
    title, head, *lines = done.out.splitlines()
    assert title == "cpu, evidence cpu" and head.split() == ["rule", "what", "it", "says", "tests", "result"]
    assert lines[0].startswith("G27") and "not applicable: " in lines[0]
    assert lines[1].startswith("W4") and "control: workspace" in lines[1] and lines[1].endswith("passed")
    assert lines[-1] == "1 not applicable, 1 passed"


@pytest.mark.torchfree
def test_the_list_needs_no_backend_and_names_tests(halma: Halma) -> None:
    done = halma("conformance", "--list", "--rule", "W4")
    assert done.code == 0
    assert "test_workspace.py::test_addresses_stay_for_the_life_of_the_workspace" in done.out
    listed = json.loads(halma("conformance", "--list", "--json").out)["rules"]
    assert list(listed) == [one.id for one in RULES] and listed["W4"]["controls"]


@pytest.mark.torchfree
def test_every_rule_has_a_test_and_a_control_arm_or_a_reason() -> None:
    tests = written_tests()
    guarded = {name for test in tests for name in test.rules}
    controlled = {name for test in tests for name in test.controls}
    bare = [one.id for one in RULES if not one.elsewhere and not {one.id} <= guarded & controlled]
    assert bare == []


@pytest.mark.torchfree
def test_bad_input_is_code_2(halma: Halma) -> None:
    done = halma("conformance", "--rule", "G99")
    assert (done.code, done.out) == (2, "") and "no rule is called G99" in done.err and "G1, G2" in done.err
    assert halma("conformance", "--backend", "nowhere").code == 2


@pytest.mark.torchfree
@pytest.mark.parametrize("place", [".", "file/result.json"])
def test_a_place_for_the_result_that_cannot_be_written_is_refused_before_the_suite_runs(
    halma: Halma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(command, "run_suite", lambda backend, rules: pytest.fail("minutes, for nothing"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = halma("conformance", "--backend", "cpu", "--output", str(tmp_path / place))
    assert done.code == 2 and "cannot be written" in done.err
    assert [one.name for one in tmp_path.iterdir()] == ["file"], "and nothing is left"


def test_without_pytest_it_says_which_extra_has_it(halma: Halma, monkeypatch: pytest.MonkeyPatch) -> None:
    real = suite_module.importlib.util.find_spec
    monkeypatch.setattr(suite_module.importlib.util, "find_spec", lambda name: None if name == "pytest" else real(name))
    done = halma("conformance", "--backend", "cpu")
    assert done.code == 2 and "needs pytest" in done.err and "pip install 'halma[testing]'" in done.err


def test_a_failing_test_is_code_1_with_its_own_words(
    halma: Halma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ran(tmp_path, GUARD.format(guard="1 == 2") + CONTROL.format(control="True"))
    (found,) = result.rules
    assert (found.verdict, found.passed, found.failed) == ("failed", 1, 1) and not result.ok
    monkeypatch.setattr(command, "run_suite", lambda backend, rules: result)
    done = halma("conformance", "--backend", "cpu", "--rule", "W1")
    assert done.code == 1 and "FAILED" in done.out and "assert 1 == 2" in done.err


def test_a_rule_without_a_control_arm_or_a_test_is_a_failure(
    halma: Halma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ran(tmp_path, GUARD.format(guard="True"), Rule("W1", ""), Rule("W2", ""), Rule("W3", "", elsewhere="why"))
    assert [(one.verdict, one.why) for one in result.rules] == [
        ("not covered", "no control arm"),
        ("not covered", "no test"),
        ("not applicable", "why"),
    ]
    monkeypatch.setattr(command, "run_suite", lambda backend, rules: result)
    done = halma("conformance", "--backend", "cpu")
    assert done.code == 1 and done.err.strip() == "halma: not covered: W1 (no control arm), W2 (no test)"


def test_what_is_skipped_says_why_and_a_run_of_skips_shows_nothing(tmp_path: Path) -> None:
    skipped = SKIPPED + GUARD.format(guard="True") + SKIPPED + CONTROL.format(control="True")
    more = skipped.replace("W1", "W2").replace("_guard", "_one").replace("_control", "_two").replace(SKIPPED, "")
    result = ran(tmp_path, skipped)
    assert (result.rules[0].verdict, result.rules[0].why, result.ok) == ("skipped", "no such part", False)
    assert ran(tmp_path, skipped + more, Rule("W1", ""), Rule("W2", "")).ok


@pytest.mark.mutant
@pytest.mark.parametrize("skipped", ["guard", "control"])
def test_a_control_arm_alone_shows_nothing_of_its_rule_nor_does_a_guard(tmp_path: Path, skipped: str) -> None:
    parts = {"guard": GUARD.format(guard="True"), "control": CONTROL.format(control="True")}
    parts[skipped] = SKIPPED + parts[skipped]
    result = ran(tmp_path, "".join(parts.values()))
    (found,) = result.rules
    assert (found.verdict, found.why, found.passed, found.skipped) == ("skipped", "no such part", 1, 1)
    assert not result.ok, "nothing was shown of any rule"


@pytest.mark.parametrize("text", ["import nothing_of_that_name\n" + GUARD, GUARD + "import os\nos._exit(3)\n"])
def test_a_suite_that_does_not_run_to_its_end_is_a_failure(tmp_path: Path, text: str) -> None:
    result = ran(tmp_path, text.format(guard="True") + CONTROL.format(control="True"))
    assert not result.ok and "pytest ended with status" in result.broken


def test_what_is_the_cpus_own_is_not_asked_of_another_backend(tmp_path: Path) -> None:
    own = Rule("W1", "", cpu_only="only its recorder sees it")
    (tmp_path / "test_cpu_a.py").write_text(HEAD + GUARD.format(guard="True"), encoding="utf-8")
    assert suite_module._chosen_tests("other", [own], tmp_path) == []
    assert len(suite_module._chosen_tests("cpu", [own], tmp_path)) == 1
    assert own.not_applicable("other") and not own.not_applicable("cpu")
    assert rule("w1") is not None and rule("w99") is None
