"""Padding charged to the experts, for grouped products whose rows must sum to the padded total."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from halma.backends.simt import experts as simt
from halma.backends.triton import fitting as triton
from halma.hal.collectives.expert_rows import CHARGED, SKIPPED, takes_charged, takes_skipped
from halma.hal.dispatch import Ops
from halma.hal.errors import DispatchError
from halma.hal.routes import Call
from halma.hal.testing.poison import Fill
from halma.hal.workspace import Workspace
from tests.cpu.ops.checks import same_bits
from tests.cpu.ops.test_experts import case
from tests.cpu.ops.test_grouped import layout, routings

FITS = {
    "expert_layout": (simt.fits_layout, triton.fits_layout),
    "grouped_ffn": (simt.fits_grouped, triton.fits_grouped),
}
FILLS = ("nan", "+inf", "-inf", "huge", "stale")


@pytest.mark.invariant("F3")
@pytest.mark.invariant("F4")
@pytest.mark.parametrize("route", ["reference", "host"])
@settings(max_examples=15, deadline=None)
@given(routing=routings())
def test_charged_counts_sum_to_the_slots_and_real_slots_stay(
    route: str, routing: tuple[torch.Tensor, torch.Tensor, int, int, int]
) -> None:
    index, weights, _, offsets, slots = layout(*routing, route=route)
    found = Ops(Workspace(checked=True), routes={"expert_layout": route}).expert_layout(*routing, CHARGED)
    charged, charged_weights, counts, ends, charged_slots = found
    real = index >= 0
    assert same_bits(charged_slots, slots) and same_bits(ends[:-1], offsets[:-1])
    assert same_bits(charged[real], index[real]) and same_bits(charged_weights[real], weights[real])
    assert int(counts.sum()) == len(index) == int(ends[-1]) and bool((counts >= 0).all())
    assert same_bits(counts, ends[1:] - ends[:-1])
    assert not charged[~real].any()  # row 0: there always is one


def through_charged(args: tuple[Any, ...], alignment: int, route: str, fill: Fill | None) -> torch.Tensor:
    """A token's sums; with ``fill``, charged slots read a row and weights that hold it."""
    x, ids, weights, gate_up, down, limit = args
    ops = Ops(Workspace(checked=True), routes={"grouped_ffn": route})
    skipped = ops.expert_layout(ids, weights, 0, gate_up.shape[0], alignment)[0] < 0
    index, slot_weights, counts, offsets, slots = ops.expert_layout(
        ids, weights, 0, gate_up.shape[0], alignment, CHARGED
    )
    if fill is not None:
        x = torch.cat([x, fill(torch.empty_like(x[:1]))])
        index[skipped] = len(x) - 1
        slot_weights[skipped] = fill(slot_weights.new_empty(int(skipped.sum())))
    given_parts = ops.grouped_ffn(
        x, None, index, slot_weights, counts, offsets, gate_up, down, limit, padding=CHARGED
    )
    return ops.expert_sum(given_parts, slots).clone()


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("route", ["reference", "rows"])
@pytest.mark.parametrize("sizes", [{}, {"width": 256, "inner": 128, "activation": "fp8"}], ids=["plain", "fp8"])
def test_charged_rows_never_reach_a_real_one(route: str, sizes: dict[str, Any]) -> None:
    args = case(5, **sizes)
    args[1][3] = -1  # a token without experts: its pairs are padding too
    x, ids, weights, gate_up, down, limit = args
    ops = Ops(Workspace(checked=True), routes={"grouped_ffn": route})
    *given_layout, slots = ops.expert_layout(ids, weights, 0, gate_up.shape[0], 8)
    wanted = ops.expert_sum(ops.grouped_ffn(x, None, *given_layout, gate_up, down, limit), slots).clone()
    assert same_bits(through_charged(args, 8, route, None), wanted)
    for name in FILLS:
        assert same_bits(through_charged(args, 8, route, Fill(name)), wanted), name


@pytest.mark.invariant("F3", control=True)
def test_a_real_row_reaches_its_token() -> None:
    args = case(5)
    clean = through_charged(args, 8, "reference", None)
    args[0][2, 1] = float("nan")
    spoilt = through_charged(args, 8, "reference", None)
    assert bool(spoilt[2].isnan().any()) and same_bits(spoilt[3:], clean[3:])


def call_of(op: str, padding: str) -> Call:
    x, ids, weights, gate_up, down, limit = case(5, width=256, inner=128, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"padding": padding, "ids": ids, "weights": weights, "experts": 8}
    if op == "grouped_ffn":
        names = ("index", "slot_weights", "counts", "offsets")
        laid = dict(zip(names, layout(ids, weights, 0, 8, 1), strict=False))
        arguments |= {"rows": x, "scales": None, **laid, "gate_up": gate_up, "down": down, "limit": limit}
        arguments |= {"layer": None, "dtype": None}
    return Call(op, arguments, "any")


@pytest.mark.invariant("F3")
def test_a_route_says_which_padding_it_needs() -> None:
    """Ours walk offsets and need it skipped; one whose rows must sum to the total needs it charged."""
    for op in ("expert_layout", "grouped_ffn"):
        for fits in FITS[op]:
            assert "needs padding skipped" in (fits(call_of(op, CHARGED)) or "")
            assert "padding" not in (fits(call_of(op, SKIPPED)) or "")
        assert takes_charged(call_of(op, CHARGED)) is None and takes_skipped(call_of(op, SKIPPED)) is None
        assert "sum to the padded total" in (takes_charged(call_of(op, SKIPPED)) or "")


def test_what_cannot_be_charged_is_refused() -> None:
    ops = Ops(Workspace())
    with pytest.raises(DispatchError, match="no padding can be charged"):
        ops.expert_layout(torch.empty((0, 2), dtype=torch.int64), torch.empty((0, 2)), 0, 4, 8, CHARGED)
    with pytest.raises(DispatchError, match="no such padding"):
        ops.expert_layout(torch.zeros((1, 2), dtype=torch.int64), torch.zeros((1, 2)), 0, 4, 8, "last")
