"""The experts' kernels for many rows on CUDA: the smallest item, then beside the reference, under poison, in graphs.

The first tests are for whoever changes the kernels: one expert, one pass, weights or tokens that name their own place,
so that a wrong layout says which column or row it took instead.
"""

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
from halma.ops.weight import FP4_BLOCK32, Weight
from halma.ops.weight_table import WeightTable
from tests.gpu.expert_cases import off

CHOICES, LIMIT = 2, 2.0
ROUTES = ("simt_many_64", "simt_many_128", "simt_many_256")
ERROR = 2e-3
"""Root mean square against the reference, relative: products are exact and sums differ by their order, which may move
an input of w2 across a step of e4m3 (2^-4 of it, a few in ten thousand)."""
ONE = 2
"""The e2m1 code of 1."""


@pytest.fixture(autouse=True, scope="module")
def _own_routes(halma_backend: Backend) -> None:
    default_registry().load_routes()
    if halma_backend.device.properties()["arch"] != "sm_90":
        pytest.skip("products of warp groups are sm_90a's own")


def packed(codes: torch.Tensor, scale: torch.Tensor, device: torch.device) -> Weight:
    """codes [E, N, K] and e8m0 [E, N, K/32], both uint8."""
    data = codes[..., 0::2] | codes[..., 1::2] << 4
    return Weight(data.contiguous().to(device), scale.to(device).view(torch.float8_e8m0fnu), FP4_BLOCK32, "fp8")


class Case:
    """One layer's weights and tokens of this rank's experts, on the device; ``expert``: all tokens go there alone."""

    def __init__(
        self,
        backend: Backend,
        tokens: int,
        *,
        experts: int = 3,
        width: int = 256,
        inner: int = 256,
        alignment: int = 1,
        seed: int = 0,
        expert: int | None = None,
    ) -> None:
        self.device, self.experts, self.alignment = backend.device.torch_device, experts, alignment
        self.random = torch.Generator().manual_seed(seed)
        self.gate_up, self.down = self.stack(2 * inner, width), self.stack(width, inner)
        self.x = torch.randn(tokens, width, generator=self.random).bfloat16().to(self.device)
        self.weights = (torch.rand(tokens, CHOICES, generator=self.random) + 0.1).to(self.device)
        self.ids = self.routing().to(self.device)
        if expert is not None:
            self.ids.fill_(-1)
            self.ids[:, 0] = expert

    def routing(self) -> torch.Tensor:
        ids = torch.rand(self.x.shape[0], self.experts + 2, generator=self.random).topk(CHOICES, 1).indices
        ids[self.x.shape[0] // 2] = -1
        return ids

    def stack(self, rows: int, columns: int) -> Weight:
        codes = torch.randint(0, 16, (self.experts, rows, columns), generator=self.random).to(torch.uint8)
        scale = torch.randint(120, 124, (self.experts, rows, columns // 32), generator=self.random).to(torch.uint8)
        return packed(codes, scale, self.device)

    def ops(self, route: str, *, checked: bool = True) -> Ops:
        return Ops(Workspace(self.device, checked=checked), backend="cuda", routes={"grouped_ffn": route})

    def layout(self) -> list[torch.Tensor]:
        ops = Ops(Workspace(self.device), backend="cuda", routes={"expert_layout": "reference"})
        return [one.clone() for one in ops.expert_layout(self.ids, self.weights, 0, self.experts, self.alignment)]

    def parts(self, ops: Ops, layout: list[torch.Tensor], **more: Any) -> torch.Tensor:
        return ops.grouped_ffn(self.x, None, *layout[:4], self.gate_up, self.down, LIMIT, **more)

    def compare(self, route: str, **more: Any) -> float:
        layout = self.layout()
        real = layout[0] >= 0
        found = self.parts(self.ops(route), layout, **more)[real].clone()
        return off(found, self.parts(self.ops("reference"), layout)[real])


def one_launch(case: Case, way: str, weight: Weight, x: torch.Tensor, inner: int) -> torch.Tensor:
    """Tokens staged and one product, all of expert 0 -> [tokens, inner] fp32."""
    from halma.backends.simt.many_experts import kernels_of
    from halma.backends.simt.many_sources import SIZES, staged_bytes

    kernels, tokens = kernels_of("cuda"), x.shape[0]
    counts = torch.tensor([tokens], dtype=torch.int32, device=case.device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=case.device)
    index = torch.arange(tokens, dtype=torch.int32, device=case.device)
    staged = torch.zeros(staged_bytes(tokens, 1, x.shape[1]), dtype=torch.uint8, device=case.device)
    out = torch.full((tokens, inner), float("nan"), device=case.device)
    kernels.staged(SIZES[0], x, None, index, None, counts, offsets, staged)()
    kernels.product(way, SIZES[0], weight, None, staged, counts, offsets, out, LIMIT)()
    return out


def test_down_of_the_smallest_item_takes_every_column_once(backend: Backend) -> None:
    case = Case(backend, 1, experts=1)
    columns = 128
    codes = (torch.eye(columns) * ONE).to(torch.uint8).unsqueeze(0)
    weight = packed(codes, torch.full((1, columns, columns // 32), 127, dtype=torch.uint8), case.device)
    place = torch.arange(columns, device=case.device)
    token = torch.arange(8, device=case.device).unsqueeze(1)
    x = ((1 + place % 8 / 8) * torch.exp2(place // 8 + token - 8.0)).bfloat16()
    wanted = Ops(Workspace(case.device), backend="cuda").round_activation(x.float())
    found = one_launch(case, "down", weight, x, columns)
    assert torch.equal(found, wanted), (found != wanted).nonzero()[:8]


@pytest.mark.parametrize("block", range(4))
def test_scales_belong_to_their_row_and_columns(backend: Backend, block: int) -> None:
    case = Case(backend, 1, experts=1)
    codes = torch.full((1, 128, 256), ONE, dtype=torch.uint8)
    scale = torch.zeros(1, 128, 8, dtype=torch.uint8)  # 2^-127: nothing
    scale[0, :, block] = 110 + torch.arange(128) % 24
    weight = packed(codes, scale, case.device)
    x = torch.ones(16, 256, dtype=torch.bfloat16, device=case.device)
    found = one_launch(case, "down", weight, x, 128)
    wanted = (32 * torch.exp2(scale[0, :, block].float() - 127)).expand(16, 128).to(case.device)
    assert torch.equal(found, wanted)


def test_every_code_and_token_is_multiplied_exactly(backend: Backend) -> None:
    case = Case(backend, 1, experts=1)
    weight = packed(
        torch.randint(0, 16, (1, 256, 128), generator=case.random).to(torch.uint8),
        torch.full((1, 256, 4), 127, dtype=torch.uint8),
        case.device,
    )
    x = torch.randint(-8, 9, (200, 128), generator=case.random).bfloat16().to(case.device)
    found = one_launch(case, "down", weight, x, 256)
    decoded = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=case.device)
    codes = torch.stack((weight.data[0] & 15, weight.data[0] >> 4), -1).flatten(-2)
    assert torch.equal(found, (x.double() @ decoded[codes.long()].double().T).float())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 63, 64, 65, 129, 200, 257, 600])
def test_every_size_of_an_item(backend: Backend, route: str, tokens: int) -> None:
    assert Case(backend, tokens, expert=1).compare(route) < ERROR


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("width", "inner"), [(256, 512), (1024, 256), (4096, 2048)])
def test_sizes_of_experts(backend: Backend, route: str, width: int, inner: int) -> None:
    for alignment in (1, 16):
        assert Case(backend, 90, width=width, inner=inner, alignment=alignment).compare(route) < ERROR


@pytest.mark.parametrize("route", ROUTES)
def test_more_items_than_blocks(backend: Backend, route: str) -> None:
    assert Case(backend, 2000, experts=40, width=512, inner=512).compare(route) < ERROR


def test_bf16_results(backend: Backend) -> None:
    assert Case(backend, 300).compare("simt_many_256", dtype=torch.bfloat16) < 4e-3


@pytest.mark.parametrize("route", ROUTES)
def test_a_rounded_payload_gives_the_bits_of_rows_rounded_here(backend: Backend, route: str) -> None:
    case = Case(backend, 100, width=1024)
    layout = case.layout()
    real = layout[0] >= 0
    own = case.parts(case.ops(route), layout)[real].clone()
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(case.device))
    handed = case.ops(route).grouped_ffn(
        values.to(torch.float8_e4m3fn), scales, *layout[:4], case.gate_up, case.down, LIMIT
    )[real]  # fmt: skip
    assert torch.equal(own, handed)


@pytest.mark.parametrize("route", ROUTES)
def test_a_layer_of_a_table_is_that_layer(backend: Backend, route: str) -> None:
    cases = [Case(backend, 90, seed=seed) for seed in range(3)]
    first = cases[0]
    tables = (WeightTable.of([c.gate_up for c in cases]), WeightTable.of([c.down for c in cases]))
    lists = first.layout()[:4]
    real = lists[0] >= 0
    for number, case in enumerate(cases):
        layer = torch.tensor([number], dtype=torch.int32, device=first.device)
        found = first.ops(route).grouped_ffn(first.x, None, *lists, *tables, LIMIT, layer=layer)[real].clone()
        wanted = first.ops(route).grouped_ffn(first.x, None, *lists, case.gate_up, case.down, LIMIT)[real]
        assert torch.equal(found, wanted)


POISON = (float("nan"), float("inf"), -float("inf"), 3e38)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("route", ROUTES)
def test_poison_outside_the_real_slots_changes_no_bit(backend: Backend, route: str) -> None:
    case = Case(backend, 130, alignment=16)
    layout = case.layout()
    real = layout[0] >= 0
    clean = case.parts(case.ops(route), layout)[real].clone()
    unused = torch.ones(case.x.shape[0], dtype=torch.bool, device=case.device)
    unused[layout[0][real].long()] = False
    assert bool(unused.any()) and not bool(real.all())
    for value in POISON:
        case.x[unused] = value
        layout[1][~real] = value
        out = torch.full((layout[0].numel(), case.x.shape[1]), value, device=case.device)
        case.parts(case.ops(route), layout, out=out)
        assert torch.equal(out[real], clean), value
        untouched = torch.full_like(out[~real], value)
        assert torch.equal(out[~real].view(torch.int32), untouched.view(torch.int32)), value


@pytest.mark.invariant("F3", control=True)
@pytest.mark.parametrize("route", ROUTES)
def test_poison_in_a_real_row_shows_there_alone(backend: Backend, route: str) -> None:
    case = Case(backend, 130)
    layout = case.layout()
    real = layout[0] >= 0
    clean = case.parts(case.ops(route), layout).clone()
    slot = int(real.nonzero()[3])
    case.x[int(layout[0][slot])] = float("nan")
    parts = case.parts(case.ops(route), layout)
    hit = layout[0] == layout[0][slot]
    assert not bool(parts[hit].isfinite().any())
    assert torch.equal(parts[real & ~hit], clean[real & ~hit])


@pytest.mark.invariant("F4")
@pytest.mark.parametrize("route", ROUTES)
def test_no_token_at_all(backend: Backend, route: str) -> None:
    case = Case(backend, 70, expert=-1)
    out = torch.full((case.ids.numel(), case.x.shape[1]), 7.0, device=case.device)
    case.parts(case.ops(route), case.layout(), out=out)
    assert bool((out == 7.0).all())


@pytest.mark.invariant("F1")
@pytest.mark.parametrize("route", ROUTES)
def test_a_graph_follows_fresh_routing_bit_for_bit(backend: Backend, route: str) -> None:
    case = Case(backend, 150)
    out = torch.empty(case.x.shape, dtype=torch.float32, device=case.device)
    chosen = {"grouped_ffn": route, "expert_layout": "simt", "expert_sum": "simt"}

    def through(ops: Ops, to: torch.Tensor | None = None) -> torch.Tensor:
        index, given, counts, offsets, slots = ops.expert_layout(case.ids, case.weights, 0, case.experts, 1)
        return ops.expert_sum(case.parts(ops, [index, given, counts, offsets]), slots, out=to)

    def program(workspace: Workspace) -> Any:
        return through(Ops(workspace, backend="cuda", routes=chosen), out)

    graph = captured(backend, program, planned(backend, program))
    eager = Ops(Workspace(case.device), backend="cuda", routes=chosen)
    for step in range(40):
        case.ids.copy_(case.routing())
        if step % 5 == 0:
            case.ids[: 3 * step] = step % case.experts
        graph.replay()
        replayed = out.clone()
        eager.workspace.start()
        assert torch.equal(through(eager), replayed), step
