"""RMS norm against its formula in fp64."""

from __future__ import annotations

import pytest
import torch

from halma.hal.workspace import Workspace
from halma.ops import norm
from tests.cpu.ops.checks import check_contract, rows_are_invariant, run

CARRIERS = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
@pytest.mark.parametrize("weighted", [True, False])
def test_it_is_the_formula(dtype: torch.dtype, tolerance: float, weighted: bool) -> None:
    x = random(7, 3, 130, dtype=dtype) * torch.tensor([1e-4, 1.0, 300.0], dtype=dtype).view(3, 1)
    weight = random(130, seed=1) if weighted else None
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if weight is not None:
        expected = expected * weight.double()
    torch.testing.assert_close(run("rms_norm", x, weight, 1e-6).double(), expected, rtol=tolerance, atol=1e-12)
    assert check_contract("rms_norm", lambda: (x.clone(), weight, 1e-6)) <= 8


def test_the_cast_comes_last() -> None:
    # 1.0039 is no bf16 number: rounding before the weight product would lose it, and 1.0039 * 256 shows it.
    x = torch.full((1, 64), 3.0).bfloat16()
    weight = torch.full((64,), 257.0)
    assert run("rms_norm", x, weight, 0.0)[0, 0].item() == torch.tensor(257.0).bfloat16().item()
    narrow = torch.tensor([[1.0, 1.0, 1.0, 2.0]]).bfloat16()
    expected = (narrow.double() / narrow.double().square().mean().sqrt() * 3.0).bfloat16()
    assert torch.equal(run("rms_norm", narrow, torch.full((4,), 3.0), 0.0), expected)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("width", [13, 128, 1024])
def test_rows_do_not_feel_one_another(width: int, dtype: torch.dtype) -> None:
    weight = random(width, seed=1)
    rows_are_invariant(lambda x: run("rms_norm", x, weight, 1e-6), random(64, width, dtype=dtype))


@pytest.mark.invariant("K7")
def test_a_lone_long_row_is_summed_like_many() -> None:
    # torch.sum splits one row of 32,768 or more over threads; see the control.
    # The norm itself is compared: a last bit of it is mostly lost in the quotient.
    def scales(x: torch.Tensor) -> torch.Tensor:
        return norm.inverse_rms(x, 1e-6, Workspace()).clone()

    rows_are_invariant(scales, random(17, 40_000), counts=(1, 2, 17), poison=False)


@pytest.mark.invariant("K7", control=True)
def test_a_lone_long_row_would_be_split_by_sum() -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one thread splits nothing")
    with pytest.raises(AssertionError, match="other bits"):
        rows_are_invariant(lambda x: x.square().sum(1), random(64, 40_000), counts=(64,), poison=False)
