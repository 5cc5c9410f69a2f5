"""Real folders on top, one package when installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hal", "backends", "ops", "models")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_package_links_to_the_top_level_folder(name: str) -> None:
    link = ROOT / "src" / "halma" / name
    assert link.is_symlink(), "git restores the links with core.symlinks=true"
    assert os.readlink(link) == f"../../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", FOLDERS)
def test_importing_a_folder_by_its_bare_name_says_what_to_do(name: str) -> None:
    line = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"import halma.{name}, not {name}" in done.stderr


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def test_one_name_lands_in_site_packages(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"halma"}
    assert len(tops) == 2


def test_every_module_of_the_folders_is_in_the_wheel_once(names: list[str]) -> None:
    for folder in FOLDERS:
        ours = {f"halma/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
        assert ours == {name for name in names if name.startswith(f"halma/{folder}/") and name.endswith(".py")}
    assert len(names) == len(set(names))


def test_data_is_in_the_wheel(names: list[str]) -> None:
    package = ROOT / "src" / "halma"
    data = {f"halma/{path.relative_to(package)}" for path in (package / "data").rglob("*") if path.is_file()}
    assert {"halma/data/tiny-v4/config.json", "halma/data/tiny-v4/PROVENANCE.md"} <= data
    assert data <= set(names)
    assert "halma/py.typed" in names
    for kind in ("h", "cu", "mu"):
        assert {f"halma/{path.relative_to(ROOT)}" for path in (ROOT / "backends").rglob(f"*.{kind}")} <= set(names)


def test_the_licence_travels(names: list[str]) -> None:
    kept = {name.rsplit("/", 1)[-1] for name in names if ".dist-info/licenses/" in name}
    assert {"LICENSE", "NOTICE"} <= kept
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_no_file_of_ours_is_called_utils() -> None:
    found = [path for folder in (*FOLDERS, "ci", "src") for path in (ROOT / folder).rglob("util*.py")]
    assert found == []
