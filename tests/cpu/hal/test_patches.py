"""A replaced part of torch is found and reported (B9)."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from halma.hal import registry as registry_module
from halma.hal.patches import replaced_modules
from halma.hal.registry import Registry
from tests.cpu.hal.plugins import entry


@pytest.fixture
def torch_like(tmp_path: Path) -> dict[str, object]:
    """A package with the submodules ``cuda`` and ``nn``, loaded as it was shipped."""
    modules: dict[str, object] = {}
    root = _module("torch", tmp_path / "torch" / "__init__.py")
    modules["torch"] = root
    for child in ("cuda", "nn"):
        modules[f"torch.{child}"] = _module(f"torch.{child}", tmp_path / "torch" / child / "__init__.py")
        setattr(root, child, modules[f"torch.{child}"])
    return modules


def _module(name: str, file: Path | None) -> ModuleType:
    module = ModuleType(name)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        module.__file__ = str(file)
    return module


class StandIn(ModuleType):
    """Answers for whatever it is asked, like a compatibility layer's wrapper."""

    def __getattr__(self, name: str) -> object:
        return getattr(sys, name)


@pytest.mark.torchfree
@pytest.mark.invariant("B9")
@pytest.mark.parametrize("where", ["sys.modules", "attribute"])
@pytest.mark.parametrize("what", ["module", "wrapper", "object"])
def test_a_stand_in_is_found(torch_like: dict[str, object], tmp_path: Path, where: str, what: str) -> None:
    elsewhere = tmp_path / "compatibility.py"
    stand_in: object = {
        "module": _module("torch.cuda", elsewhere),
        "wrapper": StandIn("torch.cuda"),
        "object": object(),
    }[what]
    if where == "attribute":
        setattr(torch_like["torch"], "cuda", stand_in)  # noqa: B010  (a type checker knows better)
    else:
        torch_like["torch.cuda"] = stand_in
    (found,) = replaced_modules(torch_like)
    assert found.startswith("torch.cuda is a ")
    assert ("compatibility.py" in found) == (what == "module")


@pytest.mark.torchfree
@pytest.mark.invariant("B9", control=True)
def test_the_package_as_shipped_and_a_device_familys_addition_are_left_alone(
    torch_like: dict[str, object], tmp_path: Path
) -> None:
    torch_like["torch.musa"] = _module("torch_musa", tmp_path / "torch_musa" / "__init__.py")
    torch_like["torch._private"] = object()
    assert replaced_modules(torch_like) == ()
    assert replaced_modules({}) == ()


@pytest.mark.invariant("B9", control=True)
def test_torch_itself_is_not_reported() -> None:
    code = (
        "import torch, torch.distributed, torch.utils.data\nfrom halma.hal.patches import *\nprint(replaced_modules())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "()"


@pytest.mark.torchfree
@pytest.mark.invariant("B9")
def test_selecting_a_backend_says_that_torch_was_patched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry_module, "replaced_modules", lambda: ("torch.cuda is a thing",))
    with caplog.at_level(logging.WARNING, logger="halma"):
        Registry([entry("x")]).select()
    assert caplog.messages == ["torch was patched: torch.cuda is a thing; what it answers may be of another device"]
