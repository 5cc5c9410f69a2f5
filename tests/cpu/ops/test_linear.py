"""Products with stored weights: numbers, formats, and rows that do not feel one another."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from halma.ops import linear as family
from halma.ops.weight import Weight, dequantise
from tests.cpu.ops.checks import check_contract, poisoned, rows_are_invariant, run, same_bits
from tests.cpu.ops.test_weight import fp4_weight, fp8_weight

CARRIERS = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * scale)


def weights(rows: int, columns: int, dtype: torch.dtype) -> list[Weight]:
    quantised = [fp8_weight(rows, columns), fp4_weight(rows, columns)]
    rounding = [Weight(w.data, w.scale, w.format, "fp8") for w in quantised]
    return [Weight(random(rows, columns, seed=1, dtype=dtype)), Weight(random(rows, columns, seed=1)), *rounding]


@pytest.mark.parametrize("dtype", CARRIERS)
def test_it_is_the_matrix_product(dtype: torch.dtype) -> None:
    x = random(5, 192, dtype=dtype)
    for weight in weights(130, 192, dtype):
        source = x if weight.activation is None else run("round_activation", x)
        expected = source.double() @ dequantise(weight, torch.float64).data.t()
        close(run("linear", x, weight), expected, TOLERANCE[dtype])
        wide = run("linear", x, weight, torch.float32)
        assert wide.dtype is torch.float32
        close(wide, expected, 1e-5)
        check_contract("linear", lambda w=weight: (x.clone(), w))
        check_contract("linear", lambda w=weight: (x[:1].clone(), w))


def test_activation_rounding_is_felt() -> None:
    x, plain = random(3, 256), random(8, 256, seed=1)
    unrounded, rounded = run("linear", x, Weight(plain)), run("linear", x, Weight(plain, activation="fp8"))
    assert (unrounded - rounded).abs().max() > 1e-3 * unrounded.abs().max()


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize(("rows", "columns"), [(24, 1024), (4, 64), (33, 77), (1, 500), (256, 96), (1000, 32)])
def test_rows_do_not_feel_one_another(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = Weight(random(rows, columns, seed=1, dtype=dtype))
    rows_are_invariant(lambda x: run("linear", x, weight), random(64, columns, dtype=dtype))


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("dtype", CARRIERS)
def test_rows_do_not_feel_one_another_with_shipped_weights(dtype: torch.dtype) -> None:
    for weight in weights(130, 160, dtype)[2:]:
        rows_are_invariant(lambda x, w=weight: run("linear", x, w), random(64, 160, dtype=dtype), counts=(1, 2, 5, 17))


@pytest.mark.invariant("K7", control=True)
def test_the_check_notices_a_row_that_feels_its_neighbours() -> None:
    # A matrix product does on most machines, so the control is one that does on all.
    x = random(64, 32)
    with pytest.raises(AssertionError, match="other bits"):
        rows_are_invariant(lambda rows: rows + rows.mean(0) * 1e-6, x, poison=False)
    with pytest.raises(AssertionError, match="poisoned"):
        rows_are_invariant(lambda rows: rows + 0.0 * rows.sum(0), x.abs())


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("chosen_routes", ["reference"], indirect=True)  # the route host knows no batch kernel
def test_unequal_kernels_are_replaced_by_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = Weight(random(64, 96, seed=1)), random(64, 96)
    assert family.bmm_equals_mv(64, 96, torch.float32) in (True, False)
    calls: list[int] = []
    batched = torch.bmm

    def skewed(a: torch.Tensor, b: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        calls.append(len(a))
        return batched(a, b, **kwargs).mul_(1.0 + 2.0**-20)  # a machine whose batch kernel has other bits

    monkeypatch.setattr(torch, "bmm", skewed)
    monkeypatch.setattr(family, "_batched", {})
    rows_are_invariant(lambda rows: run("linear", rows, weight), x)
    assert calls == [2], "one trial found the kernels unequal, and the batch was never used"
    monkeypatch.setattr(family, "bmm_equals_mv", lambda *_: True)  # without the trial the rows differ
    with pytest.raises(AssertionError, match="other bits"):
        rows_are_invariant(lambda rows: run("linear", rows, weight), x)


@pytest.mark.parametrize("dtype", CARRIERS)
def test_large_weights_go_through_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_TILE_ELEMENTS", 128 * 96)
    x = random(3, 96, dtype=dtype)
    for weight in [fp8_weight(300, 96), fp4_weight(300, 96), Weight(random(300, 96, seed=1).bfloat16())]:
        expected = x.double() @ dequantise(weight, torch.float64).data.t()
        close(run("linear", x, weight), expected, TOLERANCE[dtype])
        check_contract("linear", lambda w=weight: (x.clone(), w))


@pytest.mark.parametrize("dtype", CARRIERS)
def test_grouped_product(dtype: torch.dtype) -> None:
    x = random(64, 3, 96, dtype=dtype)
    for weight in (Weight(random(3 * 128, 96, seed=1, dtype=dtype), activation="fp8"), fp8_weight(3 * 128, 96)):
        found = run("grouped_linear", x, weight)
        matrix = dequantise(weight, torch.float64).data.view(3, 128, 96)
        close(found, torch.einsum("mgk,gnk->mgn", x.double(), matrix).reshape(64, -1), TOLERANCE[dtype])
        check_contract("grouped_linear", lambda w=weight: (x[:5].clone(), w))
        rows_are_invariant(lambda rows, w=weight: run("grouped_linear", rows, w), x, counts=(1, 2, 5, 17))


def test_padding_rows_do_no_harm() -> None:
    x, weight = random(6, 64), Weight(random(16, 64, seed=1))
    alone = run("linear", x[:4], weight)
    x[4:] = poisoned((2, 64), torch.float32)
    assert same_bits(run("linear", x, weight)[:4], alone)


def test_shapes_that_do_not_contract_are_refused() -> None:
    for x, weight in ((random(2, 8), Weight(random(4, 9))), (random(2, 8), Weight(random(3, 4, 8)))):
        with pytest.raises(DispatchError, match="do not contract"):
            run("linear", x, weight)
    with pytest.raises(DispatchError, match="do not contract"):
        run("grouped_linear", random(2, 3, 8), Weight(random(4, 8)))
