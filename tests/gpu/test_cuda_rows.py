"""The portable kernels of small products, SwiGLU and the rotation on CUDA: beside the references, and replayed.

CUDA does not offer these routes (nobody has measured them there); the test does, in this process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.backends.simt.gemv_tiles import TILES
from halma.backends.simt.row_routes import OPS, register_for
from halma.backends.simt.rows import kernels_of
from halma.hal.backend import Backend
from halma.hal.dispatch import Ops, OpTable, table
from halma.hal.testing.conformance.capturing import captured, planned
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP8_BLOCK128, Weight


def ops_of(backend: Backend, route: str, workspace: Workspace | None = None) -> Ops:
    own = OpTable()
    own.ops = {name: replace(spec, routes=[]) for name, spec in table.ops.items()}
    register_for("cuda", own.add_route)
    workspace = workspace or Workspace(backend.device.torch_device, checked=True)
    return Ops(workspace, backend="cuda", routes=dict.fromkeys(OPS, route), ops=own)


def weight_of(n: int, k: int, device: torch.device, activation: str | None) -> Weight:
    random = torch.Generator().manual_seed(n + k)
    codes = (torch.randn(n, k, generator=random) / 4).to(torch.float8_e4m3fn).to(device)
    scale = torch.randint(118, 124, (-(-n // 128), k // 128), generator=random, dtype=torch.uint8).to(device)
    return Weight(codes, scale.view(torch.float8_e8m0fnu), FP8_BLOCK128, activation)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("activation", [None, "fp8"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 4096), (8, 1000, 1024), (64, 4096, 512)])
def test_products_beside_the_reference(backend: Backend, m: int, n: int, k: int, activation: Any, dtype: Any) -> None:
    device = backend.device.torch_device
    weight = weight_of(n, k, device, activation)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(device)
    found = ops_of(backend, "simt").linear(x, weight, dtype)
    assert off(found, ops_of(backend, "reference").linear(x, weight, dtype)) < (1e-4 if dtype else 1e-2)


@pytest.mark.parametrize("tile", TILES)
def test_every_tile(backend: Backend, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halma.backends.simt.rows.tile_of", lambda *_: (tile, "the test"))
    device = backend.device.torch_device
    weight, x = weight_of(1024, 4096, device, None), torch.randn(11, 4096).bfloat16().to(device)
    found = ops_of(backend, "simt").linear(x, weight, torch.float32)
    assert off(found, ops_of(backend, "reference").linear(x, weight, torch.float32)) < 1e-4


def test_groups_swiglu_and_the_rotation(backend: Backend) -> None:
    device = backend.device.torch_device
    mine, theirs = ops_of(backend, "simt"), ops_of(backend, "reference")
    weight, x = weight_of(8 * 1024, 4096, device, "fp8"), torch.randn(4, 8, 4096).bfloat16().to(device)
    assert off(mine.grouped_linear(x, weight), theirs.grouped_linear(x, weight)) < 1e-2
    both = (8 * torch.randn(5, 2 * 2048)).bfloat16().to(device)
    assert off(mine.swiglu(both, 10.0), theirs.swiglu(both, 10.0)) < 8e-3
    rows, angle = torch.randn(4, 64, 512).bfloat16().to(device), torch.randn(4, 32, device=device)
    angles, other = torch.stack([angle.cos(), angle.sin()], -1), rows.clone()
    mine.rope(rows, angles, True)
    theirs.rope(other, angles, True)
    assert off(rows, other) < 8e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "inner"), [(1, 256), (5, 2048), (64, 256), (4100, 2048)])
def test_codes_of_swiglu_are_those_of_its_result_rounded(backend: Backend, m: int, inner: int, dtype: Any) -> None:
    device, mine = backend.device.torch_device, ops_of(backend, "simt")
    both = (8 * torch.randn(m, 2 * inner, generator=torch.Generator().manual_seed(m))).to(dtype).to(device)
    both[:, 128:256] *= 2.0**-9  # groups have scales of their own
    codes, scales = mine.swiglu_fp8(both, 10.0)
    assert scales.shape == (m, inner // 128) and scales.is_contiguous()
    wanted, powers = ops_of(backend, "reference").swiglu_fp8(both, 10.0)
    # A value that lies on an edge between two codes, or between two powers, may go either way with another exponential.
    assert float((scales != powers).float().mean()) < 1e-2
    alike = (scales == powers).repeat_interleave(128, 1)
    far = (codes.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(2**-6)
    assert float(far[alike].max()) <= 2**-3 and float((far[alike] > 0).float().mean()) < 0.02
    if dtype is torch.bfloat16:
        active, apart = mine.swiglu(both, 10.0), torch.empty(m, inner, dtype=dtype, device=device)
        kernels_of("cuda").quantised(active, apart)()
        together = (codes.float().view(m, -1, 128) * scales.unsqueeze(-1)).view(m, inner).to(dtype)
        assert torch.equal(together, apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 256), (11, 1000, 2048), (64, 4096, 256)])
def test_two_launches_of_the_shared_experts_way_down_give_the_bits_of_three(
    backend: Backend, m: int, n: int, k: int, dtype: Any
) -> None:
    device, mine = backend.device.torch_device, ops_of(backend, "simt")
    weight = weight_of(n, k, device, "fp8")
    both = (8 * torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(n))).bfloat16().to(device)
    both[:, 128:256] *= 2.0**-9
    both[0, 0] = float("nan")
    found = mine.linear_fp8(*mine.swiglu_fp8(both, 10.0), weight, dtype)
    apart = mine.linear(mine.swiglu(both, 10.0), weight, dtype)
    assert torch.equal(found.isnan(), apart.isnan()) and bool(found[0].isnan().all())
    assert torch.equal(found.nan_to_num(0.0), apart.nan_to_num(0.0))
    theirs = ops_of(backend, "reference").linear_fp8(*mine.swiglu_fp8(both, 10.0), weight, dtype)
    if m > 1:
        assert off(found[1:], theirs[1:]) < (1e-4 if dtype is torch.float32 else 1e-2)


def test_a_replayed_pair_reads_what_is_there_now(backend: Backend) -> None:
    device = backend.device.torch_device
    weight, both = weight_of(512, 256, device, "fp8"), torch.zeros(2, 512, dtype=torch.bfloat16, device=device)
    out = torch.empty(2, 512, dtype=torch.bfloat16, device=device)

    def program(workspace: Workspace) -> None:
        mine = ops_of(backend, "simt", workspace)
        mine.linear_fp8(*mine.swiglu_fp8(both, 10.0), weight, torch.bfloat16, out=out)

    graph = captured(backend, program, planned(backend, program))
    for seed in (1, 2):
        both.copy_(torch.randn(2, 512, generator=torch.Generator().manual_seed(seed)).bfloat16())
        graph.replay()
        backend.device.synchronize()
        mine = ops_of(backend, "simt")
        assert torch.equal(out, mine.linear(mine.swiglu(both, 10.0), weight))


def test_a_replayed_product_reads_what_is_there_now(backend: Backend) -> None:
    device = backend.device.torch_device
    weight, x = weight_of(512, 1024, device, "fp8"), torch.zeros(2, 1024, dtype=torch.bfloat16, device=device)
    out = torch.empty(2, 512, dtype=torch.bfloat16, device=device)

    def program(workspace: Workspace) -> None:
        ops_of(backend, "simt", workspace).linear(x, weight, out=out)

    graph = captured(backend, program, planned(backend, program))
    for seed in (1, 2):
        x.copy_(torch.randn(2, 1024, generator=torch.Generator().manual_seed(seed)).bfloat16())
        graph.replay()
        backend.device.synchronize()
        assert off(out, ops_of(backend, "reference").linear(x, weight)) < 1e-2
