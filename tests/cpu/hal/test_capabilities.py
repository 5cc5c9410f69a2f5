"""Unknown capabilities are off (B8)."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields

import pytest

from halma.hal.capabilities import UNKNOWN, Capabilities, Unknown
from halma.hal.errors import CapabilityError

pytestmark = pytest.mark.torchfree


@pytest.mark.invariant("B8")
@pytest.mark.parametrize("name", [one.name for one in fields(Capabilities)])
def test_what_nobody_declared_is_off(name: str) -> None:
    value = getattr(Capabilities(), name)
    assert value is UNKNOWN and not value
    with pytest.raises(CapabilityError, match="unknown counts as off"):
        Capabilities().need(name, for_="a test")


@pytest.mark.invariant("B8")
def test_what_was_declared_absent_is_off() -> None:
    with pytest.raises(CapabilityError, match="graph_capture is False"):
        Capabilities(graph_capture=False).need("graph_capture", for_="a test")


@pytest.mark.invariant("B8", control=True)
def test_what_was_declared_is_given() -> None:
    assert Capabilities(warp_width=32).need("warp_width", for_="a test") == 32
    assert Capabilities(graph_executable_limit=None).need("graph_executable_limit", for_="a test") is None


def test_unknown_is_one_value_in_every_process_and_in_json() -> None:
    assert pickle.loads(pickle.dumps(UNKNOWN)) is UNKNOWN
    assert Unknown() is UNKNOWN
    shown = json.loads(json.dumps(Capabilities(ipc=False).as_json()))
    assert (shown["ipc"], shown["warp_width"]) == (False, "unknown")
