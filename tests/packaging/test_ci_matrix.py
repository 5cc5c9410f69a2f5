"""The matrix, its renderer and its runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci import local, render
from ci.schema import ROOT, MatrixError, Row, load, of_tier

pytestmark = pytest.mark.torchfree

GOOD = """
[[row]]
id = "one"
tier = "pr"
backend = "cpu"
evidence = "cpu"
python = ["3.11"]
torch = ""
runner = "ubuntu-24.04"
gate = "blocking"
select = ["tests"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "matrix.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_row_is_read(tmp_path: Path) -> None:
    (row,) = load(write(tmp_path, GOOD))
    assert row.id == "one"
    assert row.select == ("tests",)
    assert row.assertions == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('id = "one"', 'id = "One!"', "lower-case words"),
        ('id = "one"', "id = 1", "id must be a string"),
        ('tier = "pr"', 'tier = "hourly"', "tier is 'hourly'"),
        ('evidence = "cpu"', 'evidence = "hearsay"', "evidence is 'hearsay'"),
        ('torch = ""', "", "no 'torch'"),
        ('torch = ""', 'torch = ""\ntroch = ""', "unknown key 'troch'"),
        ('torch = ""', 'torch = ""\nassertions = -1', "from 0 up"),
        ('torch = ""', 'torch = ""\nmarkers = "not nihgtly"', "unknown marker 'nihgtly'"),
        ('gate = "blocking"', 'gate = "informational"', "needs a reason"),
        ('runner = "ubuntu-24.04"', 'runner = "none"', "cannot block"),
        ('python = ["3.11"]', "python = []", "no Python version"),
        ('python = ["3.11"]', 'python = "3.11"', "list of strings"),
        ('select = ["tests"]', 'select = ["tests/nowhere"]', "selects 'tests/nowhere'"),
    ],
)
def test_a_row_that_cannot_mean_anything_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(MatrixError, match=said):
        load(write(tmp_path, GOOD.replace(old, new)))


def test_duplicate_ids_disorder_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="two rows are called 'one'"):
        load(write(tmp_path, GOOD + GOOD))
    with pytest.raises(MatrixError, match="not sorted"):
        load(write(tmp_path, GOOD.replace('"pr"', '"nightly"') + GOOD.replace('"one"', '"two"')))
    with pytest.raises(MatrixError, match="no rows"):
        load(write(tmp_path, ""))


def test_every_problem_is_in_one_message(tmp_path: Path) -> None:
    text = GOOD.replace('"pr"', '"hourly"').replace('"blocking"', '"perhaps"')
    with pytest.raises(MatrixError) as caught:
        load(write(tmp_path, text))
    assert "hourly" in str(caught.value)
    assert "perhaps" in str(caught.value)


def test_the_project_has_the_rows_it_promises() -> None:
    rows = load()
    assert {"cpu", "packaging"} <= {row.id for row in of_tier(rows, "pr")}
    assert all(row.gate == "blocking" for row in of_tier(rows, "pr"))
    assert of_tier(rows, "nightly")


def test_the_workflow_on_disk_is_the_matrix() -> None:
    assert render.main(["--check"]) == 0


@pytest.mark.mutant
def test_a_workflow_that_drifted_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ci.yml"
    path.write_text(render.workflow(load()).replace("make row ROW=cpu ", "true "), encoding="utf-8")
    assert render.main(["--check"], path=path) == 1
    assert "python -m ci.render" in capsys.readouterr().err
    assert render.main([], path=path) == 0
    assert render.main(["--check"], path=path) == 0


def test_a_row_without_a_machine_shows_as_not_run(tmp_path: Path) -> None:
    text = GOOD.replace('"ubuntu-24.04"', '"none"').replace('"blocking"', '"informational"\nreason = "no hardware"')
    rows = load(write(tmp_path, text))
    job = render.workflow(rows)
    assert "one: declared, not run: no hardware" in job
    assert "if: false" in job
    assert "make row ROW=one" not in job


def test_the_runner_names_the_rows_it_knows() -> None:
    rows = load()
    with pytest.raises(MatrixError, match="no row is called gpu-9000; rows: .*cpu"):
        local.chosen(rows, ["gpu-9000"], None)
    with pytest.raises(MatrixError, match="name a row"):
        local.chosen(rows, [], None)
    assert [row.id for row in local.chosen(rows, ["packaging"], None)] == ["packaging"]


def test_a_row_is_run_with_its_requirements(tmp_path: Path) -> None:
    row = next(row for row in load() if row.id == "cpu")
    line = local.command(row, tmp_path, ["-x"])
    assert line[line.index("--halma-require-backend") + 1] == "cpu"
    assert line.count("--halma-require-capability") == len(row.require)
    assert line[line.index("--halma-report") + 1] == str(tmp_path / "cpu.json")
    assert line[-1] == "-x"


def _row(name: str = "cpu") -> Row:
    return next(row for row in load(ROOT / "ci" / "matrix.toml") if row.id == name)


def test_a_row_that_leaves_no_report_fails_even_with_status_0(tmp_path: Path) -> None:
    assert local.run([_row()], reports=tmp_path, whole_tier=False, execute=lambda _: 0) == 1


def test_a_report_of_an_earlier_run_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps({"schema": "halma.test-report/1"}), encoding="utf-8")
    assert local.run([_row()], reports=tmp_path, whole_tier=False, execute=lambda _: 0) == 1
    assert "cpu: left no report" in capsys.readouterr().out
