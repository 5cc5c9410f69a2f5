"""Layout by expert, the experts on their slots, and the sum of a token's slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.collectives.expert_rows import slot_capacity
from halma.hal.device_value import DeviceValue
from halma.hal.dispatch import Ops, table
from halma.hal.errors import CollectiveError, DispatchError, ModelError
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.routes import register_routes
from halma.ops.weight import Weight
from halma.ops.weight_table import WeightTable
from tests.cpu.ops.checks import no_allocation, poisoned, same_bits
from tests.cpu.ops.grouped import compare_layout
from tests.cpu.ops.test_experts import by, case

register_routes(table.add_route)

ALIGNMENTS = (1, 2, 3, 8, 16, 64, 128)


def layout(ids: torch.Tensor, weights: torch.Tensor, *how: int, route: str = "reference") -> tuple[torch.Tensor, ...]:
    ops = Ops(Workspace(checked=True), routes={"expert_layout": route})
    return tuple(tensor.clone() for tensor in ops.expert_layout(ids, weights, *how))


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """Any routing: skewed, to the last expert, to few, padding rows, other ranks' experts."""
    rows, choices = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    experts, first = draw(st.integers(1, 40)), draw(st.sampled_from((0, 1, 7, 128)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low, high = first - draw(st.integers(0, min(first, 9))), first + experts + draw(st.integers(0, 9))
    ids = generator.integers(low, high, (rows, choices))
    kind = draw(st.sampled_from(("even", "last", "one", "few")))
    if kind == "last":
        ids[:] = first + experts - 1
    elif kind == "one":
        ids[:] = first + int(generator.integers(experts))
    elif kind == "few":
        ids = first + ids % min(experts, 3)
    ids[generator.random(rows) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = -1
    weights = generator.random((rows, choices), dtype=np.float32)
    return torch.from_numpy(ids), torch.from_numpy(weights), first, experts, draw(st.sampled_from(ALIGNMENTS))


@pytest.mark.invariant("F4")
@pytest.mark.parametrize("route", ["reference", "host"])
@settings(max_examples=50, deadline=None)
@given(routing=routings())
def test_a_layout_is_that_of_the_plain_one(
    route: str, routing: tuple[torch.Tensor, torch.Tensor, int, int, int]
) -> None:
    compare_layout(layout(*routing, route=route), *routing)


@pytest.mark.invariant("F4", control=True)
def test_a_layout_of_one_ranks_own_tokens() -> None:
    routing = (torch.tensor([[0, 2], [2, 1]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]]), 0, 3, 2)
    compare_layout(layout(*routing), *routing)


@pytest.mark.nightly
def test_ten_million_routed_rows() -> None:
    """Items as a server sees them, until 10 million pairs were laid out, by both routes."""
    generator = np.random.default_rng(20261130)
    laid = turn = 0
    while laid < 10_000_000:
        experts = int(generator.choice((1, 8, 64, 128, 256)))
        rows = int(generator.integers(1, 20_000))
        skew = generator.dirichlet(np.full(2 * experts, float(generator.choice((0.05, 1.0, 100.0)))))
        ids = torch.from_numpy(generator.choice(2 * experts, (rows, 6), p=skew))
        ids[torch.from_numpy(generator.random(rows) < 0.1)] = -1
        weights = torch.from_numpy(generator.random((rows, 6), dtype=np.float32))
        routing = (ids, weights, experts // 2, experts, int(generator.integers(1, 129)))
        compare_layout(layout(*routing, route=("reference", "host")[turn % 2]), *routing)
        laid, turn = laid + ids.numel(), turn + 1


@pytest.mark.invariant("F4")
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("ids", ["last", "none", "one each"])
def test_layouts_at_the_edges(ids: str, alignment: int) -> None:
    chosen = {
        "last": torch.full((9, 3), 12),
        "none": torch.full((9, 3), -1),
        "one each": torch.arange(27).view(9, 3) % 9 + 4,
    }[ids]
    routing = (chosen, torch.rand(9, 3, generator=torch.Generator().manual_seed(1)), 4, 9, alignment)
    compare_layout(layout(*routing), *routing)


def test_the_capacity_holds_the_worst_routing_and_is_never_empty() -> None:
    assert slot_capacity(12, 8, 1) == 12
    assert slot_capacity(0, 8, 1) == 1
    assert slot_capacity(9, 9, 128) >= 9 * 128
    for wrong in ((-1, 8, 1), (4, 0, 1), (4, 8, 0)):
        with pytest.raises(CollectiveError, match="no slots"):
            slot_capacity(*wrong)


def through_slots(args: tuple[Any, ...], alignment: int, *, poison: bool = False, **more: Any) -> torch.Tensor:
    x, ids, weights, gate_up, down, limit = args
    experts = gate_up.shape[0]
    ops = Ops(Workspace(checked=True), routes={"grouped_ffn": more.pop("route", "reference")})  # or "rows"
    index, slot_weights, counts, offsets, slots = ops.expert_layout(ids, weights, 0, experts, alignment)
    if poison:
        more["out"] = poisoned((index.shape[0], x.shape[1]), weights.dtype)
    parts = ops.grouped_ffn(x, None, index, slot_weights, counts, offsets, gate_up, down, limit, **more)
    return ops.expert_sum(parts, slots).clone()


SIZES: list[dict[str, Any]] = [
    {},
    {"width": 37, "inner": 13, "k": 3},
    {"width": 256, "inner": 128, "activation": "fp8"},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
]


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())) or "plain")
@pytest.mark.parametrize("count", [1, 5, 17])
def test_the_way_through_slots_gives_the_bits_of_expert_ffn(count: int, sizes: dict[str, Any], alignment: int) -> None:
    args = case(count, **sizes)
    assert same_bits(through_slots(args, alignment), by("reference", *args))
    assert same_bits(through_slots(args, alignment, poison=True), by("reference", *args))


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("sizes", SIZES[:4], ids=lambda sizes: "-".join(map(str, sizes.values())) or "plain")
def test_rows_on_the_host_give_the_bits_of_expert_ffn_on_the_host(sizes: dict[str, Any]) -> None:
    args = case(9, **sizes)
    assert same_bits(through_slots(args, 4, route="rows", poison=True), by("rows", *args))


def test_the_references_allocate_nothing() -> None:
    x, ids, weights, gate_up, down, limit = case(5)
    index, slot_weights, counts, offsets, slots = layout(ids, weights, 0, 8, 4)
    given = (x, None, index, slot_weights, counts, offsets, gate_up, down, limit)
    parts = torch.zeros(index.shape[0], 64)
    routes = {"grouped_ffn": "reference", "expert_layout": "reference"}
    ops = Ops(Workspace(), routes=routes)
    first = ops.expert_sum(ops.grouped_ffn(*given, out=parts), slots).clone()
    ops.expert_layout(ids, weights, 0, 8, 4)
    ops.workspace.seal()
    ops.workspace.start()
    with no_allocation():
        second = ops.expert_sum(ops.grouped_ffn(*given, out=parts), slots)
        ops.expert_layout(ids, weights, 0, 8, 4)
    assert same_bits(first, second)


@pytest.mark.invariant("F3", control=True)
@pytest.mark.parametrize("route", ["reference", "rows"])
def test_what_lies_in_a_real_slot_does_show(route: str) -> None:
    args = case(3)
    clean = through_slots(args, 8, route=route).clone()
    args[0][1, 5] += 1
    other = through_slots(args, 8, route=route)
    assert same_bits(clean[::2], other[::2])
    assert not same_bits(clean[1], other[1])


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("route", ["reference", "rows"])
def test_rows_without_a_slot_come_out_as_zeros_and_slots_that_are_not_real_are_left_alone(route: str) -> None:
    x, ids, weights, gate_up, down, limit = case(6)
    ids[4:] = -1
    x[4:] = float("nan")
    found = through_slots((x, ids, weights, gate_up, down, limit), 8, poison=True, route=route)
    wanted = by(route, x[:4], ids[:4], weights[:4], gate_up, down, limit)
    assert same_bits(found[:4], wanted)
    assert not found[4:].any()

    index, slot_weights, counts, offsets, _ = layout(ids, weights, 0, 8, 8)
    given_out = poisoned((index.shape[0], 64), torch.float32)
    before = given_out.clone()
    Ops(Workspace(), routes={"grouped_ffn": route}).grouped_ffn(
        x, None, index, slot_weights, counts, offsets, gate_up, down, limit, out=given_out
    )
    gaps = index < 0
    assert same_bits(given_out[gaps], before[gaps])
    assert given_out[~gaps].isfinite().all()


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("route", ["reference", "rows"])
def test_an_index_beside_the_real_slots_is_not_read(route: str) -> None:
    args = case(3)
    x, ids, weights, gate_up, down, limit = args
    index, slot_weights, counts, offsets, slots = layout(ids, weights, 0, 8, 16)
    gaps = index < 0
    wild = index.clone()
    wild[gaps] = torch.iinfo(torch.int32).max
    slot_weights[gaps] = float("nan")
    ops = Ops(Workspace(), routes={"grouped_ffn": route})
    parts = ops.grouped_ffn(x, None, wild, slot_weights, counts, offsets, gate_up, down, limit)
    assert same_bits(ops.expert_sum(parts, slots), by(route, *args))


def test_a_payload_in_fp8_is_not_rounded_again() -> None:
    x, ids, weights, gate_up, down, limit = case(5, width=200, inner=128, activation="fp8")
    ops = Ops(Workspace())
    blocks = torch.cat([x, x.new_zeros(5, 56)], 1).view(5, 2, 128)
    scales = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(2).clamp_min(1e-4) / 448.0))
    payload = (blocks / scales.unsqueeze(2)).view(5, 256)[:, :200].to(torch.float8_e4m3fn)
    index, slot_weights, counts, offsets, slots = ops.expert_layout(ids, weights, 0, 8, 1)
    parts = ops.grouped_ffn(payload, scales, index, slot_weights, counts, offsets, gate_up, down, limit)
    assert same_bits(ops.expert_sum(parts, slots), by("reference", x, ids, weights, gate_up, down, limit))


def quantised(kind: str, layer: int, experts: int = 4, inner: int = 64, width: int = 128) -> tuple[Weight, Weight]:
    generator = torch.Generator().manual_seed(layer)

    def make(rows: int, columns: int) -> Weight:
        if kind == "plain":
            return Weight(torch.randn(experts, rows, columns, generator=generator) * 0.2)
        if kind == "fp4_block32":
            data = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
        else:
            data = torch.randn(experts, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        shape = Weight.scale_shape((experts, rows, columns), kind)
        scale = torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator)
        return Weight(data, scale.view(torch.float8_e8m0fnu), kind, "fp8")

    return make(2 * inner, width), make(width, inner)


@pytest.mark.parametrize("kind", ["plain", "fp8_block128", "fp4_block32"])
def test_a_table_of_layers_gives_the_chosen_layers_bits(kind: str) -> None:
    layers = [quantised(kind, layer) for layer in range(3)]
    first, second = (WeightTable.of(part) for part in zip(*layers, strict=True))
    x, ids, weights, *_ = case(5, width=128, experts=4, k=2)
    for layer, own in enumerate(layers):
        chosen = DeviceValue(torch.tensor([layer], dtype=torch.int32), bound=3)
        found = through_slots((x, ids, weights, first, second, 1.0), 4, layer=chosen)
        assert same_bits(found, through_slots((x, ids, weights, *own, 1.0), 4))


@pytest.mark.invariant("F2")
def test_tables_and_shapes_that_do_not_fit_are_refused() -> None:
    x, ids, weights, gate_up, down, limit = case(3)
    index, slot_weights, counts, offsets, _ = layout(ids, weights, 0, 8, 1)
    ops = Ops(Workspace())
    good = (x, None, index, slot_weights, counts, offsets, gate_up, down, limit)
    with pytest.raises(DispatchError, match="0 tables of weights with a layer"):
        ops.grouped_ffn(*good, layer=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(DispatchError, match="2 tables of weights without a layer"):
        ops.grouped_ffn(*good[:6], WeightTable.of([gate_up]), WeightTable.of([down]), limit)
    with pytest.raises(DispatchError, match="7 counts"):
        ops.grouped_ffn(*good[:4], counts[:7], *good[5:])
    with pytest.raises(DispatchError, match="without scales"):
        ops.grouped_ffn(x.to(torch.float8_e4m3fn), *good[1:])
    with pytest.raises(ModelError, match="layer 1 has"):
        WeightTable.of([gate_up, down])
    with pytest.raises(ModelError, match="at least one layer"):
        WeightTable.of([])
