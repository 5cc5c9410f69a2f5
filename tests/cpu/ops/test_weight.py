"""Stored weights: validation, dequantising, slices."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import ModelError
from halma.hal.workspace import Workspace
from halma.ops.quant import decode_weight
from halma.ops.weight import E2M1_VALUES, Weight, dequantise
from tests.cpu.ops.checks import same_bits


def fp8_weight(rows: int, columns: int, *lead: int, seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    data = (torch.randn(*lead, rows, columns, generator=generator) * 40).to(torch.float8_e4m3fn)
    shape = Weight.scale_shape((*lead, rows, columns), "fp8_block128")
    scale = torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return Weight(data, scale, "fp8_block128")


def fp4_weight(rows: int, columns: int, *lead: int, seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*lead, rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 140, (*lead, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return Weight(data.view(torch.int8), scale.view(torch.float8_e8m0fnu), "fp4_block32")


def by_hand(weight: Weight) -> torch.Tensor:
    """Value times scale, element by element, in Python numbers."""
    assert weight.scale is not None
    rows, columns = weight.shape
    scale = weight.scale.view(torch.uint8).tolist()
    out = torch.empty(rows, columns, dtype=torch.float64)
    if weight.format == "fp8_block128":
        data = weight.data.to(torch.float64).tolist()
        for i in range(rows):
            for j in range(columns):
                out[i, j] = data[i][j] * 2.0 ** (scale[i // 128][j // 128] - 127)
        return out
    packed = weight.data.view(torch.uint8).tolist()
    for i in range(rows):
        for j in range(columns):
            code = packed[i][j // 2] >> 4 if j % 2 else packed[i][j // 2] & 15
            out[i, j] = E2M1_VALUES[code] * 2.0 ** (scale[i][j // 32] - 127)
    return out


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight])
@pytest.mark.parametrize("rows", [3, 128, 131])
@pytest.mark.parametrize("columns", [64, 160])
def test_dequantising_and_decoding_are_value_times_scale(make, rows: int, columns: int) -> None:
    weight = make(rows, columns)
    expected = by_hand(weight)
    for dtype in (torch.float32, torch.float64):
        assert same_bits(dequantise(weight, dtype).data, expected.to(dtype))
        out = torch.empty(rows, columns, dtype=dtype)
        decode_weight(weight, out, Workspace(checked=True))
        assert same_bits(out, expected.to(dtype))


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight])
def test_a_stack_of_experts_is_its_matrices(make) -> None:
    stack = make(130, 96, 3)
    whole = dequantise(stack, torch.float32)
    assert stack.shape == (3, 130, 96)
    for index in range(3):
        assert same_bits(whole.data[index], dequantise(stack.matrix(index), torch.float32).data)
    out = torch.empty(3, 130, 96)
    decode_weight(stack, out, Workspace(checked=True))
    assert same_bits(out, whole.data)


@pytest.mark.invariant("K3", control=True)
def test_every_e2m1_code_means_its_value() -> None:
    # 16 codes twice, low nibble first; scale byte 127 is one.
    codes = torch.tensor([(2 * i) | ((2 * i + 1) << 4) for i in range(8)] * 2, dtype=torch.uint8).view(1, 16)
    scale = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = Weight(codes, scale, "fp4_block32")
    expected = torch.tensor([*E2M1_VALUES, *E2M1_VALUES]).view(1, 32)
    assert same_bits(dequantise(weight, torch.float32).data, expected)
    out = torch.empty(1, 32)
    decode_weight(weight, out, Workspace())
    assert same_bits(out, expected)


@pytest.mark.invariant("K3")
def test_scale_bytes_are_exponents_and_not_numbers() -> None:
    scale = torch.tensor([[0, 1, 127, 254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = Weight(torch.ones(1, 512).to(torch.float8_e4m3fn), scale, "fp8_block128")
    found = dequantise(weight, torch.float64).data[0, ::128]
    assert found.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


def test_row_slices_are_views_and_cut_between_blocks() -> None:
    weight = fp8_weight(300, 256)
    whole = dequantise(weight, torch.float32).data
    for start, length in ((0, 128), (128, 128), (128, 172), (256, 44)):
        part = weight.narrow_rows(start, length)
        assert part.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
        assert same_bits(dequantise(part, torch.float32).data, whole[start : start + length])
    for start, length in ((64, 128), (128, 100)):
        with pytest.raises(ModelError, match="between blocks of 128 rows"):
            weight.narrow_rows(start, length)
    small = fp4_weight(10, 64)
    expected = dequantise(small, torch.float32).data[3:7]
    assert same_bits(dequantise(small.narrow_rows(3, 4), torch.float32).data, expected)


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("scale is missing", lambda: (torch.zeros(4, 8).to(torch.float8_e4m3fn), None, "fp8_block128")),
        ("has no scale", lambda: (torch.zeros(4, 8), torch.ones(1), "plain")),
        ("expected \\[1, 2\\]", lambda: (torch.zeros(4, 200).to(torch.float8_e4m3fn), e8m0(1, 1), "fp8_block128")),
        (
            "scale is torch.float32",
            lambda: (torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.ones(1, 1), "fp8_block128"),
        ),
        ("data is torch.float32", lambda: (torch.zeros(4, 8), e8m0(1, 1), "fp8_block128")),
        ("no multiple of 32", lambda: (torch.zeros(4, 8, dtype=torch.int8), e8m0(4, 1), "fp4_block32")),
        ("unknown format", lambda: (torch.zeros(4, 8), None, "int4")),
        ("unknown activation", lambda: (torch.zeros(4, 8), None, "plain", "fp4")),
        ("1 dimensions", lambda: (torch.zeros(8),)),
        ("data is torch.int64", lambda: (torch.zeros(4, 8, dtype=torch.int64),)),
    ],
)
def test_what_does_not_fit_is_refused(fault: str, arguments) -> None:
    with pytest.raises(ModelError, match=fault):
        Weight(*arguments())


def e8m0(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_plan_keys_tell_formats_apart_and_not_identities() -> None:
    plain = Weight(torch.zeros(4, 64))
    assert plain.plan_key == Weight(torch.ones(4, 64)).plan_key
    others = [Weight(torch.zeros(4, 64), activation="fp8"), Weight(torch.zeros(4, 64).double()), fp4_weight(4, 64)]
    keys = {plain.plan_key, *(weight.plan_key for weight in others)}
    assert len(keys) == 4
    assert fp4_weight(4, 64).nbytes == 4 * 32 + 4 * 2
