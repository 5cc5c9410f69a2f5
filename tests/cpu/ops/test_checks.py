"""The helpers of these tests notice what they are for."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.ops.checks import no_allocation, poisoned, same_bits


@pytest.mark.invariant("W1")
def test_no_allocation_accepts_views_and_out_variants() -> None:
    a, out = torch.ones(4, 4), torch.empty(4, 4)
    with no_allocation() as guard:
        torch.add(a.t(), a[0], out=out).mul_(2.0)
        out[1:].view(-1).copy_(a[1:].reshape(-1))
    assert guard.calls == 3


@pytest.mark.invariant("W1", control=True)
@pytest.mark.parametrize(
    "body", [lambda a: a + 1, lambda a: a.to(torch.float64), lambda a: -a, lambda a: a.t().reshape(-1)]
)
def test_no_allocation_notices_fresh_memory(body) -> None:
    with pytest.raises(AssertionError, match="allocations inside an op"):
        with no_allocation():
            body(_ONES)


_ONES = torch.ones(3, 2)


def test_no_allocation_notices_an_output_that_grows() -> None:
    out = torch.empty(0)
    with pytest.raises(AssertionError, match="resized"):
        with no_allocation():
            torch.add(_ONES, 1, out=out)


def test_bits_tell_zeros_and_nans_apart() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not same_bits(nan[:1], nan[1:])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_poison_is_of_every_kind(dtype: torch.dtype) -> None:
    poison = poisoned((3, 4), dtype)
    if dtype.is_floating_point:
        assert poison.isnan().any() and poison.isinf().any() and (poison == torch.finfo(dtype).max).any()
    else:
        assert set(poison.flatten().tolist()) == {-1, torch.iinfo(dtype).max, torch.iinfo(dtype).min}
