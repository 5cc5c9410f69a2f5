"""A wheel of the checkout, built once, and a scratch environment with it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, build_wheel, checked, clean_environment, copy_of_checkout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    source = copy_of_checkout(tmp_path_factory.mktemp("checkout"))
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """A scratch environment with our wheel in it, and nothing heavy installed twice."""
    folder = tmp_path_factory.mktemp("scratch") / "venv"
    checked([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(checked([python, "-c", ask]).strip())
    (site / "zz_main.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    environment = Environment(python)
    environment.install(wheel)
    return environment


@pytest.fixture
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run this environment's Python on some code, in a process of its own."""

    def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT.parent,
            env=clean_environment(**env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
