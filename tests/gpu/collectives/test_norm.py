"""All-reduce, residual and RMSNorm in one call: values, the same bits from every algorithm, fp8 output (C1, K3)."""

from __future__ import annotations

import pytest
import torch

from halma.backends.simt import sources
from halma.hal.backend import KernelSource
from halma.hal.collectives.contract import Call, Choice, Kind, Operands
from halma.hal.errors import CollectiveError
from tests.gpu.collectives.lab import (
    ONE_SHOT_SENTINEL,
    ONE_SHOT_WORDS,
    REDUCTIONS,
    STAGED,
    TWO_SHOT,
    Lab,
    in_rank_order,
    name_of,
    same_bits,
)

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 4096), (3, 4096), (2, 8), (5, 264), (1, 7168), (2, 16384), (40, 512))


class Problem:
    """Inputs of a fused norm on every rank; ``residual`` and ``weight`` are equal on all of them."""

    def __init__(self, lab: Lab, rows: int, columns: int, dtype: torch.dtype, *, wide: bool = False, fp8: bool = False):
        generator = torch.Generator().manual_seed(rows * columns)
        made = [torch.randn(rows, columns, generator=generator).to(dtype).to(lab.device) for _ in range(lab.size + 1)]
        self.sources, self.residual = made[:-1], made[-1]
        weight = torch.randn(columns, generator=generator)
        self.weight = weight.to(torch.float32 if wide else dtype).to(lab.device)
        self.fp8, self.rows, self.columns, self.dtype = fp8, rows, columns, dtype
        self.call = Call(
            Kind.ALL_REDUCE_NORM,
            rows * columns * self.residual.element_size(),
            str(dtype).removeprefix("torch."),
            detail=f"row {columns} eps {EPS}",
        )

    def run(self, lab: Lab, choice: Choice, *, in_place: bool = False) -> list[Operands]:
        """One call on every rank; outputs start poisoned."""
        made = []
        for source in self.sources:
            residual = self.residual.clone()
            norm_type = torch.float8_e4m3fn if self.fp8 else self.dtype
            norm = torch.empty(residual.shape, dtype=norm_type, device=lab.device)
            norm.view(torch.uint8).fill_(0x55)
            scales = torch.full((self.rows, self.columns // 128), -1.0, device=lab.device) if self.fp8 else None
            out = residual if in_place else torch.full_like(residual, 5)
            made.append(Operands(source, out, residual, self.weight, norm, scales, EPS, self.columns))
        lab.synchronize()
        lab.launch(self.call, choice, made)
        lab.synchronize()
        assert lab.errors() == [None] * lab.size
        return made

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(new residual, exact; norm in float64)."""
        h = (in_rank_order(self.sources).float() + self.residual.float()).to(self.dtype)
        wide = h.double()
        return h, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.weight.double()


def ways(problem: Problem, lab: Lab) -> list[Choice]:
    return [way for way in REDUCTIONS if way is not ONE_SHOT_WORDS or problem.call.nbytes <= lab.layout.words.largest]


@pytest.mark.invariant("C1")
@pytest.mark.parametrize("wide", (False, True), ids=("weight", "wide-weight"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_and_its_bits(labs, size: int, dtype: torch.dtype, wide: bool) -> None:
    lab: Lab = labs(size)
    for rows, columns in SHAPES:
        problem = Problem(lab, rows, columns, dtype, wide=wide)
        h, norm = problem.expected()
        first = None
        for choice in ways(problem, lab):
            for turn, made in enumerate(problem.run(lab, choice, in_place=choice is TWO_SHOT)):
                case = (rows, columns, name_of(choice), turn)
                assert same_bits(made.out, h), case
                assert made.norm_out is not None
                first = made.norm_out if first is None else first
                assert same_bits(made.norm_out, first), case
        assert first is not None
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}[dtype]
        error = (first.double() - norm).abs()
        assert bool((error <= unit * norm.abs() + 1e-7).all()), (rows, columns, float(error.max()))


@pytest.mark.invariant("C10")
def test_no_rows_keep_their_place(labs, size: int) -> None:
    """Its tensors have no address at all; the call behind it must meet the same epoch on every rank."""
    lab: Lab = labs(size)
    nothing, something = Problem(lab, 0, 96, torch.bfloat16), Problem(lab, 2, 96, torch.bfloat16)
    assert nothing.residual.data_ptr() == 0
    for choice in ways(something, lab):
        nothing.run(lab, choice)
        for made in something.run(lab, choice):
            assert same_bits(made.out, something.expected()[0]), name_of(choice)


def blocks_of_128(norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What halma.ops.quant does: power-of-two scales by the bits of amax / 448."""
    groups = norm.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1).clamp_min(1e-4) * (1.0 / 448.0)
    scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return (groups / scales.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scales


@pytest.mark.invariant("K3")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_output_is_the_norm_quantised(labs, size: int, dtype: torch.dtype) -> None:
    lab: Lab = labs(size)
    for rows, columns in ((1, 4096), (3, 128), (2, 7168), (9, 1024)):
        plain = Problem(lab, rows, columns, dtype).run(lab, ONE_SHOT_SENTINEL)[0].norm_out
        assert plain is not None
        values, scales = blocks_of_128(plain)
        problem = Problem(lab, rows, columns, dtype, fp8=True)
        for choice in ways(problem, lab):
            for made in problem.run(lab, choice):
                assert made.norm_out is not None and made.scale_out is not None
                assert torch.equal(made.scale_out, scales), (rows, columns, name_of(choice))
                assert torch.equal(made.norm_out.view(torch.uint8), values.view(torch.uint8)), name_of(choice)


def test_no_room_between_two_kernels_is_refused(labs) -> None:
    lab: Lab = labs(2)
    with pytest.raises(CollectiveError, match="no room"):
        Problem(lab, 1, 1024, torch.bfloat16, fp8=True).run(lab, STAGED, in_place=True)
    with pytest.raises(CollectiveError, match="multiple of 16 bytes"):
        Problem(lab, 2, 12, torch.bfloat16).run(lab, ONE_SHOT_WORDS)


CONVERT = """
#include "dialect.h"
extern "C" __global__ void convert(u64 from, u64 to, u64 portable, u64 count) {
  for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    float value = ((const float*)from)[i];
    ((u8*)to)[i] = (u8)to_e4m3(value);
    ((u8*)portable)[i] = (u8)portable_e4m3(value);
  }
}
"""


@pytest.mark.invariant("K3")
def test_both_conversions_to_e4m3_are_torchs(gpu) -> None:
    unit = sources.source("norm_alone", 2, sources.Target.of(gpu.kernels, gpu.capabilities))
    kernel = gpu.kernels.load(KernelSource("convert", CONVERT, unit.headers, unit.defines), ("convert",))["convert"]
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    near = torch.arange(0x3A000000, 0x44000000, 0x1FF, dtype=torch.int32).view(torch.float32)
    values = torch.cat([halves, near, -near]).to(gpu.device.torch_device)
    native, portable = (torch.zeros(values.numel(), dtype=torch.uint8, device=values.device) for _ in range(2))
    addresses = (values.data_ptr(), native.data_ptr(), portable.data_ptr(), values.numel())
    gpu.kernels.launch(kernel, 64, 256, addresses, stream=gpu.device.current_stream())
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = values.isnan()
    gpu.device.synchronize()
    assert torch.equal(native[~nan], expected[~nan]) and torch.equal(portable[~nan], expected[~nan])
    assert bool(((native[nan] & 0x7F) == 0x7F).all() and ((portable[nan] & 0x7F) == 0x7F).all())
    assert int(nan.sum()) > 0
