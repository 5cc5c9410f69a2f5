"""Rotary positions against complex arithmetic in fp64."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from halma.ops import rope as _family  # noqa: F401  (defines the ops)
from tests.cpu.ops.checks import check_contract, fresh_ops, poisoned, rows_are_invariant, run, same_bits

CARRIERS = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def frequencies(pairs: int, dtype: torch.dtype) -> torch.Tensor:
    return (10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)).to(dtype)


def angles_for(positions: torch.Tensor, pairs: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return run("rope_angles", positions, frequencies(pairs, wide))


def turned(x: torch.Tensor, angles: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    x = x.clone()
    assert fresh_ops().rope(x, angles, inverse) is None
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_are_position_times_frequency(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 127, 4095, 1_000_000])
    found = run("rope_angles", positions, frequencies(8, dtype))
    angle = (positions.to(dtype).unsqueeze(1) * frequencies(8, dtype)).double()
    torch.testing.assert_close(found.double(), torch.stack([angle.cos(), angle.sin()], -1), rtol=0, atol=1e-6)
    assert torch.equal(found[0], torch.tensor([[1.0, 0.0]] * 8, dtype=dtype))
    check_contract("rope_angles", lambda: (positions.clone(), frequencies(8, dtype)))
    rows_are_invariant(lambda p: run("rope_angles", p, frequencies(32, dtype)), torch.arange(64) * 131)


@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
@pytest.mark.parametrize("shape", [(6, 128), (6, 3, 128), (6, 64), (6, 2, 64)])
@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_are_turned(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], inverse: bool) -> None:
    x, positions = random(*shape, dtype=dtype), torch.arange(6) * 17
    found = turned(x, angles_for(positions, 32, dtype), inverse)
    assert same_bits(found[..., :-64].contiguous(), x[..., :-64].contiguous()), "only the tail turns"
    theta = positions.double().unsqueeze(1) * frequencies(32, torch.float64)
    theta = (-theta if inverse else theta).view(6, *([1] * (len(shape) - 2)), 32)
    even, odd = x[..., -64::2].double(), x[..., -63::2].double()
    torch.testing.assert_close(
        found[..., -64::2].double(), even * theta.cos() - odd * theta.sin(), rtol=0, atol=tolerance * 8
    )
    torch.testing.assert_close(
        found[..., -63::2].double(), odd * theta.cos() + even * theta.sin(), rtol=0, atol=tolerance * 8
    )


@pytest.mark.parametrize("dtype", CARRIERS)
def test_inverse_undoes_it(dtype: torch.dtype) -> None:
    x, angles = random(5, 2, 96, dtype=dtype), angles_for(torch.arange(5) * 1000, 16, dtype)
    back = turned(turned(x, angles), angles, True)
    torch.testing.assert_close(back, x, rtol=0, atol=0.04 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("shape", [(64, 96), (64, 3, 80), (64, 64), (64, 3, 6)])
@pytest.mark.parametrize("inverse", [False, True])
def test_contract_and_row_invariance(dtype: torch.dtype, shape: tuple[int, ...], inverse: bool) -> None:
    x = random(*shape, dtype=dtype)
    angles = angles_for(torch.arange(64) * 131, min(shape[-1], 64) // 2, dtype)
    check_contract("rope", lambda: (x[:5].clone(), angles[:5], inverse))
    rows_are_invariant(lambda rows, turn: turned(rows, turn, inverse), x, angles)


def test_padding_rows_do_no_harm() -> None:
    x, angles = random(6, 96), angles_for(torch.arange(6), 32, torch.float32)
    alone = turned(x[:4], angles[:4])
    x[4:], angles[4:] = poisoned((2, 96), torch.float32), poisoned((2, 32, 2), torch.float32)
    assert same_bits(turned(x, angles)[:4], alone)


def test_angles_that_do_not_fit_are_refused() -> None:
    angles = angles_for(torch.arange(4), 16, torch.float32)
    for x in (random(4, 16), random(3, 64), random(4, 64, dtype=torch.float64)):
        with pytest.raises(DispatchError, match="do not fit"):
            turned(x, angles)
