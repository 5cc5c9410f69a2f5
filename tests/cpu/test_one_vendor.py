"""Outside its own folder no backend decides by the name of CUDA, and nothing of torch.cuda is used: syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).parents[2]
FOLDERS = ("backends/musa", "backends/simt", "backends/torch_device", "backends/triton", "backends/cpu")
STAND_IN = "backends/musa/simulator/"
"""The stand-in over torch.cuda: its modes and its tensors are of that name."""
VENDOR = "cuda"


def found_in(source: str) -> list[str]:
    """``line: what`` of each comparison with the vendor's name, and of each use of its part of torch."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [leaf for side in (node.left, *node.comparators) for leaf in ast.walk(side)]
            named = [leaf.value for leaf in sides if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]
            if any(text == VENDOR or text.startswith(f"{VENDOR}:") for text in named):
                found.append(f"{node.lineno}: compares with {VENDOR!r}")
        elif isinstance(node, ast.match_case):
            named = [leaf.value for leaf in ast.walk(node.pattern) if isinstance(leaf, ast.Constant)]
            if VENDOR in named:
                found.append(f"{node.pattern.lineno}: matches {VENDOR!r}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            if any(isinstance(arg, ast.Constant) and arg.value == VENDOR for arg in node.args):
                found.append(f"{node.lineno}: starts with {VENDOR!r}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"torch.{VENDOR}":
            found.append(f"{node.lineno}: torch.{VENDOR}")
        elif isinstance(node, ast.Attribute) and node.attr == f"is_{VENDOR}":
            found.append(f"{node.lineno}: .is_{VENDOR}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_decided_by_the_name_of_one_vendor(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if STAND_IN not in path.as_posix()]
    assert files
    found = {path.relative_to(ROOT).as_posix(): found_in(path.read_text(encoding="utf-8")) for path in files}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_the_exception_is_still_needed() -> None:
    assert any(found_in(path.read_text(encoding="utf-8")) for path in (ROOT / STAND_IN).rglob("*.py"))


@pytest.mark.parametrize(
    "source",
    [
        "if tensor.device.type == 'cuda': pass",
        "x = 'cuda' != kind",
        "if kind in ('cpu', 'cuda'): pass",
        "if str(device) == 'cuda:0': pass",
        "x = name.startswith('cuda')",
        "x = torch.cuda.Stream()",
        "if tensor.is_cuda: pass",
        "match kind:\n    case 'cuda': pass",
    ],
)
def test_a_planted_one_is_found(source: str) -> None:
    assert len(found_in(source)) == 1


@pytest.mark.parametrize(
    "source", ["'''About cuda and torch.cuda.'''", "x = 'cuda'", "if kind == 'musa': pass", "MODES = ('cpu', 'cuda')"]
)
def test_talking_of_it_is_none(source: str) -> None:
    assert found_in(source) == []


def test_one_place_of_the_musa_backend_knows_that_there_is_a_simulator() -> None:
    files = [path for path in (ROOT / "backends/musa").rglob("*.py") if STAND_IN not in path.as_posix()]
    names = {path.name for path in files if "musa_sim" in path.read_text(encoding="utf-8").lower()}
    assert names == {"seam.py"}
    asked = {path.name for path in files if "SIMULATOR" in path.read_text(encoding="utf-8")}
    assert asked == {"seam.py", "__init__.py"}
