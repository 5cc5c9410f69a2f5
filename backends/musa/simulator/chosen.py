"""Which engine stands behind the stand-in in this process: chosen once, before the stand-in's modules are imported."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_musac: ModuleType | None = None


def choose(names: dict[str, Any]) -> ModuleType:
    """Make ``torch_musa._MUSAC`` of these names."""
    global _musac
    if _musac is None:
        _musac = ModuleType("torch_musa._MUSAC", "a stand-in; see halma.backends.musa.simulator")
        vars(_musac).update(names)
    return _musac


def musac() -> Any:
    """``torch_musa._MUSAC`` of this process.

    Raises:
        RuntimeError: none was chosen.
    """
    if _musac is None:
        raise RuntimeError("no simulator is installed in this process")
    return _musac
