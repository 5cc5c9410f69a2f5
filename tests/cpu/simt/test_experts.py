"""What the routes of the experts' kernels refuse, how a launch is cut, and what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halma.backends.simt import expert_sources
from halma.backends.simt.expert_routes import register_for
from halma.backends.simt.expert_sources import (
    MOST_STAGES,
    THIN,
    WIDE,
    fp4_launch,
    fp4_takes_few,
    fp4_tiling,
    tiling_of,
    why_not_sizes,
)
from halma.backends.simt.sources import Target
from halma.hal.dispatch import Ops, table
from halma.hal.errors import KernelError
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight

HOPPER = 232_448


@pytest.fixture(autouse=True, scope="module")
def _routes() -> None:
    register_for("cuda", table.add_route)


def weight(format: str, *shape: int, activation: str | None = "fp8", dtype: torch.dtype = torch.bfloat16) -> Weight:
    if format == PLAIN:
        return Weight(torch.empty(shape, dtype=dtype, device="meta"), activation=activation)
    *lead, columns = shape
    data = torch.empty(*lead, columns // 2 if format == FP4_BLOCK32 else columns, device="meta", dtype=torch.uint8)
    if format == FP8_BLOCK128:
        data = torch.empty(shape, device="meta", dtype=torch.float8_e4m3fn)
    scale = torch.empty(Weight.scale_shape(shape, format), dtype=torch.float8_e8m0fnu, device="meta")
    return Weight(data, scale, format, activation)


def refusal(
    format: str = FP4_BLOCK32,
    *,
    down: str | None = None,
    activation: str | None = "fp8",
    width: int = 4096,
    inner: int = 2048,
    experts: int = 128,
    carrier: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    route: str = "simt",
) -> str | None:
    """Why a route does not do one token's experts; None where it applies."""
    if format == PLAIN and activation == "fp8" and carrier is torch.bfloat16:
        activation = None
    args: dict[str, Any] = {
        "x": torch.empty(1, width, dtype=carrier, device="meta"),
        "ids": torch.empty(1, 6, dtype=torch.int64, device="meta"),
        "weights": torch.empty(1, 6, device="meta"),
        "gate_up": weight(format, experts, 2 * inner, width, activation=activation, dtype=dtype),
        "down": weight(down or format, experts, width, inner, activation=activation, dtype=dtype),
        "limit": 10.0,
    }
    decision = Ops(Workspace(), backend="cuda").explain("expert_ffn", **args)
    [found] = [one for one in decision.candidates if one.name == route]
    return None if found.chosen or found.reason == "applies" else found.reason


@pytest.mark.parametrize("format", [PLAIN, FP8_BLOCK128, FP4_BLOCK32])
def test_the_models_own_sizes_are_taken(format: str) -> None:
    assert refusal(format) is None
    assert refusal(format, route="simt_thin") is None and refusal(format, route="simt_wide") is None


@pytest.mark.parametrize(
    "call,said",
    (
        ({"down": FP8_BLOCK128}, "takes one format"),
        ({"activation": None}, "products take e4m3"),
        ({"width": 4096 + 128}, "D = 4224 is no multiple of 512"),
        ({"format": FP8_BLOCK128, "inner": 256}, "I = 256 is no multiple of 512"),
        ({"experts": 257}, "257 experts, its tables hold 256"),
        ({"carrier": torch.float32}, "x is float32, it reads bfloat16"),
        ({"format": PLAIN, "dtype": torch.float32}, "it multiplies bfloat16"),
        ({"format": PLAIN, "inner": 64, "route": "simt_wide"}, "not whole tiles of 256 and 128"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_the_reason(call: dict[str, Any], said: str) -> None:
    assert said in (refusal(**call) or "taken")


def test_a_route_for_another_backend_is_not_taken() -> None:
    ids = torch.empty(2, 2, dtype=torch.int64, device="meta")
    arguments = (ids, torch.empty(2, 2, device="meta"), 0, 4, 1)
    assert Ops(Workspace(), backend="cpu").explain("expert_layout", *arguments).chosen in ("host", "reference")
    assert Ops(Workspace(), backend="cuda").explain("expert_layout", *arguments).chosen == "simt"


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shared", [166_912, HOPPER])
def test_stages_fill_the_memory_of_a_block_and_no_more(bits: int, shared: int) -> None:
    for tiling in (THIN, WIDE):
        stages = tiling.stages(bits, shared)
        assert 2 <= stages <= MOST_STAGES
        assert tiling.shared_bytes(bits, stages) <= shared - 13 * 1024
        more = tiling.shared_bytes(bits, stages + 1)
        assert stages == MOST_STAGES or more > shared - 13 * 1024


def test_too_little_memory_is_an_error_with_a_way_out() -> None:
    with pytest.raises(KernelError, match="use another route"):
        THIN.stages(8, 48 * 1024)
    with pytest.raises(KernelError, match="use another route"):
        fp4_launch("up_wide", 6, 128, 4096, 48 * 1024)


def test_few_rows_an_expert_make_thin_items() -> None:
    assert tiling_of(6, 128, 4096, 2048) is THIN
    assert tiling_of(48, 128, 4096, 2048) is THIN
    assert tiling_of(64 * 6, 128, 4096, 2048) is WIDE
    assert tiling_of(64 * 6, 128, 4096, 2048 + 64) is THIN, "wide tiles hold whole blocks of 128 channels"


@pytest.mark.parametrize("shared", [101_376, 166_912, HOPPER])
@pytest.mark.parametrize("k", [512, 2048, 4096])
@pytest.mark.parametrize("entry", ["up_thin", "down_few", "up_wide", "down_wide"])
def test_fp4_tokens_fit_the_memory_of_a_block(entry: str, k: int, shared: int) -> None:
    for slots in (1, 3) if entry.endswith("few") else (1, 6, 384, 3072, 49_152):
        cut = fp4_launch(entry, slots, 128, k, shared)
        tokens = 8 * cut.room if entry.endswith("wide") else cut.room
        assert 1 <= cut.room <= (3 if entry.endswith("wide") else 4)
        assert cut.shared_bytes(k) >= tokens * k * 2
        assert cut.shared_bytes(k) + 5 * 1024 <= shared


def test_fp4_passes_grow_with_the_slots_of_an_expert() -> None:
    assert [fp4_launch("up_wide", slots, 128, 4096, HOPPER).room for slots in (48, 384, 1536, 3072)] == [1, 1, 2, 2]
    assert fp4_launch("down_wide", 3072, 128, 2048, HOPPER).room == 3, "no cache is lost"
    assert fp4_launch("up_wide", 3072, 128, 7168, HOPPER).room == 1, "as many as fit"
    assert [fp4_launch("up_thin", slots, 128, 4096, HOPPER).room for slots in (0, 1, 3, 4, 64)] == [1, 1, 3, 4, 4]
    assert [fp4_tiling(slots) for slots in (6, 64, 65)] == ["thin", "thin", "wide"]


def test_a_few_pairs_are_laid_out_by_blocks_where_all_their_tokens_fit() -> None:
    assert [fp4_launch("down_few", slots, 128, 2048, HOPPER).room for slots in (1, 6, 8)] == [1, 6, 8]
    assert fp4_takes_few(6, 6, 4096, 2048, HOPPER) and fp4_takes_few(8, 1, 4096, 2048, HOPPER)
    assert not fp4_takes_few(9, 9, 4096, 2048, HOPPER) and not fp4_takes_few(0, 6, 4096, 2048, HOPPER)
    assert not fp4_takes_few(8, 1, 16_384, 2048, HOPPER)
    with pytest.raises(KernelError, match="use another route"):
        fp4_launch("up_few", 8, 128, 16_384, HOPPER)


def test_kernels_between_the_products_ask_for_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("cuda", 32, True, 16)
    rows, products = expert_sources.rows_source(target), expert_sources.products_source(4, HOPPER, target)
    assert set(rows.carveout) == set(expert_sources.ROW_ENTRIES)
    assert set(rows.carveout.values()) == set(products.carveout.values()) == {44}
    assert fp4_launch("up_wide", 384, 128, 4096, HOPPER).shared_bytes(4096) + 6 * 1024 <= 228 * 1024 * 44 // 100
    monkeypatch.setattr(expert_sources, "FP4_CARVEOUT", None)
    assert not expert_sources.rows_source(target).carveout


@pytest.mark.parametrize("bits,width,inner", [(16, 64, 64), (8, 512, 1024), (4, 512, 1024)])
def test_whole_units_of_columns(bits: int, width: int, inner: int) -> None:
    assert why_not_sizes(bits, width, inner) is None
    assert why_not_sizes(bits, width + 32, inner) is not None and why_not_sizes(bits, width, inner + 32) is not None
