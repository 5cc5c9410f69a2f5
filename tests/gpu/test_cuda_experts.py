"""The experts' dialect kernels on CUDA: beside the reference, under poison, in graphs with fresh routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops
from halma.hal.registry import default_registry
from halma.hal.testing.conformance.capturing import captured, planned
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.quant import scaled
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN
from halma.ops.weight_table import WeightTable
from tests.gpu.expert_cases import ERROR, EXPERTS, FIRST, FORMATS, LIMIT, ExpertCase, check_layout, off

TILINGS = ("simt_thin", "simt_wide")


@pytest.fixture(autouse=True, scope="module")
def _own_routes(halma_backend: Backend) -> None:
    default_registry().load_routes()


class Case(ExpertCase):
    """Of sizes that the dialect's kernels take."""

    def __init__(self, backend: Backend, format: str, tokens: int, *, seed: int = 0, alignment: int = 1) -> None:
        sizes = (256, 128) if format == PLAIN else (1024, 512)
        super().__init__(backend, format, tokens, sizes, seed=seed, alignment=alignment)

    def ops(self, route: str, *, checked: bool = True) -> Ops:
        chosen = {"grouped_ffn": route, "expert_layout": "simt", "expert_sum": "simt"}
        return Ops(Workspace(self.device, checked=checked), backend="cuda", routes=chosen)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("tokens", [1, 64, 700, 5000])
def test_the_layout_is_that_of_the_plain_one(backend: Backend, tokens: int, alignment: int) -> None:
    check_layout(backend, "simt", tokens, alignment)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "alignment"), [(1, 1), (2, 1), (9, 8), (40, 4), (150, 1)])
def test_beside_the_reference(backend: Backend, format: str, tiling: str, tokens: int, alignment: int) -> None:
    case = Case(backend, format, tokens, alignment=alignment)
    wanted = case.through(case.ops("reference")).clone()
    assert off(case.through(case.ops(tiling)), wanted) < ERROR[format]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_full_size_matrices(backend: Backend, format: str, tiling: str) -> None:
    case = Case(backend, format, 5)
    case.width, case.inner = 4096, 2048
    case.gate_up, case.down = case.stack(4096, 4096), case.stack(4096, 2048)
    case.x = torch.randn(5, 4096, generator=case.random).bfloat16().to(case.device)
    wanted = case.through(case.ops("reference")).clone()
    assert off(case.through(case.ops(tiling)), wanted) < ERROR[format]


@pytest.mark.parametrize("tiling", TILINGS)
def test_scales_of_a_row_that_are_far_apart(backend: Backend, tiling: str) -> None:
    """fp4: codes are multiplied by their scale relative to the row's largest, exact down to 2^-23 of it in fp16."""
    case = Case(backend, FP4_BLOCK32, 9)
    for weight, spread in ((case.gate_up, 23), (case.down, 60)):
        assert weight.scale is not None
        low = torch.randint(119 - spread, 120, weight.scale.shape, generator=case.random, dtype=torch.uint8)
        weight.scale.view(torch.uint8).copy_(low)
    wanted = case.through(case.ops("reference")).clone()
    assert off(case.through(case.ops(tiling)), wanted) < ERROR[FP4_BLOCK32]


@pytest.mark.parametrize("format", FORMATS)
def test_expert_ffn_by_its_route(backend: Backend, format: str) -> None:
    for tokens in (1, 6, 70):
        case = Case(backend, format, tokens)
        ids = torch.rand(tokens, EXPERTS, generator=case.random).topk(3, 1).indices.to(case.device)
        args = (case.x, ids, case.weights, case.gate_up, case.down, LIMIT)
        found = [
            Ops(Workspace(case.device, checked=True), backend="cuda", routes={"expert_ffn": route}).expert_ffn(*args)
            for route in ("reference", "simt", "simt_thin", "simt_wide")
        ]
        assert max(off(one, found[0]) for one in found[1:]) < ERROR[format], tokens


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", [FP8_BLOCK128, FP4_BLOCK32])
def test_a_rounded_payload_gives_the_bits_of_rows_rounded_here(backend: Backend, format: str, tiling: str) -> None:
    case = Case(backend, format, 20)
    index, given, counts, offsets, _ = case.layout()
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(case.device))
    rest = (index, given, counts, offsets, case.gate_up, case.down, LIMIT)
    own = case.ops(tiling).grouped_ffn(case.x, None, *rest)[index >= 0]
    handed = case.ops(tiling).grouped_ffn(values.to(torch.float8_e4m3fn), scales, *rest)[index >= 0]
    assert torch.equal(own, handed)


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_layer_of_a_table_is_that_layer(backend: Backend, tiling: str) -> None:
    cases = [Case(backend, FP4_BLOCK32, 9, seed=seed) for seed in range(3)]
    first = cases[0]
    tables = (WeightTable.of([c.gate_up for c in cases]), WeightTable.of([c.down for c in cases]))
    index, *rest = first.layout()[:4]
    for number, case in enumerate(cases):
        layer = torch.tensor([number], dtype=torch.int32, device=first.device)
        found = first.ops(tiling).grouped_ffn(first.x, None, index, *rest, *tables, LIMIT, layer=layer)[index >= 0]
        wanted = first.ops(tiling).grouped_ffn(first.x, None, index, *rest, case.gate_up, case.down, LIMIT)[index >= 0]
        assert torch.equal(found, wanted)


POISON = (float("nan"), float("inf"), -float("inf"), 3e38)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_poison_outside_the_real_slots_changes_no_bit(backend: Backend, format: str, tiling: str) -> None:
    case = Case(backend, format, 30, alignment=8)
    index, given, counts, offsets, slots = case.layout()
    clean = case.ops(tiling).grouped_ffn(
        case.x, None, index, given, counts, offsets, case.gate_up, case.down, LIMIT
    )[index >= 0].clone()  # fmt: skip
    unused = torch.ones(case.x.shape[0], dtype=torch.bool, device=case.device)
    unused[index[index >= 0].long()] = False
    assert bool(unused.any()) and bool((index < 0).any())
    for value in POISON:
        case.x[unused] = value
        given[index < 0] = value
        ops = case.ops(tiling)
        parts = ops.grouped_ffn(case.x, None, index, given, counts, offsets, case.gate_up, case.down, LIMIT)
        assert torch.equal(parts[index >= 0], clean), value
        parts[index < 0] = value
        found = ops.expert_sum(parts, slots)
        assert torch.equal(found, case.ops("reference").expert_sum(parts, slots)) and bool(found.isfinite().all())


@pytest.mark.invariant("F3", control=True)
@pytest.mark.parametrize("tiling", TILINGS)
def test_poison_in_a_real_row_does_show(backend: Backend, tiling: str) -> None:
    case = Case(backend, FP4_BLOCK32, 30)
    index, given, counts, offsets, _ = case.layout()
    slot = int((index >= 0).nonzero()[0])
    case.x[int(index[slot])] = float("nan")
    parts = case.ops(tiling).grouped_ffn(case.x, None, index, given, counts, offsets, case.gate_up, case.down, LIMIT)
    assert not bool(parts[slot].isfinite().any())


@pytest.mark.invariant("F4")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_empty_experts_one_expert_and_no_token(backend: Backend, format: str, tiling: str) -> None:
    for tokens, expert in ((3, FIRST), (45, FIRST + EXPERTS - 1), (12, -1), (12, 0)):
        case = Case(backend, format, tokens)
        case.ids.fill_(-1)
        case.ids[:, 1] = expert
        found, wanted = case.through(case.ops(tiling)), case.through(case.ops("reference"))
        if expert < FIRST:
            assert not bool(found.any())
        else:
            assert off(found, wanted) < ERROR[format]


@pytest.mark.invariant("F1")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_follows_fresh_routing_bit_for_bit(backend: Backend, format: str, tiling: str) -> None:
    case = Case(backend, format, 33)
    out = torch.empty(case.x.shape, dtype=torch.float32, device=case.device)

    def program(workspace: Workspace) -> Any:
        chosen = {"grouped_ffn": tiling, "expert_layout": "simt", "expert_sum": "simt"}
        return case.through(Ops(workspace, backend="cuda", routes=chosen), out)

    graph = captured(backend, program, planned(backend, program))
    eager = case.ops(tiling, checked=False)
    for step in range(60):
        case.ids.copy_(case.routing())
        if step % 5 == 0:
            case.ids[: step // 2] = FIRST + step % EXPERTS
        graph.replay()
        replayed = out.clone()
        eager.workspace.start()
        assert torch.equal(case.through(eager), replayed), step
