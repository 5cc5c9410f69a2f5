"""The registry of an installation, and what it says when there is none."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from halma.hal import registry as registry_module
from halma.hal.errors import PluginError
from halma.hal.plugins import BACKENDS, ROUTES, installed_entry_points
from halma.hal.registry import default_registry
from tests.cpu.hal.plugins import entry

pytestmark = pytest.mark.torchfree


def test_our_own_backends_and_routes_are_entry_points() -> None:
    assert {one.group for one in installed_entry_points()} == {BACKENDS, ROUTES}
    assert "cpu" in default_registry().names()
    assert default_registry() is default_registry()


@pytest.mark.parametrize("missing", [BACKENDS, ROUTES])
def test_without_an_installation_the_message_says_how_to_make_one(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.entry_points

    def entry_points(*, group: str) -> Any:
        return [entry("theirs", dist="stranger")] if group == missing else installed(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(registry_module, "_default", None)
    with pytest.raises(PluginError) as caught:
        default_registry()
    assert f"own entry points in the group {missing} are missing" in str(caught.value)
    assert "theirs of stranger 1.0" in str(caught.value)
    assert "pip install -e ." in str(caught.value)
