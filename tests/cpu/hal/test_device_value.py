"""Values that the host must not read (G10)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halma.hal.device_value import DeviceValue, unwrap
from halma.hal.errors import HostReadError

READS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "index": lambda v: [0, 1][v],
    "range": range,
    "iteration": list,
    "equal": lambda v: v == 1,
    "unequal": lambda v: v != 1,
    "less": lambda v: v < 1,
    "less or equal": lambda v: v <= 1,
    "greater": lambda v: v > 1,
    "greater or equal": lambda v: v >= 1,
    "branch": lambda v: 1 if v else 0,
}


def value() -> DeviceValue:
    return DeviceValue(torch.tensor([1]), bound=2, name="count")


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("how", READS)
def test_a_host_read_raises_and_names_the_value(how: str) -> None:
    with pytest.raises(HostReadError, match="'count'"):
        READS[how](value())


@pytest.mark.invariant("G10", control=True)
def test_what_the_host_may_know_is_readable() -> None:
    v = value()
    assert (v.bound, v.name, tuple(v.shape)) == (2, "count", (1,))
    assert unwrap(v) is unwrap(v)
    assert v == v and v in [v] and len({v, v}) == 1
    assert "1" not in repr(v).replace("shape=(1,)", "")


@pytest.mark.parametrize("operation", [operator.add, operator.mul, operator.sub])
def test_it_has_no_arithmetic(operation: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError):
        operation(value(), 1)


@pytest.mark.parametrize("name", ["item", "tolist", "numpy", "cpu"])
def test_it_has_no_way_to_the_host(name: str) -> None:
    assert not hasattr(value(), name)


def test_torch_does_not_take_it() -> None:
    with pytest.raises(TypeError):
        torch.add(value(), 1)  # type: ignore[call-overload]


def test_unwrap_leaves_tensors_alone() -> None:
    tensor = torch.zeros(1)
    assert unwrap(tensor) is tensor
