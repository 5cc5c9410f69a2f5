"""How the CPU backend names what a capture froze; that it is found at all is shown in the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halma.hal.graph.baked import BakedValue, baked_values
from tests.cpu.backend.captured import ToyDecode, capture

KEYS = torch.randn(16, 8)
ROWS = torch.arange(16)


def number_baked(length: int) -> torch.Tensor:
    return KEYS.sum(1) * length


def view_baked(length: int) -> torch.Tensor:
    return KEYS[length : length + 4].sum(0)


def write_baked(length: int) -> None:
    KEYS[ROWS[:2], 0] = float(length)


def branch_baked(length: int) -> torch.Tensor:
    return KEYS.sum(0) if length > 4 else KEYS.mean(0)


def loop_baked(length: int) -> torch.Tensor:
    total = KEYS[0] * 1.0
    for _ in range(length):
        total = total + KEYS[1]
    return total


def shape_baked(length: int) -> torch.Tensor:
    return torch.zeros(length) + 1


def both(backend, program: Callable[[int], object]) -> list[BakedValue]:
    """What differs between captures with the lengths 3 and 5."""
    nodes = []
    for length in (3, 5):
        nodes.append(capture(backend, lambda n=length: program(n)).nodes())
    return baked_values(*nodes)


@pytest.mark.parametrize(
    ("program", "node", "parameter"),
    [
        (number_baked, "aten.mul.out", "other"),
        (view_baked, "aten.sum.IntList_out", "self"),
        (write_baked, "aten.fill_.Scalar", "value"),
        (branch_baked, "aten.mean.out", "node"),
        (shape_baked, "aten.zeros.out", "size"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_baked_value_is_named_by_node_argument_and_line(backend, program, node, parameter):
    found = both(backend, program)
    assert (found[0].name, found[0].parameter) == (node, parameter)
    line = program.__code__.co_firstlineno + 1
    assert f"test_baked.py:{line}" in found[0].where and f"test_baked.py:{line}" in str(found[0])


@pytest.mark.invariant("G11")
def test_work_that_only_one_capture_has_is_found(backend):
    program = ToyDecode(batch=2)
    short, long = capture(backend, lambda: KEYS + 1), capture(backend, lambda: (KEYS + 1).relu() * 2)
    plain = [[node for node in graph.nodes() if node.name != "poison"] for graph in (short, long)]
    (extra,) = baked_values(*plain)
    assert (extra.parameter, extra.first, extra.second) == ("node", None, "aten.relu.out")
    (extra,) = baked_values(*reversed(plain))
    assert (extra.first, extra.second) == ("aten.relu.out", None)
    assert program.tokens.shape == (2, program.WIDTH)
    assert both(backend, loop_baked)


@pytest.mark.invariant("G11", control=True)
def test_a_whole_decoder_with_other_data_in_other_tensors_bakes_nothing(backend):
    captures = []
    for seed in (1, 2):
        toy = ToyDecode()
        toy.refresh(seed)
        captures.append(capture(backend, toy.step).nodes())
    assert len(captures[0]) > 200 and baked_values(*captures) == []


def test_memory_swapped_between_two_captures_is_a_difference(backend):
    a, b = torch.ones(4), torch.ones(4)
    first = capture(backend, lambda: torch.add(a, b, out=a)).nodes()
    second = capture(backend, lambda: torch.add(a, b, out=b)).nodes()
    assert [(d.parameter, d.name) for d in baked_values(first, second)] == [("out", "aten.add.out")]
