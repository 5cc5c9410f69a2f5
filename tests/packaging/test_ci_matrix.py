"""The matrix, its renderer and its runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci import buildkite, github, local, render, selected
from ci.schema import ROOT, MatrixError, Row, load, nox_sessions, of_tier

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
        ('torch = ""', 'torch = ""\nsession = "nowhere"', "no session 'nowhere'"),
        ('torch = ""', 'torch = ""\nenvironment = ["PATH=/"]', "takes HALMA_NAME=value"),
        ('torch = ""', 'torch = ""\nenvironment = ["HALMA_MUSA_SIM=cpu"]', "a simulator is switched on"),
        ('evidence = "cpu"', 'evidence = "simulated"', "a simulator is not switched on"),
        ('evidence = "cpu"', 'evidence = "musa"', "wants the backend musa and devices"),
        ('torch = ""', 'torch = ""\ndevices = 1', "has no devices, the row needs 1"),
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
    assert {"cpu", "packaging", "cuda-compile", "musa-contract", "musa-simulated-cpu"} <= {
        row.id for row in of_tier(rows, "pr")
    }
    hardware = {"cuda-h200", "cuda-h200-x2", "musa-simulated-on-cuda", "musa-s4000", "musa-s5000"}
    assert {row.id for row in of_tier(rows, "manual")} == hardware
    assert {row.id for row in rows if not row.runs} == {"musa-s4000", "musa-s5000"}
    assert {row.evidence for row in rows} == {"cpu", "contract", "simulated", "cuda", "musa"}
    assert all(row.gate == "blocking" for row in of_tier(rows, "pr"))
    assert of_tier(rows, "nightly")


def test_what_is_on_disk_is_the_matrix() -> None:
    assert render.main(["--check"]) == 0


@pytest.mark.mutant
@pytest.mark.parametrize("name", list(render.WRITERS))
def test_a_file_that_drifted_is_found_and_rewritten(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render.main([], root=tmp_path) == 0
    assert render.main(["--check"], root=tmp_path) == 0
    path = tmp_path / name
    text = path.read_text(encoding="utf-8")
    changed = text.replace("make row ROW=cpu ", "true ").replace("tests/packaging/test_layout.py", "tests/gone.py")
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    assert render.main(["--check"], root=tmp_path) == 1
    assert f"{name} does not say what ci/matrix.toml says" in capsys.readouterr().err
    assert render.main([], root=tmp_path) == 0
    assert path.read_text(encoding="utf-8") == text


def tree(tmp_path: Path) -> Path:
    """A checkout in small: two rows, one of them the only one that runs tests/cpu."""
    for file in ("tests/cpu/test_a.py", "tests/cpu/test_b.py", "tests/packaging/test_c.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("pytestmark = pytest.mark.torchfree\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = []\n", encoding="utf-8")
    return tmp_path


FOLDERS = ("tests/cpu", "tests/packaging")


def rows_of(root: Path, *folders: str) -> tuple[Row, ...]:
    text = "".join(
        GOOD.replace('"one"', f'"row-{number}"').replace('["tests"]', f'["{folder}"]')
        for number, folder in enumerate(folders)
    )
    return load(write(root, text), root=root)


@pytest.mark.mutant
def test_a_deleted_test_file_of_a_row_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path)
    rows = rows_of(root, *FOLDERS)
    before = selected.text(rows, root)
    assert selected.text(rows, root) == before, "rendered twice, the same text"
    (root / "tests" / "cpu" / "test_b.py").unlink()
    after = selected.text(rows, root)
    assert after != before
    assert selected.differences(before, after) == ["tests/cpu/test_b.py is gone"]
    (root / "tests" / "packaging" / "test_c.py").unlink()
    with pytest.raises(MatrixError, match="row-1: its selection holds no test file"):
        selected.text(rows, root)
    (root / "tests" / "packaging").rmdir()
    with pytest.raises(MatrixError, match="selects 'tests/packaging', which is not there"):
        rows_of(root, *FOLDERS)


@pytest.mark.mutant
def test_a_test_file_whose_only_runner_was_deleted_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path)
    with pytest.raises(MatrixError, match=r"tests/cpu/test_a.py: no row runs it\ntests/cpu/test_b.py: no row runs it"):
        selected.text(rows_of(root, "tests/packaging"), root)
    assert "tests/cpu/test_a.py: row-0\n" in selected.text(rows_of(root, *FOLDERS), root)


def test_without_torch_a_row_runs_what_says_torchfree_alone(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "tests" / "cpu" / "test_b.py").write_text("import torch\n", encoding="utf-8")
    with pytest.raises(MatrixError, match="test_b.py: no row runs it"):
        selected.text(rows_of(root, *FOLDERS), root)


def test_files_of_devices_belong_to_rows_that_have_them() -> None:
    rows = {row.id: row for row in load()}
    ranks = "tests/gpu/collectives/test_rank_processes.py"
    assert ranks in selected.files_of(rows["cuda-h200-x2"])
    assert ranks not in selected.files_of(rows["cuda-h200"])
    assert "tests/gpu/test_cuda_graphs.py" in selected.files_of(rows["cuda-h200"])
    assert "tests/gpu/test_cuda_graphs.py" not in selected.files_of(rows["musa-s5000"])
    assert not any("/gpu/" in file for file in selected.files_of(rows["pythons"]))


def test_the_sessions_of_the_rows_are_read_from_the_source() -> None:
    assert {"cuda-compile", "cuda-compile-nightly", "torchfree", "conformance"} == nox_sessions()


def test_buildkite_gets_the_same_rows() -> None:
    yaml = pytest.importorskip("yaml", reason="there is no reader of YAML here")
    rows = load()
    steps = {step["key"]: step for step in yaml.safe_load(buildkite.pipeline(rows))["steps"]}
    jobs = yaml.safe_load(github.workflow(rows))["jobs"]
    assert set(steps) == set(jobs) == {"lint", "judge-pr", "judge-nightly", *(row.id for row in rows)}
    for row in rows:
        step, job = steps[row.id], jobs[row.id]
        if row.runs:
            assert step["command"] == github.make_row(row) == job["steps"][2]["run"]
            assert step["agents"] == {"queue": row.runner}
            assert "skip" not in step
        else:
            assert 0 < len(step["skip"]) <= 70
            assert (step["command"], job["if"]) == ("exit 1", False)
    assert {one["step"] for one in steps["judge-pr"]["depends_on"]} == {row.id for row in of_tier(rows, "pr")}


def test_a_row_without_a_machine_shows_as_not_run(tmp_path: Path) -> None:
    text = GOOD.replace('"ubuntu-24.04"', '"none"').replace('"blocking"', '"informational"\nreason = "no hardware"')
    rows = load(write(tmp_path, text))
    job = github.workflow(rows)
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
    assert local.run([_row()], reports=tmp_path, whole_tier=False, execute=lambda *_: 0) == 1


def test_a_report_of_an_earlier_run_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps({"schema": "halma.test-report/1"}), encoding="utf-8")
    assert local.run([_row()], reports=tmp_path, whole_tier=False, execute=lambda *_: 0) == 1
    assert "cpu: left no report" in capsys.readouterr().out


def test_a_row_sees_its_own_settings_and_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_GRAPH", "0")
    seen = local.environment(_row("musa-simulated-cpu"))
    assert {name: value for name, value in seen.items() if name.startswith("HALMA_")} == {"HALMA_MUSA_SIM": "cpu"}
    assert not any(name.startswith("HALMA_") for name in local.environment(_row()))


def test_a_row_without_a_machine_is_never_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    code = local.run(
        [_row("musa-s5000")], reports=tmp_path, whole_tier=False, execute=lambda line, _: called.append(line[0]) or 0
    )
    shown = capsys.readouterr()
    assert (code, called) == (1, [])
    assert "musa-s5000 is declared and not run: no S5000" in shown.out
    assert "no row ran" in shown.err


def test_here_runs_it_and_holds_it_to_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Row] = []
    monkeypatch.setattr(local, "run", lambda rows, **_: seen.extend(rows) or 0)
    assert local.main(["musa-s5000", "--here"]) == 0
    assert [(row.runs, row.gate, row.evidence) for row in seen] == [(True, "blocking", "musa")]
