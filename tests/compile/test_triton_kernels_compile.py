"""The Triton products compile for every declared architecture, without a device (K4)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torchfree
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the extra halma[triton]", allow_module_level=True)

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a block may take."""
MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
ROOT = Path(__file__).parents[2]


def built(arch: int, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.compile.triton_build", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_products_compile(arch: int, tmp_path: Path) -> None:
    found = built(arch, tmp_path)
    assert set(found) == {"gate_up", "down", "stage"}
    for name, one in found.items():
        assert one["binary"] > 0 and one["shared"] <= SHARED[arch], name
    for name in ("gate_up", "down"):
        assert MATRIX[arch] in found[name]["words"], name
        assert min(found[name]["copies"]) >= 8, f"{name}: without the hint of a table's alignment, 4 bytes at a time"
    assert not found["stage"]["words"]
