"""The kernels of rows.cu in the MUSA spelling, run on the host beside the references: their arithmetic alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.backends.simt import rows
from halma.backends.simt.gemv_tiles import MEASURED, MOST_ROWS, TILES, measured, tile_of
from halma.backends.simt.row_routes import OPS, register_for
from halma.hal.dispatch import Ops, OpTable, table
from halma.hal.errors import DispatchError
from halma.hal.policy import Guard
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP8_BLOCK128, Weight
from tests.cpu.simt.host_kernels import COMPILER, host_backend

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.evidence("simulated")]


@pytest.fixture(scope="module")
def kernels() -> Any:
    backend = host_backend()
    backend.kernels.clock_khz = 1_000_000
    backend.device.properties = lambda: {"arch": "mp_31", "multiprocessors": "2"}
    backend.device.current_stream = lambda: None
    made = rows._kernels["musa"] = rows.RowKernels(backend)
    yield SimpleNamespace(rows=made, part=backend.kernels)
    del rows._kernels["musa"]


def ops_of(route: str, guard: Guard | None = None, **facts: Any) -> Ops:
    own = OpTable()
    own.ops = {name: replace(spec, routes=[]) for name, spec in table.ops.items()}
    register_for("musa", own.add_route, guard)
    chosen = {} if route == "auto" else dict.fromkeys(OPS, route)
    return Ops(Workspace(), backend="musa", routes=chosen, ops=own, facts=facts)


def weight_of(n: int, k: int, random: torch.Generator, activation: str | None = None) -> Weight:
    codes = torch.randint(0, 256, (n, k), generator=random, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x3C  # no NaN
    scale = torch.randint(118, 124, (-(-n // 128), -(-k // 128)), generator=random, dtype=torch.uint8)
    return Weight(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), FP8_BLOCK128, activation)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize(
    ("m", "n", "k", "activation", "dtype"),
    [
        (1, 20, 512, None, None),
        (2, 24, 256, "fp8", None),
        (3, 130, 128, "fp8", torch.float32),
        (11, 16, 384, None, torch.float32),
    ],
)
def test_products_are_the_references(kernels: Any, m: int, n: int, k: int, activation: str | None, dtype: Any) -> None:
    random = torch.Generator().manual_seed(m * n)
    weight, x = weight_of(n, k, random, activation), torch.randn(m, k, generator=random).bfloat16()
    before = len(kernels.part.launched)
    found = ops_of("simt").linear(x, weight, dtype)
    assert len(kernels.part.launched) - before == (2 if activation else 1)
    assert found.dtype == (dtype or torch.bfloat16)
    assert off(found, ops_of("reference").linear(x, weight, dtype)) < (1e-6 if dtype else 1e-2)


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_gives_the_product(kernels: Any, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(7)
    weight, x = weight_of(36, 384, random), torch.randn(9, 384, generator=random).bfloat16()
    monkeypatch.setattr(rows, "tile_of", lambda *_: (tile, "the test"))
    found = ops_of("simt").linear(x, weight, torch.float32)
    assert kernels.part.launched[-1] == f"gemv_{tile}"
    assert off(found, ops_of("reference").linear(x, weight, torch.float32)) < 1e-6


def test_a_row_has_the_same_bits_beside_others(kernels: Any) -> None:
    random = torch.Generator().manual_seed(8)
    weight, x = weight_of(8, 256, random, "fp8"), torch.randn(11, 256, generator=random).bfloat16()
    x[3] = float("nan")
    whole = ops_of("simt").linear(x, weight, torch.float32)
    assert whole[3].isnan().all()
    for row in (0, 2, 10):
        assert torch.equal(ops_of("simt").linear(x[row : row + 1].clone(), weight, torch.float32)[0], whole[row])


def test_codes_and_scales_at_their_ends(kernels: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1).view(torch.float8_e4m3fn)
    for scale in (0, 1, 127, 240):
        weight = Weight(codes, torch.full((1, 2), scale, dtype=torch.uint8).view(torch.float8_e8m0fnu), FP8_BLOCK128)
        x = torch.zeros(4, 256, dtype=torch.bfloat16)
        x[torch.arange(4), torch.tensor([1, 8, 126, 200])] = 1.0
        x[:, [127, 255]] = 0.0
        found = ops_of("simt").linear(x, weight, torch.float32)
        assert found.isnan().all(), "nought times a code that is a NaN"
        clean = codes.clone().view(torch.uint8)
        clean[0, [127, 255]] = 0
        weight = Weight(clean.view(torch.float8_e4m3fn), weight.scale, FP8_BLOCK128)
        wanted = ops_of("reference").linear(x, weight, torch.float32)
        assert torch.equal(ops_of("simt").linear(x, weight, torch.float32), wanted)


def test_groups_go_straight_to_their_columns(kernels: Any) -> None:
    random = torch.Generator().manual_seed(9)
    weight, x = weight_of(2 * 128, 256, random, "fp8"), torch.randn(2, 2, 256, generator=random).bfloat16()
    before = len(kernels.part.launched)
    mine, theirs = ops_of("simt"), ops_of("reference")
    out = torch.full((2, 256), float("nan"), dtype=torch.bfloat16)
    assert mine.grouped_linear(x, weight, out=out) is out and len(kernels.part.launched) == before + 1
    assert off(out, theirs.grouped_linear(x, weight)) < 1e-2


def test_swiglu_and_the_rotation(kernels: Any) -> None:
    random = torch.Generator().manual_seed(10)
    both = (40 * torch.randn(5, 2 * 72, generator=random)).bfloat16()
    both[0, 0], both[1, 72], both[2, 3], both[3, 75] = float("nan"), float("nan"), -1000.0, float("inf")
    found, wanted = ops_of("simt").swiglu(both, 10.0), ops_of("reference").swiglu(both, 10.0)
    assert torch.equal(found.isnan(), wanted.isnan()) and int(found.isnan().sum()) == 2
    assert off(found.nan_to_num(0.0), wanted.nan_to_num(0.0)) < 4e-3
    for inverse in (False, True):
        x, angle = torch.randn(3, 4, 20, generator=random).bfloat16(), torch.randn(3, 6, generator=random)
        angles = torch.stack([angle.cos(), angle.sin()], -1)
        mine, theirs = x.clone(), x.clone()
        ops_of("simt").rope(mine, angles, inverse)
        ops_of("reference").rope(theirs, angles, inverse)
        assert off(mine, theirs) < 4e-3
        assert torch.equal(mine[..., :8], x[..., :8])


# -- SwiGLU with its rounding, and the product of codes ---------------------------------------------------------


def hard_rows(inner: int, dtype: torch.dtype) -> torch.Tensor:
    """gate and up of seven rows: a clamped one, one of small numbers, of nought, with a NaN, with an infinity."""
    both = 6 * torch.randn(7, 2 * inner, generator=torch.Generator().manual_seed(inner))
    both[0, 128:256] *= 2.0**-9  # its groups have scales of their own
    both[1] *= 40.0
    both[2] *= 1e-3
    both[3] = 0.0
    both[4, 5], both[5, inner + 130], both[6, 3] = float("nan"), float("inf"), float("-inf")
    return both.to(dtype)


@pytest.mark.invariant("K3")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [10.0, 0.7])
def test_codes_of_swiglu_are_those_of_its_result_rounded(kernels: Any, dtype: torch.dtype, limit: float) -> None:
    both, before = hard_rows(256, dtype), len(kernels.part.launched)
    codes, scales = ops_of("simt").swiglu_fp8(both, limit)
    assert kernels.part.launched[before:] == [f"swiglu_fp8_{str(dtype).removeprefix('torch.')}"]
    assert (codes.dtype, scales.shape) == (torch.float8_e4m3fn, (7, 2)) and scales.is_contiguous()
    if dtype is torch.bfloat16:  # the two launches that it stands for
        active, apart = ops_of("simt").swiglu(both, limit), torch.empty(7, 256, dtype=dtype)
        kernels.rows.quantised(active, apart)()
        together = (codes.float().view(7, 2, 128) * scales.unsqueeze(-1)).view(7, 256).to(dtype)
        assert torch.equal(together.view(torch.int16)[:4], apart.view(torch.int16)[:4])
        assert torch.equal(together.isnan(), apart.isnan())
        assert torch.equal(together.nan_to_num(0.0), apart.nan_to_num(0.0))
    wanted, powers = ops_of("reference").swiglu_fp8(both, limit)
    assert torch.equal(scales[:4], powers[:4])
    far = (codes.float() - wanted.float())[:4].abs() / wanted.float()[:4].abs().clamp_min(2**-6)
    assert float(far.max()) <= 2**-3 and float((far > 0).float().mean()) < 0.02, "one place of a code, seldom"
    assert codes[4].isnan().sum() == 1 and codes[6, 3].isnan().item() is True, "a NaN stays one, and is alone"


def test_the_limit_is_of_each_side_that_it_names(kernels: Any) -> None:
    """The gate is cut from above alone, up from both sides; equal to the limit is not beyond it."""
    gate = torch.tensor([11.0, 10.0, -11.0, 1.0, 1.0, 1.0]).repeat(128)[:128]
    up = torch.tensor([1.0, 1.0, 1.0, 11.0, -11.0, 10.0]).repeat(128)[:128]
    codes, scales = ops_of("simt").swiglu_fp8(torch.cat([gate, up]).unsqueeze(0).bfloat16(), 10.0)
    found = (codes.float() * scales)[0]
    assert found[0] == found[1] and found[3] == -found[4] == found[5] and found[2] != 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tile", TILES)
def test_a_product_of_codes_is_that_of_the_rounded_input(
    kernels: Any, tile: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared expert's way down: two launches give the bits of three."""
    monkeypatch.setattr(rows, "tile_of", lambda *_: (tile, "the test"))
    random = torch.Generator().manual_seed(11)
    weight, both = weight_of(36, 256, random, "fp8"), hard_rows(256, torch.bfloat16)
    mine, before = ops_of("simt"), len(kernels.part.launched)
    found = mine.linear_fp8(*mine.swiglu_fp8(both, 10.0), weight, dtype).clone()
    assert kernels.part.launched[before:] == ["swiglu_fp8_bfloat16", f"gemv_codes_{tile}"]
    before = len(kernels.part.launched)
    apart = mine.linear(mine.swiglu(both, 10.0), weight, dtype)
    assert len(kernels.part.launched) - before == 3
    assert torch.equal(found.isnan(), apart.isnan()) and found.dtype is dtype
    assert torch.equal(found.nan_to_num(0.0), apart.nan_to_num(0.0)) and bool(found[4].isnan().all())
    theirs = ops_of("reference")
    wanted = theirs.linear_fp8(*mine.swiglu_fp8(both, 10.0), weight, dtype)
    assert off(found[:4], wanted[:4]) < (1e-6 if dtype is torch.float32 else 1e-2)


def test_a_row_of_codes_has_the_same_bits_beside_others(kernels: Any) -> None:
    random = torch.Generator().manual_seed(12)
    both, weight, mine = hard_rows(256, torch.bfloat16), weight_of(8, 256, random, "fp8"), ops_of("simt")
    codes, scales = (one.clone() for one in mine.swiglu_fp8(both, 10.0))
    whole = mine.linear_fp8(codes, scales, weight, torch.float32).clone()
    for row in (0, 2, 3):
        alone = mine.swiglu_fp8(both[row : row + 1].clone(), 10.0)
        assert torch.equal(alone[0].view(torch.uint8)[0], codes.view(torch.uint8)[row])
        assert torch.equal(alone[1][0], scales[row])
        assert torch.equal(mine.linear_fp8(*alone, weight, torch.float32)[0], whole[row])


@pytest.mark.parametrize(
    ("op", "arguments", "reason"),
    [
        ("linear", (torch.zeros(1, 128), Weight(torch.zeros(4, 128))), "x is float32, it reads bfloat16"),
        ("linear", (torch.zeros(1, 128).bfloat16(), Weight(torch.zeros(4, 128))), "the weight is plain"),
        ("swiglu", (torch.zeros(1, 8), 10.0), "gate_up is float32"),
        ("swiglu_fp8", (torch.zeros(1, 256), 10.0), "gate_up is float32, it reads bfloat16 or float16"),
        ("swiglu_fp8", (torch.zeros(1, 144).half(), 10.0), "rows of 72 channels, which is no multiple of 128"),
        (
            "linear_fp8",
            (torch.zeros(1, 128), torch.zeros(1, 1), Weight(torch.zeros(4, 128), activation="fp8"), torch.float64),
            "the result is float64, it writes bfloat16 or float32",
        ),
        (
            "linear_fp8",
            (torch.zeros(1, 128), torch.zeros(1, 1), Weight(torch.zeros(4, 128), activation="fp8"), torch.float32),
            "the weight is plain",
        ),
        ("rope", (torch.zeros(1, 8), torch.zeros(1, 2, 2)), "x is float32 with float32 angles"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(op: str, arguments: tuple[Any, ...], reason: str) -> None:
    decision = ops_of("auto").explain(op, *arguments)
    assert decision.chosen == "reference" and decision.candidates[0].reason.startswith(reason)


def test_sizes_that_do_not_fit_are_refused() -> None:
    random = torch.Generator().manual_seed(1)
    weight, wide = weight_of(64, 160, random), torch.zeros(MOST_ROWS + 1, 128).bfloat16()
    reasons = [
        ops_of("auto").explain("linear", torch.zeros(1, 160).bfloat16(), weight).candidates[0].reason,
        ops_of("auto").explain("linear", wide, weight_of(64, 128, random)).candidates[0].reason,
        ops_of("auto").explain(
            "grouped_linear", wide[:1].view(1, 1, 128).expand(1, 2, 128), weight_of(64, 128, random)
        ),
    ]
    assert reasons[0] == "K = 160 is no multiple of 128" and reasons[1] == "65 rows, it is for at most 64"
    assert reasons[2].candidates[0].reason.startswith("32 rows of the weight a group")


def test_a_tensor_with_gaps_is_an_error(kernels: Any) -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)[:, :128]
    with pytest.raises(DispatchError, match="contiguous"):
        ops_of("simt").linear(x, weight_of(64, 128, torch.Generator().manual_seed(1)))


def test_measured_tiles_are_for_their_device_and_shape_alone() -> None:
    for row in MEASURED[:4]:
        for rows_, processors in ((m, p) for m in row.rows for p in row.multiprocessors):
            assert measured("mp_31", processors, row.n, row.k, rows_) is row
            assert tile_of("mp_31", processors, row.n, row.k, rows_) == (row.tile, row.source)
        assert "reported by vllm-musa" in row.source and row.tile in TILES
    wanted = ("mp_31", 56, 1024, 4096, 16)
    assert tile_of(*wanted)[0] == "32x4"
    for place, other in enumerate(("mp_22", 57, 1025, 4097, 17)):
        asked = (*wanted[:place], other, *wanted[place + 1 :])
        assert measured(*asked) is None and tile_of(*asked)[1] == "rule"
