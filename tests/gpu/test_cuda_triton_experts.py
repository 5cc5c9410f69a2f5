"""The Triton routes of the experts' ops on the GPU, beside the references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halma.backends.triton import experts, fitting
from halma.backends.triton.fitting import Tiles, all_tiles
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

pytest.importorskip("triton", reason="needs the extra halma[triton]")

TRITON = "triton"
OPS = ("grouped_ffn", "expert_ffn", "expert_layout", "expert_sum")


@pytest.fixture(autouse=True, scope="module")
def _own_routes(halma_backend: Backend) -> Iterator[None]:
    """The routes, at every size: where they pay is the table's to say, not what is tested here."""
    default_registry().load_routes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FROM_ROWS", dict.fromkeys(FORMATS, 0))
        yield


class Case(ExpertCase):
    """Of sizes that Triton's kernels take; ``full``: of V4-Flash's."""

    def __init__(self, backend: Backend, format: str, tokens: int, *, alignment: int = 1, full: bool = False) -> None:
        sizes = (4096, 2048) if full else (512, 256)
        super().__init__(backend, format, tokens, sizes, seed=tokens, alignment=alignment)

    def ops(self, route: str = TRITON) -> Ops:
        return Ops(Workspace(self.device, checked=True), backend="cuda", routes=dict.fromkeys(OPS, route))

    def grouped(self, layout: Any, route: str = TRITON) -> torch.Tensor:
        return self.ops(route).grouped_ffn(self.x, None, *layout[:4], self.gate_up, self.down, LIMIT)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("tokens", [1, 64, 700, 5000])
def test_the_layout_is_that_of_the_plain_one(backend: Backend, tokens: int, alignment: int) -> None:
    check_layout(backend, TRITON, tokens, alignment)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "alignment"), [(1, 1), (9, 8), (40, 4), (150, 1), (700, 1), (1500, 16)])
def test_beside_the_reference(backend: Backend, format: str, tokens: int, alignment: int) -> None:
    case = Case(backend, format, tokens, alignment=alignment)
    wanted = case.through(case.ops("reference")).clone()
    assert off(case.through(case.ops()), wanted) < ERROR[format]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [5, 400, 900])
def test_full_size_matrices(backend: Backend, format: str, tokens: int) -> None:
    case = Case(backend, format, tokens, full=True)
    layout = case.layout()
    real = layout[0] >= 0
    wanted = case.grouped(layout, "reference")[real].clone()
    assert off(case.grouped(layout)[real], wanted) < ERROR[format]


@pytest.mark.parametrize("format", FORMATS)
def test_expert_ffn_by_its_route(backend: Backend, format: str) -> None:
    for tokens in (1, 70, 1000):
        case = Case(backend, format, tokens)
        ids = torch.rand(tokens, EXPERTS, generator=case.random).topk(3, 1).indices.to(case.device)
        args = (case.x, ids, case.weights, case.gate_up, case.down, LIMIT)
        wanted = case.ops("reference").expert_ffn(*args).clone()
        assert off(case.ops().expert_ffn(*args), wanted) < ERROR[format], tokens


@pytest.mark.parametrize("format", [FP8_BLOCK128, FP4_BLOCK32])
def test_a_rounded_payload_gives_the_bits_of_rows_rounded_here(backend: Backend, format: str) -> None:
    case = Case(backend, format, 300)
    layout = case.layout()
    real = layout[0] >= 0
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(case.device))
    rest = (*layout[:4], case.gate_up, case.down, LIMIT)
    handed = case.ops().grouped_ffn(values.to(torch.float8_e4m3fn), scales, *rest)[real]
    assert torch.equal(case.grouped(layout)[real], handed)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [30, 600])
def test_poison_outside_the_real_slots_changes_no_bit(backend: Backend, format: str, tokens: int) -> None:
    case = Case(backend, format, tokens, alignment=8)
    layout = case.layout()
    index, given, _, _, slots = layout
    real = index >= 0
    unused = torch.ones(case.x.shape[0], dtype=torch.bool, device=case.device)
    unused[index[real].long()] = False
    assert bool(unused.any()) and not bool(real.all())
    clean = case.grouped(layout)[real].clone()
    for value in (float("nan"), float("inf"), -float("inf"), 3e38):
        case.x[unused] = value
        given[~real] = value
        parts = case.grouped(layout)
        assert torch.equal(parts[real], clean), value
        parts[~real] = value
        found = case.ops().expert_sum(parts, slots)
        assert torch.equal(found, case.ops("reference").expert_sum(parts, slots)) and bool(found.isfinite().all())


@pytest.mark.invariant("F3", control=True)
def test_poison_in_a_real_row_does_show(backend: Backend) -> None:
    case = Case(backend, FP4_BLOCK32, 300)
    layout = case.layout()
    slot = int((layout[0] >= 0).nonzero()[0])
    case.x[int(layout[0][slot])] = float("nan")
    assert bool(case.grouped(layout)[slot].isnan().all())


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("half", [0, 1])
def test_a_nan_that_one_clamp_meets_stays_one(backend: Backend, half: int) -> None:
    """Of a channel whose gate, or whose up, is NaN: a minimum that drops it would give the limit."""
    case = Case(backend, PLAIN, 40)
    layout = case.layout()
    case.gate_up.data[2, half * case.inner + 5] = float("nan")
    parts = case.grouped(layout)
    first, count = int(layout[3][2]), int(layout[2][2])
    broken = torch.zeros(parts.shape[0], dtype=torch.bool, device=case.device)
    broken[first : first + count] = True
    assert count and bool(parts[broken].isnan().all())
    assert bool(parts[~broken & (layout[0] >= 0)].isfinite().all())


@pytest.mark.invariant("F3")
def test_a_nan_of_the_payload_stays_one(backend: Backend) -> None:
    case = Case(backend, FP4_BLOCK32, 40)
    layout = case.layout()
    real = layout[0] >= 0
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(case.device))
    payload = values.to(torch.float8_e4m3fn)
    row = int(layout[0][real][0])
    payload.view(torch.uint8)[row, 200] = 0x7F
    found = case.ops().grouped_ffn(payload, scales, *layout[:4], case.gate_up, case.down, LIMIT)
    assert bool(found[layout[0] == row].isnan().all())
    assert bool(found[real & (layout[0] != row)].isfinite().all())


TILINGS = [
    pytest.param(format, tiles, id=f"{format}-{tiles.slots}") for format in FORMATS for tiles in all_tiles(format)
]


@pytest.mark.invariant("F4")
@pytest.mark.parametrize(("format", "tiles"), TILINGS)
def test_every_tiling_takes_any_number_of_slots(
    backend: Backend, format: str, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles, every last tile's piece, none: beside the reference; other rows of the result stay as they were."""
    monkeypatch.setattr(experts, "tiles_for", lambda *_: tiles)
    wanted = torch.tensor([tiles.slots, 1, 2 * tiles.slots - tiles.piece, tiles.slots + 3, tiles.piece, 0])
    chosen = torch.repeat_interleave(torch.arange(EXPERTS) + FIRST, wanted)
    case = Case(backend, format, len(chosen), alignment=8)
    case.ids.fill_(-1)
    case.ids[:, 1] = chosen[torch.randperm(len(chosen), generator=case.random)].to(case.device)
    layout = case.layout()
    assert layout[2].tolist() == wanted.tolist()
    real = layout[0] >= 0
    out = torch.full((layout[0].shape[0], case.width), float("nan"), device=case.device)
    rest = (*layout[:4], case.gate_up, case.down, LIMIT)
    case.ops().grouped_ffn(case.x, None, *rest, out=out)
    assert bool(out[~real].isnan().all())
    assert off(out[real], case.grouped(layout, "reference")[real]) < ERROR[format]


@pytest.mark.invariant("F4")
@pytest.mark.parametrize("format", FORMATS)
def test_empty_experts_one_expert_and_no_token(backend: Backend, format: str) -> None:
    for tokens, expert in ((3, FIRST), (450, FIRST + EXPERTS - 1), (12, -1), (12, 0)):
        case = Case(backend, format, tokens)
        case.ids.fill_(-1)
        case.ids[:, 1] = expert
        found, wanted = case.through(case.ops()), case.through(case.ops("reference"))
        if expert < FIRST:
            assert not bool(found.any())
        else:
            assert off(found, wanted) < ERROR[format]


@pytest.mark.invariant("F1")
@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_follows_fresh_routing_bit_for_bit(backend: Backend, format: str) -> None:
    case = Case(backend, format, 333)
    out = torch.empty(case.x.shape, dtype=torch.float32, device=case.device)

    def program(workspace: Workspace) -> Any:
        return case.through(Ops(workspace, backend="cuda", routes=dict.fromkeys(OPS, TRITON)), out)

    graph = captured(backend, program, planned(backend, program))
    for step in range(40):
        case.ids.copy_(case.routing())
        if step % 5 == 0:
            case.ids[: step * 8] = FIRST + step % EXPERTS
        graph.replay()
        replayed = out.clone()
        assert torch.equal(case.through(case.ops()), replayed), step


@pytest.mark.invariant("F1")
@pytest.mark.parametrize("format", FORMATS)
def test_one_graph_serves_every_layer(backend: Backend, format: str) -> None:
    """The layer is read on the device: a replay gives the bits of that layer's own weights."""
    layers = [Case(backend, format, 200) for _ in range(3)]
    for number, case in enumerate(layers):
        case.random.manual_seed(number)
        case.gate_up, case.down = case.stack(2 * case.inner, case.width), case.stack(case.width, case.inner)
    first, layout = layers[0], layers[0].layout()
    tables = [WeightTable.of([getattr(case, name) for case in layers]) for name in ("gate_up", "down")]
    layer = torch.zeros(1, dtype=torch.int32, device=first.device)
    out = torch.zeros(layout[0].shape[0], first.width, device=first.device)

    def program(workspace: Workspace) -> Any:
        ops = Ops(workspace, backend="cuda", routes={"grouped_ffn": TRITON})
        return ops.grouped_ffn(first.x, None, *layout[:4], *tables, LIMIT, layer, out=out)

    graph = captured(backend, program, planned(backend, program))
    real = layout[0] >= 0
    for number in (2, 0, 1, 2):
        layer.fill_(number)
        graph.replay()
        layers[number].x = first.x
        assert torch.equal(out[real], layers[number].grouped(layout)[real]), number
