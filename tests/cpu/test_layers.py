"""No vendor above the backends; device values opened by ops alone; one way to import. Read from syntax trees.

import-linter holds imports of modules and packages. It cannot see an attribute of torch, a method or a string.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).parents[2]
NEUTRAL = ("hal", "ops", "models")
NAMES = ("cuda", "musa", "nccl", "mccl")
DEVICE_STRING = re.compile(rf"({'|'.join(NAMES)})(:\d+)?")
EVIDENCE = ("hal/testing/report.py", "EVIDENCE")
"""The one list of words that says how a result was obtained (section 8 of the design)."""


def violations(source: str, *, allowed_in: str | None = None) -> list[str]:
    """What a file above the backends may not contain, as ``line: what``.

    ``allowed_in`` names the module-level assignment whose strings are not looked at.
    """
    tree = ast.parse(source)
    skipped = {
        id(node)
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and allowed_in in [target.id for target in statement.targets if isinstance(target, ast.Name)]
        for node in ast.walk(statement)
    }
    return [f"{node.lineno}: {what}" for node, what in _findings(tree) if id(node) not in skipped]


def _findings(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node, f"attribute .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE_STRING.fullmatch(node.value):
            yield node, f"string {node.value!r}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if set(NAMES) & set(f"{module}.{alias.name}".split(".")):
                    yield node, f"import of {module}.{alias.name}".replace("of .", "of ")


def unwraps(source: str) -> list[int]:
    """Lines that import or reach for the function that opens a device value."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").endswith("device_value")
            and any(alias.name in ("unwrap", "*") for alias in node.names)
        )
        or (isinstance(node, ast.Attribute) and node.attr == "unwrap")
    ]


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


@pytest.mark.parametrize("folder", NEUTRAL)
def test_no_vendor_is_named_above_the_backends(folder: str) -> None:
    found: dict[str, list[str]] = {}
    for path in python_files(folder):
        name = path.relative_to(ROOT).as_posix()
        allowed = EVIDENCE[1] if name == EVIDENCE[0] else None
        if problems := violations(path.read_text(encoding="utf-8"), allowed_in=allowed):
            found[name] = problems
    assert found == {}


def test_the_exception_is_still_needed() -> None:
    assert violations((ROOT / EVIDENCE[0]).read_text(encoding="utf-8")) != []


PLANTED = {
    "x = torch.cuda.Stream()": "1: attribute .cuda",
    "x = tensor.cuda()": "1: attribute .cuda",
    "x = torch.musa": "1: attribute .musa",
    "x = torch.device('cuda')": "1: string 'cuda'",
    "x = torch.device('cuda:1')": "1: string 'cuda:1'",
    "if device.type == 'musa': pass": "1: string 'musa'",
    "def f(name='nccl'): pass": "1: string 'nccl'",
    "x = {'mccl': 1}": "1: string 'mccl'",
    "import torch.cuda": "1: import of torch.cuda",
    "from torch import cuda": "1: import of torch.cuda",
    "from torch.cuda import Stream": "1: import of torch.cuda.Stream",
    "import cuda.core": "1: import of cuda.core",
}
INNOCENT = [
    '"""About cuda, and what nccl does."""',
    "# torch.cuda\nx = 1",
    "x = 'no cuda here'",
    "x = barracuda.cudas",
    "from halma.hal.backend import Backend",
]


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_violation_is_found(source: str) -> None:
    assert violations(source) == [PLANTED[source]]


@pytest.mark.parametrize("source", INNOCENT)
def test_talking_about_it_is_no_violation(source: str) -> None:
    assert violations(source) == []


def test_only_the_named_list_is_excepted() -> None:
    source = "EVIDENCE = ('cuda',)\nOTHER = ('musa',)\n"
    assert violations(source, allowed_in="EVIDENCE") == ["2: string 'musa'"]


def test_device_values_are_opened_by_ops_and_the_layer_alone() -> None:
    outside = python_files("models", "backends", "src/halma/cli")
    found = {path.name: lines for path in outside if (lines := unwraps(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from halma.hal.device_value import DeviceValue, unwrap",
        "from halma.hal.device_value import *",
        "from halma.hal import device_value\nx = device_value.unwrap(v)",
    ],
)
def test_a_planted_unwrap_is_found(source: str) -> None:
    assert len(unwraps(source)) == 1
    assert unwraps("from halma.hal.device_value import DeviceValue") == []


@pytest.mark.parametrize("folder", ["hal", "backends", "ops", "models"])
def test_a_folder_cannot_be_imported_past_the_package(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"import halma.{folder}, not {folder}" in done.stderr
    proper = subprocess.run([sys.executable, "-c", f"import halma.{folder}"], cwd=ROOT, capture_output=True, text=True)
    assert (proper.returncode, proper.stderr) == (0, "")
