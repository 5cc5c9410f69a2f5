"""Other Pythons. ``make nightly`` runs the session ``torchfree`` through the row ``pythons``.

* ``torchfree``: import, registry, settings, command line without torch, on each declared Python.
* ``cuda-compile``: kernels for every declared architecture, with the compiler's wheels of the extra ``cuda``, no GPU.
* ``conformance``: with torch, where there is one to be had: ``NOX_TORCH="torch==2.7.1" nox -s conformance``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import nox

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["torchfree"]
nox.options.error_on_missing_interpreters = True

VERSIONS = ("3.10", "3.12", "3.13")
ROW = "pythons"
# What is imported before torch is: selecting, listing, settings, the command line's own frame.
LIGHT = ["pluggy", "typer", "rich", "safetensors", "tokenizers", "tomli; python_version < '3.11'"]
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "setuptools"]


def _interpreter(version: str) -> str:
    """Where ``pythonX.Y`` is. A pyenv shim on the PATH may answer that the version is not switched on, so pyenv's
    own folder is looked at first."""
    root = Path(os.environ.get("PYENV_ROOT") or Path(shutil.which("pyenv") or Path.home()).resolve().parent.parent)
    for base in (root, Path.home() / ".pyenv", *[Path(p).parent for p in os.get_exec_path() if p.endswith("/shims")]):
        for found in sorted((base / "versions").glob(f"{version}.*/bin/python{version}"), reverse=True):
            return str(found)
    return f"python{version}"


PYTHONS = [_interpreter(version) for version in VERSIONS]


def _pins(session: nox.Session) -> str:
    pins = Path(session.create_tmp()) / "pins.txt"
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
    return str(pins)


def _reports(session: nox.Session) -> tuple[Path, list[str], str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reports", type=Path, default=Path(".halma/reports"))
    options, extra = parser.parse_known_args(session.posargs)
    found = session.run("python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])", silent=True)
    return options.reports.resolve(), extra, str(found).strip()


@nox.session(python=PYTHONS)
def torchfree(session: nox.Session) -> None:
    """Tests that need no torch; it is not installed here, so an import of it is an error."""
    reports, extra, version = _reports(session)
    session.install("-c", _pins(session), *LIGHT, *TOOLS)
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    session.run(
        *("python", "-m", "pytest", "tests", "-m", "torchfree or sentinel"),
        *("--halma-row", ROW, "--halma-report", str(reports / f"{ROW}-{version}.json")),
        *extra,
    )


@nox.session(name="cuda-compile", python=_interpreter("3.11"))
def compile_kernels(session: nox.Session) -> None:
    """The row ``cuda-compile``: no torch, no driver; NVRTC needs neither."""
    _compile(session, "cuda-compile", "not nightly")


@nox.session(name="cuda-compile-nightly", python=_interpreter("3.11"))
def compile_more_kernels(session: nox.Session) -> None:
    """The row ``cuda-compile-nightly``: the world sizes and spellings that a pull request leaves out."""
    _compile(session, "cuda-compile-nightly", "nightly or sentinel")


def _compile(session: nox.Session, row: str, markers: str) -> None:
    reports, extra, _ = _reports(session)
    with open("pyproject.toml", "rb") as file:
        cuda = tomllib.load(file)["project"]["optional-dependencies"]["cuda"]
    session.install("-c", _pins(session), *LIGHT, *TOOLS, "pytest-xdist", *cuda)
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
    session.run(
        *("python", "-m", "pytest", "tests/compile", "tests/test_sentinel.py", "-n", "2", "-m", markers),
        *("--halma-row", row, "--halma-report", str(reports / f"{row}.json")),
        *extra,
    )


@nox.session(python=PYTHONS)
def conformance(session: nox.Session) -> None:
    """The CPU rows' tests of the layer and the backend, with the torch that NOX_TORCH names."""
    torch = os.environ.get("NOX_TORCH")
    if not torch:
        session.skip("NOX_TORCH is not set (a pip requirement, for example torch==2.13.0)")
    _, extra, _ = _reports(session)
    index = os.environ.get("NOX_TORCH_INDEX")
    session.install("-c", _pins(session), *(["--extra-index-url", index] if index else []), torch)
    session.install("-c", _pins(session), *TOOLS, "--no-build-isolation", "-e", ".")
    session.run(
        *(
            "python",
            "-m",
            "pytest",
            "tests/cpu",
            "src/halma/hal/testing/conformance",
            "-m",
            "not nightly and not oracle",
        ),
        *("--halma-require-backend", "cpu", *extra),
    )
