"""Programs on the CPU simulator, each in a process of its own: a process has one PrivateUse1 device for its life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 240
ROOT: Final = Path(__file__).parents[2]


def environment(mode: str | None = "cpu", **more: str) -> dict[str, str]:
    """This process's, with the simulator chosen, or none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HALMA_", "PYTEST_"))}
    chosen = {} if mode is None else {"HALMA_MUSA_SIM": mode}
    return {**kept, **chosen, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", **more}


def run(*line: str, mode: str | None = "cpu", **more: str) -> subprocess.CompletedProcess[str]:
    """``python *line`` in the repository's root, its output kept."""
    return subprocess.run(
        [sys.executable, *line], cwd=ROOT, env=environment(mode, **more), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip


def findings(module: str, *arguments: str, mode: str = "cpu") -> dict[str, Any]:
    """What ``python -m module`` prints as its last line, which is JSON."""
    done = run("-m", module, *arguments, mode=mode)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def generated(arguments: Sequence[str], mode: str | None) -> dict[str, Any]:
    """What ``halma generate --json`` prints."""
    done = run("-m", "halma", "generate", *arguments, "--json", mode=mode)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])
