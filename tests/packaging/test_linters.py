"""Each checker of `make lint` still finds one planted error: a clean run must not mean that it saw nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, clean_environment, copy_of_checkout

pytestmark = pytest.mark.mutant

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to plant errors in; each test takes its own out again."""
    copy = copy_of_checkout(tmp_path_factory.mktemp("planted"))
    shutil.copytree(ROOT / "ci", copy / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(tool: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(PYTHONPATH=str(cwd / "src"))
    line = [str(BIN / tool), *arguments]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("hal/planted.py", "import halma.ops.weight\n", "models stand on ops"),
        ("ops/planted.py", "import halma.models.deepseek_v4\n", "models stand on ops"),
        ("backends/planted.py", "import halma.ops.weight\n", "backends know the layer only"),
        ("models/planted.py", "import halma.backends\n", "nobody names a backend"),
        ("ops/planted.py", "import torch_musa\n", "vendors' packages"),
        ("hal/planted.py", "import pynvml\n", "vendors' packages"),
        ("models/planted.py", "from cuda import core\n", "vendors' packages"),
    ],
    ids=["hal-ops", "ops-models", "backends-ops", "models-backends", "torch_musa", "pynvml", "cuda"],
)
def test_import_linter_finds_a_wrong_import(checkout: Path, file: str, text: str, said: str) -> None:
    planted = checkout / file
    planted.write_text(text, encoding="utf-8")
    try:
        done = run("lint-imports", "--no-cache", cwd=checkout)
    finally:
        planted.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    assert any(said in line for line in broken), done.stdout


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("from . import errors\n", "TID252"),
        ("import os\n", "F401"),
        ("import torch\nimport os\n\nprint(os, torch)\n", "I001"),
    ],
)
def test_ruff_finds_it(checkout: Path, text: str, rule: str) -> None:
    planted = checkout / "hal" / "planted.py"
    planted.write_text(text, encoding="utf-8")
    try:
        done = run("ruff", "check", "--no-cache", str(planted), cwd=checkout)
    finally:
        planted.unlink()
    assert done.returncode == 1
    assert rule in done.stdout


@pytest.mark.nightly
def test_pyright_sees_all_four_folders_and_is_strict_in_hal(checkout: Path) -> None:
    wrong = "from halma.hal.errors import HalmaError\n\nx: int = HalmaError('a')\n"
    loose = "def f(x):\n    return x\n"
    planted = [checkout / folder / "planted.py" for folder in ("hal", "ops", "backends", "models")]
    for path in planted:
        path.write_text(wrong + loose, encoding="utf-8")
    try:
        done = run(
            "pyright", "--project", "pyproject.toml", "--outputjson", "--pythonpath", sys.executable, cwd=checkout
        )
    finally:
        for path in planted:
            path.unlink()
    found = {(Path(one["file"]).parts[-2:], one["rule"]) for one in json.loads(done.stdout)["generalDiagnostics"]}
    for folder in ("hal", "ops", "backends", "models"):
        place = (folder, "planted.py")
        assert (place, "reportAssignmentType") in found, done.stdout
        assert ((place, "reportMissingParameterType") in found) == (folder == "hal")
