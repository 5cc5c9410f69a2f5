"""The poison harness finds routes that read what is not real, and lets honest ones pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halma.hal.dispatch import OpTable, RouteSpec, like
from halma.hal.testing.admission import admit
from halma.hal.testing.examples import OpExample
from halma.hal.testing.poison import FILLS, Failed, Fill, FilledWorkspace, check_real_rows, same_bits
from halma.hal.workspace import Workspace
from tests.cpu.hal.test_admission import BACKEND, draw

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.name)
def test_a_fill_fits_any_dtype_and_touches_nothing_else(fill: Fill, dtype: torch.dtype) -> None:
    memory = torch.zeros(4, 6, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    filled = fill(memory[1:3])
    assert filled.data_ptr() == memory[1:3].data_ptr()
    assert not memory[[0, 3]].contiguous().view(torch.uint8).any()
    if dtype.is_floating_point:
        wide = memory[1:3].to(torch.float64)
        expected = {"nan": wide.isnan().all(), "huge": (wide.abs() > 100).all(), "zero": True}
        assert expected.get(fill.name, True)
    if fill.name == "stale":
        assert len(memory[1:3].contiguous().view(torch.uint8).unique()) > 1 or dtype is torch.bool


def rows_with_padding(fill: Fill) -> torch.Tensor:
    x = torch.arange(24, dtype=torch.float32).view(6, 4)
    fill(x[4:])
    return x


BAD: dict[str, Callable[[torch.Tensor, Fill], list[torch.Tensor]]] = {
    "one scale for all rows": lambda x, _: [(x / x.abs().max())[:4]],
    "adds zero times the padding": lambda x, _: [x[:4] + 0 * x[4:].sum()],
    "takes the last row": lambda x, _: [torch.cat([x[:3], x[-1:]])],
    "fewer results where it is NaN": lambda x, _: [x[:4]] * (1 if x.isnan().any() else 2),
}


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("name", BAD)
def test_work_that_reads_padding_is_found(name: str) -> None:
    with pytest.raises(Failed, match="beside"):
        check_real_rows(rows_with_padding, BAD[name])


@pytest.mark.invariant("F3")
def test_wrong_but_finite_results_are_found_beside_stale_values_alone() -> None:
    def leaks_ordinary_numbers(x: torch.Tensor, _: Fill) -> list[torch.Tensor]:
        behind = x[4:]
        return [x[:4] + (behind.mean() if behind.abs().max() < 1e6 else 0)]

    with pytest.raises(Failed, match="'stale'"):
        check_real_rows(rows_with_padding, leaks_ordinary_numbers)


@pytest.mark.invariant("F3", control=True)
def test_work_that_reads_its_own_rows_passes() -> None:
    assert check_real_rows(rows_with_padding, lambda x, _: [(x * 2)[:4]]) == len(FILLS) - 1


@pytest.mark.invariant("F3")
def test_without_a_real_result_nothing_is_proved() -> None:
    with pytest.raises(Failed, match="proves nothing"):
        check_real_rows(rows_with_padding, lambda x, _: [x[:0]])


@pytest.mark.invariant("F3")
def test_stale_scratch_is_found() -> None:
    def run(x: torch.Tensor, fill: Fill) -> list[torch.Tensor]:
        scratch = FilledWorkspace("cpu", fill).take((6, 4), torch.float32)
        scratch[:3].copy_(x[:3])  # one row too few
        return [scratch[:4].clone()]

    with pytest.raises(Failed, match="1 of 4 rows, the first is 3"):
        check_real_rows(rows_with_padding, run)


def table(padded: bool) -> OpTable:
    made = OpTable()

    @made.define("round_rows", out=lambda x: like(x), padded=padded)
    def round_rows(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        top = ws.take((x.shape[0], 1), x.dtype)
        torch.amax(torch.abs(x, out=out), 1, keepdim=True, out=top)
        torch.div(x, top, out=out)

    return made


def over_a_warp(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """Scales by the larger of two neighbours, as a maximum over a warp that spans two rows does."""
    top = x.abs().amax(1, keepdim=True)
    pairs = top.view(-1, 2).amax(1).repeat_interleave(2).unsqueeze(1)
    top = torch.where(torch.isfinite(pairs) & (pairs < 1e6), top, pairs)
    torch.div(x, top, out=out)


EXAMPLE = OpExample(
    "round_rows",
    "pairs",
    lambda seed, n: (draw(seed, n, 8),),
    by_row=(0,),
    rows=(2, 6),
    scales=(),
    padding=lambda arguments, real, payload: None,
)


@pytest.mark.invariant("F3")
def test_a_strangers_route_that_reads_padding_is_not_admitted() -> None:
    route = RouteSpec("round_rows", "warp", lambda: over_a_warp, origin="a stranger")
    report = admit("round_rows", route, BACKEND, examples=[EXAMPLE], ops=table(padded=True))
    failed = {check.name: check.reason for check in report.checks if not check.passed}
    assert "has other bits beside" in failed["poison"]


@pytest.mark.invariant("F3", control=True)
def test_the_reference_is_admitted_and_an_op_without_padding_is_not_poisoned() -> None:
    example = dataclasses.replace(EXAMPLE, padding=None)
    report = admit("round_rows", "reference", BACKEND, examples=[example], ops=table(padded=True))
    assert report.admitted, report.reason
    poison = {check.name: check for check in report.checks}["poison"]
    assert poison.runs == len(FILLS) - 1
    plain: Any = admit("round_rows", "reference", BACKEND, examples=[example], ops=table(padded=False))
    assert "poison" not in {check.name for check in plain.checks}


@pytest.mark.invariant("F3")
def test_a_padded_op_whose_examples_have_nothing_to_poison_admits_nobody() -> None:
    bare = dataclasses.replace(EXAMPLE, by_row=())
    report = admit("round_rows", "reference", BACKEND, examples=[bare], ops=table(padded=True))
    assert not report.admitted
    assert "has padding to poison" in report.reason


def test_bits_are_compared_not_values() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
