"""The ladder over a scripted driver. The scope's own rules are in :mod:`halma.hal.testing.conformance.test_seam`."""

from __future__ import annotations

import pytest

from halma.hal.errors import CaptureError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import GraphLadder
from halma.hal.workspace import Workspace
from tests.cpu.graph.scripted import scripted_backend


def sealed() -> Workspace:
    workspace = Workspace()
    workspace.seal()
    return workspace


BASE = Descriptor("decode", 4, 1, 256, "greedy")
NEIGHBOURS = [
    Descriptor("verify", 4, 1, 256, "greedy"),
    Descriptor("decode", 2, 1, 256, "greedy"),
    Descriptor("decode", 4, 2, 256, "greedy"),
    Descriptor("decode", 4, 1, 512, "greedy"),
    Descriptor("decode", 4, 1, 256, "sample"),
]


@pytest.mark.invariant("G15")
@pytest.mark.parametrize("other", NEIGHBOURS, ids=str)
def test_a_descriptor_that_differs_in_one_field_finds_no_graph(other):
    ladder = GraphLadder(scripted_backend(), sealed())
    ladder.capture(BASE, lambda: "out")
    assert ladder.find(other) is None
    assert list(ladder.eager_steps) == [f"no graph: {other} was not captured"]


@pytest.mark.invariant("G15", control=True)
def test_an_equal_descriptor_finds_its_graph():
    ladder = GraphLadder(scripted_backend(), sealed())
    graph = ladder.capture(BASE, lambda: "out")
    assert ladder.find(Descriptor("decode", 4, 1, 256, "greedy")) is graph and not ladder.eager_steps


def test_a_descriptor_is_captured_once():
    ladder = GraphLadder(scripted_backend(), sealed())
    ladder.capture(BASE, lambda: "out")
    with pytest.raises(CaptureError, match="captured already"):
        ladder.capture(BASE, lambda: "out")


def test_capture_needs_a_sealed_workspace():
    with pytest.raises(CaptureError, match="sealed"):
        GraphLadder(scripted_backend(), Workspace()).capture(BASE, lambda: "out")


def test_a_ladder_that_is_switched_off_says_so():
    ladder = GraphLadder(scripted_backend(), sealed(), enabled=False)
    assert ladder.find(BASE) is None and list(ladder.eager_steps) == ["capture is switched off"]


def test_a_strict_ladder_refuses_the_eager_step():
    ladder = GraphLadder(scripted_backend(), sealed(), strict=True)
    with pytest.raises(CaptureError, match="HALMA_STRICT"):
        ladder.find(BASE)
    ladder.capture(BASE, lambda: "out")
    assert ladder.find(BASE) is not None
    assert GraphLadder(scripted_backend(), sealed(), enabled=False, strict=True).find(BASE) is None
