"""The fused norm on the host, against what the ops say of it."""

from __future__ import annotations

import pytest
import torch

from halma.hal.collectives.arithmetic import fused_norm
from halma.hal.collectives.contract import Operands
from halma.hal.workspace import Workspace
from halma.ops.quant import E4M3_FLOOR, E4M3_LIMIT, nearest_e4m3, scaled

SHAPES = ((1, 128), (3, 512), (7, 4096))


def normed(rows: int, columns: int, dtype: torch.dtype, *, fp8: bool) -> Operands:
    """A norm of rows whose groups differ widely in size; one is zero, one tiny."""
    generator = torch.Generator().manual_seed(columns + rows)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.logspace(-6, 2, columns // 128).repeat_interleave(128)
    x[0, :128] = 0.0
    weight = torch.randn(columns, generator=generator).to(dtype)
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn if fp8 else dtype)
    scale = torch.empty(rows, columns // 128) if fp8 else None
    residual = torch.zeros(rows, columns, dtype=dtype)
    operands = Operands(x.to(dtype), residual.clone(), residual, weight, out, scale, 1e-6, columns)
    fused_norm(operands.source, operands)
    return operands


@pytest.mark.invariant("K3")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_is_what_the_ops_round_to(shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain = normed(*shape, dtype, fp8=False).norm_out
    found = normed(*shape, dtype, fp8=True)
    assert plain is not None and found.norm_out is not None and found.scale_out is not None
    ws = Workspace()
    values, scales = scaled(plain, 128, E4M3_LIMIT, E4M3_FLOOR, ws)
    nearest_e4m3(values, ws)
    assert torch.equal(found.scale_out, scales)
    assert torch.equal(found.norm_out.float(), values)
    assert found.scale_out.log2().frac().abs().max() == 0


@pytest.mark.invariant("K3", control=True)
def test_another_rule_of_scales_has_other_bits() -> None:
    """Without the step up to a power of two the same numbers round elsewhere."""
    plain, found = normed(3, 512, torch.float32, fp8=False).norm_out, normed(3, 512, torch.float32, fp8=True)
    assert plain is not None and found.norm_out is not None and found.scale_out is not None
    groups = plain.unflatten(-1, (-1, 128))
    exact = groups.abs().amax(-1).clamp_min(E4M3_FLOOR) / E4M3_LIMIT
    values = (groups / exact.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    assert not torch.equal(found.norm_out.view(torch.uint8), values.view(torch.uint8))
    assert bool((found.scale_out >= exact).all()) and bool((found.scale_out < 2 * exact).all())


def test_a_row_of_nan_is_nan() -> None:
    rows = torch.full((1, 256), float("nan"))
    out, scale = torch.empty(1, 256, dtype=torch.float8_e4m3fn), torch.empty(1, 2)
    fused_norm(rows, Operands(rows, rows.clone(), torch.zeros(1, 256), torch.ones(256), out, scale, 1e-6, 256))
    assert bool(out.float().isnan().all()) and bool(scale.isnan().all())
