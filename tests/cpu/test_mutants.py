"""The table of mutants is up to date, the machinery tells red from green, and every night each mutant is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import mutants
from ci.mutants import Copy, Mutant, MutantError, load, main, markdown, uncovered

try:
    TABLE = load()
except MutantError:
    TABLE = ()  # the first test below says what is wrong


def test_every_mutant_of_the_kernels_can_be_applied() -> None:
    found = load(mutants.TABLE / "gpu")
    assert len(found) >= 11 and all(mutant.file.startswith("backends/") for mutant in found)


def test_every_mutant_can_be_applied() -> None:
    assert len(load()) > 40


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    yield Copy(tmp_path_factory.mktemp("mutants"))


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.id)
def test_the_mutant_is_noticed(mutant: Mutant, copy: Copy) -> None:
    outcome = copy.try_out(mutant)
    assert outcome.verdict == "noticed", outcome


@pytest.mark.nightly
@pytest.mark.mutant
def test_every_rule_has_a_mutant() -> None:
    assert uncovered(TABLE) == []


# -- the machinery, on a checkout of two files ----------------------------------------------------------------

GUARDED = "def take(number):\n    if number < 0:\n        raise ValueError\n    return number\n"
TESTS = """
import sys, pytest
sys.path.insert(0, "hal")
import guarded

@pytest.mark.invariant("W1")
def test_refused():
    with pytest.raises(ValueError):
        guarded.take(-1)

@pytest.mark.invariant("W1", control=True)
def test_allowed():
    assert guarded.take(1) == 1
"""
ENTRY = """
[[mutant]]
id = "W1-sign"
file = "hal/guarded.py"
old = "if number < 0:"
new = "if False:"
tests = ["tests/test_it.py"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in (
        ("hal/guarded.py", GUARDED),
        ("tests/test_it.py", TESTS),
        ("pyproject.toml", ""),
        ("table/a.toml", ENTRY),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def changed(root: Path, old: str = "", new: str = "") -> tuple[Mutant, ...]:
    (root / "table" / "a.toml").write_text(ENTRY.replace(old, new) if old else ENTRY, encoding="utf-8")
    return load(root / "table", root=root)


@pytest.mark.nightly
def test_verdicts(checkout: Path, tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy", checkout)
    (good,) = changed(checkout)
    found = copy.try_out(good)
    assert (found.verdict, found.where) == ("noticed", "hal/guarded.py:2")
    assert found.red == ("tests/test_it.py::test_refused",) and (found.controls_green, found.controls) == (1, 1)
    for new, verdict, detail in (
        ("if number <= -1:", "survived", ""),
        ("if number > 0:", "noticed", ""),
        ("if number < 0 or number == 1:", "other tests", "tests/test_it.py::test_allowed"),
    ):
        (mutant,) = changed(checkout, "if False:", new)
        found = copy.try_out(mutant)
        assert (found.verdict, detail in found.detail) == (verdict, True), found
    assert (tmp_path / "copy" / "hal" / "guarded.py").read_text(encoding="utf-8") == GUARDED, "mended again"
    assert "| W1-sign | hal/guarded.py:2 | " in markdown([found], ["G9"]) and "G9." in markdown([found], ["G9"])


@pytest.mark.nightly
def test_tests_that_are_red_without_the_mutant_prove_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "test_it.py").write_text(TESTS.replace("== 1\n", "== 2\n"), encoding="utf-8")
    found = Copy(tmp_path / "copy", checkout).try_out(*changed(checkout))
    assert found.verdict == "broken" and "not green without it" in found.detail


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("if number < 0:", "if number < 7:", "0 times"),
        ('"if number < 0:"', '"number"', "3 times"),
        ("if False:", "if (:", "no Python"),
        ("tests/test_it.py", "tests/gone.py", "is not there"),
        ("W1-sign", "sign", "an id is a rule"),
        ('new = "if False:"\n', "", "wants"),
        (ENTRY, ENTRY + ENTRY, "two mutants"),
        (ENTRY, "", "no mutants"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(checkout: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(MutantError, match=says):
        changed(checkout, old, new)


def test_the_command_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "G99"]) == 2 and main(["--output", str(tmp_path / "table.txt")]) == 2
    assert "G99" in capsys.readouterr().err
    mutants._write(tmp_path / "new" / "table.json", [], ["G9"])
    assert json.loads((tmp_path / "new" / "table.json").read_text())["uncovered"] == ["G9"]
