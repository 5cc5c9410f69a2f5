"""Outputs live until the next replay on their workspace, and say so in checked mode (G14)."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.device_value import DeviceValue, unwrap
from halma.hal.errors import StaleOutputError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.outputs import Generations, guard
from halma.hal.testing.conformance.capturing import F32, captured, numbers, planned
from halma.hal.workspace import Workspace


class Pair:
    """Two graphs of one program on one workspace."""

    def __init__(self, backend: Backend, *, checked: bool = True) -> None:
        self.x = numbers(backend, 4, 3)
        self.workspace = planned(backend, self.program, checked=checked)
        self.first, self.second = (captured(backend, self.program, self.workspace) for _ in range(2))

    def program(self, workspace: Workspace) -> torch.Tensor:
        return torch.add(self.x, 1.0, out=workspace.take((4, 3), F32))


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda y: y + 1,
    "read": lambda y: y.tolist(),
    "item": lambda y: float(y[0, 0]),
    "copied from": lambda y: torch.empty(4, 3, device=y.device).copy_(y),
    "view": lambda y: y[:2],
    "in a list": lambda y: torch.cat([y, y]),
    "written": lambda y: y.zero_(),
    "overload": lambda y: torch.ops.aten.mul.Tensor(y, y),
    "address": lambda y: y.data_ptr(),
    "clone": lambda y: y.clone(),
}


@pytest.mark.invariant("G14")
@pytest.mark.parametrize("use", USES)
def test_any_use_after_the_next_replay_is_refused(capturing: Backend, use: str) -> None:
    pair = Pair(capturing)
    y = pair.first.replay()
    USES[use](y)
    pair.first.replay()
    with pytest.raises(StaleOutputError, match="after a later replay") as caught:
        USES[use](y)
    assert "written by replay 1" in caught.value.found[0] and "the same graph" in caught.value.found[1]


@pytest.mark.invariant("G14")
def test_a_replay_of_another_graph_on_the_workspace_ends_it_too(capturing: Backend) -> None:
    pair = Pair(capturing)
    y = pair.first.replay()
    view = y[1]
    pair.second.replay()
    for stale in (y, view, pair.first.outputs()):
        with pytest.raises(StaleOutputError, match=r"another graph|after a later replay"):
            stale.tolist()


@pytest.mark.invariant("G14", control=True)
def test_what_is_used_in_time_cloned_or_only_looked_at_is_fine(capturing: Backend) -> None:
    pair = Pair(capturing)
    y = pair.first.replay()
    kept, total = y.clone(), y.sum()
    expected = (pair.x + 1.0).tolist()
    assert y.tolist() == expected and pair.first.outputs().tolist() == expected
    pair.x.zero_()
    assert pair.second.replay().tolist() == [[1.0] * 3] * 4
    assert type(kept) is torch.Tensor and kept.tolist() == expected and float(total) == sum(map(sum, expected))
    assert (y.shape, y.dtype, len(y), y.is_contiguous()) == ((4, 3), F32, 4, True)
    assert "stale" in repr(y)


@pytest.mark.invariant("G14", control=True)
def test_another_workspace_is_another_life(capturing: Backend) -> None:
    one, two = Pair(capturing), Pair(capturing)
    y = one.first.replay()
    two.first.replay()
    assert y.tolist() == (one.x + 1.0).tolist()


@pytest.mark.invariant("G14", control=True)
def test_without_checks_outputs_are_plain_tensors(capturing: Backend) -> None:
    pair = Pair(capturing, checked=False)
    y = pair.first.replay()
    pair.first.replay()
    assert type(y) is torch.Tensor and y.tolist() == (pair.x + 1.0).tolist()


def test_an_output_may_be_the_input_of_another_capture(capturing: Backend) -> None:
    """Graph on graph by address: the capture keeps the memory, not the guard."""
    pair = Pair(capturing)
    y = pair.first.replay()
    after: BreakableGraph = captured(capturing, lambda ws: torch.mul(y, 10.0, out=ws.take((4, 3), F32)))
    for value in (1.0, 2.0):
        pair.x.fill_(value)
        pair.first.replay()
        assert after.replay().tolist() == [[10.0 * (value + 1)] * 3] * 4


class Both(NamedTuple):
    logits: torch.Tensor
    more: dict[str, Any]


def test_every_tensor_of_a_structure_is_guarded_and_named(halma_backend: Backend) -> None:
    generations = Generations()
    lengths = DeviceValue(numbers(halma_backend, 2), bound=9, name="lengths")
    made = Both(numbers(halma_backend, 2), {"lengths": lengths, "parts": [numbers(halma_backend, 2)], "n": 3})
    given = guard(made, generations.next(made))
    assert isinstance(given, Both) and given.more["n"] == 3 and given.more["lengths"].bound == 9
    generations.next(made)
    for tensor, name in (
        (given.logits, r"output\[0\]"),
        (unwrap(given.more["lengths"]), r"output\[1\]\['lengths'\]"),
        (given.more["parts"][0], r"output\[1\]\['parts'\]\[0\]"),
    ):
        with pytest.raises(StaleOutputError, match=name):
            tensor.sum()
    assert made.logits.sum() == 1, "the tensors themselves are left alone"
