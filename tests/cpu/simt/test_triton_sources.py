"""Triton sources are for every vendor's Triton: nothing in them is one vendor's (K2). Whether MUSA's own compiler takes
them is not known here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import halma.backends

pytestmark = pytest.mark.torchfree

SOURCES = sorted((Path(str(halma.backends.__path__[0])) / "triton").glob("*.py"))
FOREIGN = ("inline_asm", "libdevice", "extern_elementwise", "extra", "experimental", "nvidia", "ptx", "cuda", "musa")
"""Inline assembly, a vendor's library of functions, what hands a name on to one, and vendors' own corners."""


def foreign(source: str) -> list[str]:
    """Names, attributes and modules of one vendor's Triton; strings that explain do not count."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        words: list[str] = []
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Import):
            words = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        found += [word for word in words if any(word == name or word.startswith(f"{name}_") for name in FOREIGN)]
    return found


@pytest.mark.invariant("K2")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_triton_source_is_one_vendors(path: Path) -> None:
    assert foreign(path.read_text(encoding="utf-8")) == []


@pytest.mark.invariant("K2", control=True)
@pytest.mark.parametrize(
    "line",
    [
        "x = tl.inline_asm_elementwise('mov', '=r', [x], tl.int32, True, 1)",
        "from triton.language.extra import libdevice",
        "y = tl.extra.cuda.libdevice.exp(x)",
        "import triton.experimental.gluon",
    ],
)
def test_what_is_one_vendors_is_found(line: str) -> None:
    assert foreign(line) != []


def test_musas_triton_does_not_compile_them_here() -> None:
    """Its two names, one a release; who has one of them compiles the products by running the routes' own tests."""
    names = [name for name in ("musa", "mtgpu") if _has(f"triton.backends.{name}")]
    if not names:
        pytest.skip("not compiled here: no Triton with a backend for MUSA (musa or mtgpu) is installed")
    assert SOURCES


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
