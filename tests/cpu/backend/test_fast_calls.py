"""Whatever binding is used at replay, the very overload that was recorded runs, with its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halma.backends.cpu.fast_calls import bind
from halma.backends.cpu.op_rules import find_out_variant

aten = torch.ops.aten
X, Y, OUT, INDEX = torch.ones(3, 3), torch.ones(3, 3), torch.zeros(3, 3), torch.tensor([0, 2, 1])
TOP = (torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64))

FAST = [
    (aten.add.out, (X, Y), {"out": OUT}),
    (aten.add.out, (X, Y), {"alpha": 2, "out": OUT}),
    (aten.mul_.Tensor, (X, Y), {}),
    (aten.copy_.default, (OUT, X), {}),
    (aten.index_select.out, (X, 0, INDEX), {"out": OUT}),
    (aten.topk.values, (X, 2), {"values": TOP[0], "indices": TOP[1]}),
    (aten.index_put_.default, (X, [INDEX], Y), {}),
    (aten.sum.IntList_out, (X, [0]), {"out": OUT[0]}),
]
NOT_FAST = [  # the obvious binding leads elsewhere
    (aten.add_.Scalar, (X, 1), {}),
    (aten.mul.Scalar_out, (X, 2.0), {"out": OUT}),
    (aten.clone.out, (X,), {"out": OUT}),
]


class Arrivals(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("func", "args", "kwargs"), FAST + NOT_FAST, ids=lambda v: str(v) if "aten" in str(v) else "")
def test_the_overload_itself_arrives(func, args, kwargs):
    call = bind(func, args, kwargs)
    with Arrivals() as arrivals:
        call()
    ((reached, its_args, its_kwargs),) = arrivals.seen
    assert reached is func and its_kwargs.keys() == kwargs.keys()
    for given, found in zip([*args, *kwargs.values()], [*its_args, *its_kwargs.values()], strict=True):
        if isinstance(given, torch.Tensor):
            assert found is given
        elif not isinstance(given, list):
            assert found == given and type(found) is type(given)


@pytest.mark.parametrize(("func", "args", "kwargs"), FAST, ids=lambda v: str(v) if "aten" in str(v) else "")
def test_common_ops_have_a_fast_binding(func, args, kwargs):
    assert bind(func, args, kwargs).func.__name__ == func._schema.name.removeprefix("aten::")


@pytest.mark.parametrize(
    ("func", "variant"),
    [
        (aten.add.Tensor, aten.add.out),
        (aten.add.Scalar, aten.add.Scalar_out),
        (aten.rand.default, aten.rand.out),
        (aten.topk.default, aten.topk.values),
        (aten.sum.dim_IntList, aten.sum.IntList_out),
        (aten.zeros_like.default, aten.zeros_like.out),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, None),
        (aten._unsafe_index.Tensor, None),
    ],
    ids=str,
)
def test_the_out_variant_with_the_same_arguments_is_found(func, variant):
    assert find_out_variant(func) is variant
