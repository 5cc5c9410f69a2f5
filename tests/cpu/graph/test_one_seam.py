"""Nothing but the capture scope begins a capture, whatever captures: read from syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).parents[3]
DRIVER_VERBS = {"begin", "end", "abandon", "instantiate"}
SEAM = {"hal/graph/scope.py", "hal/graph/executables.py", "hal/testing/conformance/recording.py"}
SEAM |= {"backends/torch_device/trials.py"}
"""The scope, the two proxies that stand in front of a driver, and a driver's trials of itself, made before anybody
has it."""
SCOPES = {"hal/graph/capturing.py", "hal/testing/"}
"""Who opens a scope: the session's one stage, and the shipped suite."""


def calls(source: str) -> list[tuple[int, str]]:
    """(line, what) of everything that would begin or end a capture without the seam, or open a scope."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in DRIVER_VERBS and "graphs" in ast.unparse(called.value):
            found.append((node.lineno, f"graphs.{called.attr}"))
        if (called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")) == "GraphCaptureScope":
            found.append((node.lineno, "GraphCaptureScope"))
    return found


def test_only_the_scope_drives_a_capture_and_only_the_session_opens_a_scope() -> None:
    wrong: list[str] = []
    for folder in ("hal", "ops", "models", "backends", "src/halma/cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for line, what in calls(path.read_text(encoding="utf-8")):
                allowed = SCOPES if what == "GraphCaptureScope" else SEAM
                if not name.startswith(tuple(allowed)):
                    wrong.append(f"{name}:{line}: {what}")
    assert wrong == []


@pytest.mark.parametrize(
    "source", ["backend.graphs.begin(stream, ws)", "self._graphs.end(s)", "with GraphCaptureScope(g, w): pass"]
)
def test_the_search_finds_one(source: str) -> None:
    assert calls(source)
