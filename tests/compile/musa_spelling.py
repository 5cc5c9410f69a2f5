"""The MUSA spelling without mcc and without a GPU: a host C++ compiler reads a source behind a header that declares
only names with a public source (tests/compile/musa/names.h)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from halma.backends.simt.sources import Target
from halma.hal.backend import KernelSource
from tests.compile.nvrtc import Compiled

NAMES: Final = Path(__file__).with_name("musa")
COMPILER: Final = shutil.which("g++") or shutil.which("clang++")
CLOCK_KHZ: Final = 1_700_000
ARCHITECTURES: Final = {"mp_22": (220, 128), "mp_31": (310, 32)}
"""``__MUSA_ARCH__`` and the threads of a warp, by architecture."""


def musa(arch: str = "mp_31", **changed: int | bool | None) -> Target:
    """A device of this architecture whose stores have been probed and found whole."""
    known = {"warp_width": ARCHITECTURES[arch][1], "dependent_launch": False, "atomicity": 8, "clock_khz": CLOCK_KHZ}
    return Target("musa", **{**known, **changed})


def read_as_musa(source: KernelSource, arch: str, more: Mapping[str, str] | None = None) -> Compiled:
    """Whether ``source`` is C++ that uses nothing but those names on ``arch``; no code is made."""
    assert COMPILER is not None, "the MUSA spelling is checked by g++ or clang++; install one of them"
    with tempfile.TemporaryDirectory(prefix="halma-musa-") as folder:
        for name, text in {**source.headers, "unit.cpp": source.text}.items():
            (Path(folder) / name).write_text(text)
        defines = {"__MUSA_ARCH__": str(ARCHITECTURES[arch][0]), **source.defines, **(more or {})}
        done = subprocess.run(
            [
                *(COMPILER, "-x", "c++", "-std=c++17", "-fsyntax-only", "-nostdinc", "-Wfatal-errors"),
                *("-Werror=return-type", "-I", str(NAMES), "-include", "names.h"),
                *(f"-D{name}={value}" for name, value in defines.items()),
                "unit.cpp",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    return Compiled(done.returncode == 0, b"", done.stderr)
