"""Rounding to fp8 and fp4 blocks: the golden vectors, and a search for the nearest number as the independent rule."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops import quant
from tests.cpu.ops.checks import bits, check_contract, no_allocation, poisoned, rows_are_invariant, run, same_bits

CASE = Path(__file__).parents[2] / "data" / "cases" / "tiny_v4_quant.safetensors"
CARRIERS = (torch.float32, torch.float64, torch.bfloat16)

E4M3 = sorted({v for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() if v == v})
E2M1 = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def golden(name: str) -> torch.Tensor:
    with safe_open(CASE, "pt") as file:
        return file.get_tensor(name)


def random_rows(*shape: int, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randn(*shape[:-1], 1, generator=generator) * spread)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * size


def nearest(value: float, numbers: list[float]) -> float:
    """By distance, the number with the even code among two equally near: its neighbours' distances differ then."""
    best = min(abs(value - number) for number in numbers)
    near = [number for number in numbers if abs(value - number) == best]
    # Codes of one sign are consecutive from zero, so the even one has an even index counted from zero.
    return min(near, key=lambda number: (sum(0 < abs(other) <= abs(number) for other in numbers) // 2) % 2)


def rounded_by_search(row: list[float], block: int, limit: float, floor: float, numbers: list[float]) -> list[float]:
    out: list[float] = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        largest = torch.tensor(max(floor, *(abs(v) for v in part)), dtype=torch.float32)
        mantissa, exponent = math.frexp((largest * torch.tensor(1 / limit, dtype=torch.float32)).item())
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        out += [nearest(value / scale, numbers) * scale for value in part]
    return out


@pytest.mark.invariant("K3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_vectors_bit_for_bit(dtype: torch.dtype) -> None:
    ws = Workspace(checked=True)
    x = golden("op.act128.x").to(dtype)
    assert same_bits(run("round_activation", x), golden("op.act128.y").to(dtype))
    for x_name, block, limit, floor in (
        ("op.act128", 128, quant.E4M3_LIMIT, quant.E4M3_FLOOR),
        ("op.e2m1", 32, quant.E2M1_LIMIT, quant.E2M1_FLOOR),
    ):
        _, scales = quant.scaled(golden(f"{x_name}.x").to(dtype), block, limit, floor, ws)
        assert torch.equal((scales.view(torch.int32) >> 23) - 127, golden(f"{x_name}.scale_exp"))
    x = golden("op.e2m1.x").to(dtype)
    out = torch.empty_like(x)
    quant.round_fp4_blocks(x, 32, out, ws)
    assert same_bits(out, golden("op.e2m1.y").to(dtype))
    x = golden("op.kv_row.x").to(dtype)
    out = torch.empty_like(x)
    quant.round_kv_rows(x, 64, out, ws)
    assert same_bits(out, golden("op.kv_row.y").to(dtype))
    rotated = run("hadamard", golden("op.index.x").to(dtype))
    out = torch.empty_like(rotated)
    quant.round_fp4_blocks(rotated, 32, out, ws)
    assert same_bits(out, golden("op.index.y").to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [128, 96, 200])
def test_rounding_is_the_nearest_number_of_the_block(dtype: torch.dtype, width: int) -> None:
    x = random_rows(6, width).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    x[1] = 0.0
    # Exact ties: the middle between two numbers, in a block whose scale is one.
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E4M3)], dtype=torch.float64)
    x[2] = middles[torch.arange(width) * 2 % len(middles)].to(dtype)
    x[2, ::64] = 448.0
    found = run("round_activation", x)
    for row, ours in zip(x.double().tolist(), found.double().tolist(), strict=True):
        assert ours == rounded_by_search(row, 128, 448.0, 1e-4, E4M3)
    assert torch.equal(found.signbit(), x.signbit()), "a number that rounds to zero keeps its sign"
    if width % 32:
        return
    out = torch.empty_like(x)
    quant.round_fp4_blocks(x, 32, out, Workspace())
    for row, ours in zip(x.double().tolist(), out.double().tolist(), strict=True):
        assert ours == rounded_by_search(row, 32, 6.0, 6.0 * 2.0**-126, E2M1)
    assert torch.equal(out.signbit(), x.signbit())


def test_fp64_is_rounded_through_fp32() -> None:
    # A hair above the middle of 1.0 and 1.125: fp32 drops the hair, and the tie goes down to 1.0. The published
    # code does so, and the float64 rung of the golden ladder holds only this way.
    x = torch.zeros(1, 128, dtype=torch.float64)
    x[0, 0], x[0, 1] = 448.0, 1.0625 + 1e-13
    assert run("round_activation", x)[0, 1].item() == 1.0
    rope = torch.full((1, 64), 1.0 + 2.0**-8 + 1e-13, dtype=torch.float64)
    quant.nearest_bf16(rope, Workspace())
    assert rope[0, 0].item() == 1.0


def test_bf16_carriers_round_the_same_numbers() -> None:
    x = random_rows(3, 256).bfloat16()
    assert torch.equal(run("round_activation", x), run("round_activation", x.float()).bfloat16())


def test_hadamard_is_the_sylvester_matrix() -> None:
    for width in (1, 2, 32, 128):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        x = random_rows(5, 3, width)
        expected = (x @ matrix) / math.sqrt(width)
        torch.testing.assert_close(run("hadamard", x), expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(run("hadamard", run("hadamard", x)), x, rtol=1e-13, atol=1e-13)
    with pytest.raises(DispatchError, match="power of two"):
        run("hadamard", torch.zeros(2, 96))


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("name", ["round_activation", "hadamard"])
def test_contract_and_row_invariance(name: str, dtype: torch.dtype) -> None:
    x = random_rows(64, 128).to(dtype)
    check_contract(name, lambda: (x[:5].clone(),))
    check_contract(name, lambda: (x[:6].view(2, 3, 128).clone(),))
    rows_are_invariant(lambda rows: run(name, rows), x)


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("width", [448, 80])
def test_fp8_bytes_decode_to_the_rounded_row(dtype: torch.dtype, width: int) -> None:
    x, blocks = random_rows(7, width).to(dtype), -(-width // 64)
    data, scales = torch.empty(7, width, dtype=torch.uint8), torch.empty(7, blocks, dtype=torch.uint8)
    ws, out, rounded = Workspace(checked=True), torch.empty_like(x), torch.empty_like(x)

    def both() -> None:
        ws.start()
        quant.encode_fp8_blocks(x, 64, data, scales, ws)
        quant.decode_fp8_blocks(data, scales, 64, out, ws)

    both()
    quant.round_fp8_blocks(x, 64, rounded, ws)
    assert same_bits(out, rounded)
    with no_allocation():
        both()


@pytest.mark.parametrize("dtype", CARRIERS)
def test_fp4_bytes_decode_to_the_rounded_row(dtype: torch.dtype) -> None:
    x = random_rows(7, 128).to(dtype)
    x[0, :32] = torch.tensor(E2M1 + [-0.0, 6.0] + E2M1)
    data, scales = torch.empty(7, 64, dtype=torch.uint8), torch.empty(7, 4, dtype=torch.uint8)
    ws, out, rounded = Workspace(checked=True), torch.empty_like(x), torch.empty_like(x)

    def both() -> None:
        ws.start()
        quant.encode_fp4_blocks(x, 32, data, scales, ws)
        quant.decode_fp4_blocks(data, scales, 32, out, ws)

    both()
    quant.round_fp4_blocks(x, 32, rounded, ws)
    assert same_bits(out, rounded)
    assert data[0, 0].item() == 0b1110_1111, "low nibble is the even channel: -6 is 15, -4 is 14"
    with no_allocation():
        both()


def test_poison_stays_in_its_row() -> None:
    x = random_rows(4, 128).float()
    alone = run("round_activation", x)
    x[2] = poisoned((128,), torch.float32)
    found = run("round_activation", x)
    assert torch.equal(bits(found[[0, 1, 3]]), bits(alone[[0, 1, 3]]))
    assert not found[2].isfinite().all()
