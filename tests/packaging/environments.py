"""Building a wheel of the checkout, and scratch environments that see the packages of the main one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IN_A_WHEEL = ("hal", "backends", "ops", "models", "src", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def clean_environment(**changes: str) -> dict[str, str]:
    """This process' environment without what would change a child's meaning."""
    dropped = ("HALMA_", "PYTHON", "PYTEST_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(dropped)}, **changes}


def checked(line: Sequence[str | Path]) -> str:
    """Run a command that has to succeed; its output is in the failure."""
    words = [str(word) for word in line]
    done = subprocess.run(words, capture_output=True, text=True, env=clean_environment(), timeout=240, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_of_checkout(target: Path) -> Path:
    """Copy what a wheel is built from, links as links, so that building leaves nothing in the checkout."""
    for name in IN_A_WHEEL:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, target / name, symlinks=True, ignore=skip)
        else:
            shutil.copy2(source, target / name)
    return target


def build_wheel(source: Path, target: Path) -> Path:
    """Build a wheel with the installed setuptools: no download, no environment of its own."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    checked([*pip, "--no-build-isolation", "--wheel-dir", target, source])
    (wheel,) = target.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of ours through a .pth file."""

    python: Path

    def install(self, *packages: Path) -> None:
        """Install wheels or source folders without what they depend on."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, "install"]
        checked([*pip, "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *packages])

    def run(
        self, *arguments: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run its Python outside the checkout; ``path`` goes in front of sys.path, as PYTHONPATH."""
        environment = clean_environment(**(env or {}))
        if path:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.python.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
