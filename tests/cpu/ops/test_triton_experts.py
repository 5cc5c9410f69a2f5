"""The Triton routes of the experts' ops in Triton's interpreter, beside the references (K5)."""

# pyright: reportCallIssue=false

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.accelerator.is_available():  # read when triton is imported; a process with a device compiles instead
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="needs the extra halma[triton]")

from halma.backends.triton import experts as routes
from halma.backends.triton import fitting
from halma.backends.triton.fitting import Tiles, all_tiles, fits_ffn, fits_grouped, tiles_for
from halma.hal.dispatch import Call, Ops
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.quant import scaled
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight
from halma.ops.weight_table import WeightTable
from tests.cpu.ops.grouped import compare_layout

if not routes.INTERPRETED:
    pytest.skip("Triton compiles for a device in this process", allow_module_level=True)

EXPERTS, WIDTH, INNER, LIMIT = 5, 256, 128, 2.0
FORMATS = (PLAIN, FP8_BLOCK128, FP4_BLOCK32)
ERROR = {PLAIN: 8e-3, FP8_BLOCK128: 1e-6, FP4_BLOCK32: 1e-6}
"""Root mean square against the reference, relative. bf16: the input of w2 is cut to bf16, and in ``expert_ffn`` what
comes out too (2^-8 at most: the interpreter does not round). The others multiply exactly; the order of sums differs."""


def stack(format: str, rows: int, columns: int, random: torch.Generator) -> Weight:
    shape = (EXPERTS, rows, columns)
    if format == PLAIN:
        return Weight((torch.randn(shape, generator=random) * columns**-0.5).bfloat16())
    low = 127 - {FP8_BLOCK128: 12, FP4_BLOCK32: 7}[format]
    scale = torch.randint(low, low + 4, Weight.scale_shape(shape, format), generator=random)
    scales = scale.to(torch.uint8).view(torch.float8_e8m0fnu)
    if format == FP8_BLOCK128:
        codes = torch.randint(0, 254, shape, generator=random)
        return Weight((codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn), scales, format, "fp8")
    data = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=random).to(torch.uint8)
    return Weight(data, scales, format, "fp8")


class Case:
    """One layer's weights and tokens, all experts here."""

    def __init__(self, format: str, tokens: int, *, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.gate_up = stack(format, 2 * INNER, WIDTH, random)
        self.down = stack(format, WIDTH, INNER, random)
        self.x = torch.randn(tokens, WIDTH, generator=random).bfloat16()
        self.ids = torch.rand(tokens, EXPERTS, generator=random).topk(3, 1).indices
        self.weights = torch.rand(tokens, 3, generator=random) + 0.1

    def grouped(self, layout: Any, x: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Through the Triton route; slots that are not real hold NaN before and after."""
        out = torch.full((layout[0].shape[0], WIDTH), float("nan"))
        x = self.x if x is None else x
        launch = routes.grouped_ffn(
            x, scales, *layout[:4], self.gate_up, self.down, LIMIT, out=out, ws=Workspace(torch.device("cpu"))
        )
        launch()
        return out


def reference() -> Ops:
    return Ops(Workspace(torch.device("cpu")))


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative root mean square; infinite where anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - wanted.double()).square().mean().sqrt() / wanted.double().square().mean().sqrt())


@pytest.mark.invariant("K5")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_expert_ffn_beside_the_reference(format: str, tokens: int) -> None:
    case = Case(format, tokens)
    args = (case.x, case.ids, case.weights, case.gate_up, case.down, LIMIT)
    wanted = reference().expert_ffn(*args)
    found = torch.full_like(wanted, float("nan"))
    routes.expert_ffn(*args, out=found, ws=Workspace(torch.device("cpu")))()
    assert off(found, wanted) < ERROR[format]


@pytest.mark.invariant("K5")
@pytest.mark.parametrize(("first", "experts", "alignment"), [(0, 8, 1), (4, 3, 8), (7, 1, 1)])
def test_the_layout_is_the_plain_one(first: int, experts: int, alignment: int) -> None:
    random = torch.Generator().manual_seed(3)
    ids = torch.rand(150, 8, generator=random).topk(3, 1).indices
    ids[17], weights = -1, torch.rand(150, 3, generator=random)
    found = tuple(t.clone() for t in reference().expert_layout(ids, weights, first, experts, alignment))
    for one in found:
        one.fill_(77)
    routes.expert_layout(ids, weights, first, experts, alignment, out=found, ws=Workspace(torch.device("cpu")))()
    compare_layout(found, ids, weights, first, experts, alignment)


@pytest.mark.invariant("K5")
def test_the_sum_is_the_references_to_the_bit() -> None:
    case = Case(FP4_BLOCK32, 30)
    case.ids[4] = -1
    index, _, _, _, slots = reference().expert_layout(case.ids, case.weights, 1, 3, 1)
    parts = torch.randn(index.shape[0], WIDTH, generator=torch.Generator().manual_seed(5))
    parts[index < 0] = float("nan")
    wanted = reference().expert_sum(parts, slots)
    found = torch.empty_like(wanted)
    routes.expert_sum(parts, slots, out=found, ws=Workspace(torch.device("cpu")))()
    assert torch.equal(found, wanted) and not bool(found[4].any())


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("format", FORMATS)
def test_poison_outside_the_real_slots_changes_no_bit(format: str) -> None:
    case = Case(format, 12)
    case.ids[3:5] = -1
    layout = [t.clone() for t in reference().expert_layout(case.ids, case.weights, 1, EXPERTS, 8)]
    real = layout[0] >= 0
    clean = case.grouped(layout)
    assert bool(clean[real].isfinite().all()) and bool(clean[~real].isnan().all())
    for value in (float("nan"), float("inf"), 3e38):
        case.x[3:5] = value
        layout[1][~real] = value
        assert torch.equal(case.grouped(layout)[real], clean[real]), value


@pytest.mark.invariant("F3", control=True)
def test_poison_in_a_real_row_does_show() -> None:
    case = Case(FP4_BLOCK32, 6)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    case.x[2] = float("nan")
    found = case.grouped(layout)
    assert bool(found[layout[0] == 2].isnan().all()) and bool(found[layout[0] != 2].isfinite().all())


@pytest.mark.parametrize("format", [FP8_BLOCK128, FP4_BLOCK32])
def test_a_rounded_payload_gives_the_bits_of_rows_rounded_here(format: str) -> None:
    case = Case(format, 7)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(torch.device("cpu")))
    handed = case.grouped(layout, values.to(torch.float8_e4m3fn), scales)
    assert torch.equal(case.grouped(layout), handed)


COUNTS = (0, 1, 16, 17, 48, 49, 97)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize(
    ("format", "tiles"),
    [
        (FP4_BLOCK32, Tiles(256, 16, 16, 2, 8)),
        (FP4_BLOCK32, Tiles(256, 96, 32, 2, 8)),
        *((format, Tiles(128, 64, 16, 2, 4, 2)) for format in FORMATS),
    ],
)
def test_every_number_of_slots_left_has_its_piece(format: str, tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot gets what the reference makes of its row alone, and nothing else is written."""
    monkeypatch.setattr(routes, "tiles_for", lambda *_: tiles)
    case = Case(format, max(COUNTS))
    experts = len(COUNTS)
    case.gate_up, case.down = (
        Weight(w.data[[e % EXPERTS for e in range(experts)]] if w.scale is None else _bytes(w.data, experts),
               None if w.scale is None else _bytes(w.scale, experts), format, w.activation)
        for w in (case.gate_up, case.down)
    )  # fmt: skip
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[1:] = torch.cumsum((counts + 7) // 8 * 8, 0)
    index = torch.full((int(offsets[-1]),), -1, dtype=torch.int32)
    expert = torch.zeros_like(index)
    for number, count in enumerate(COUNTS):
        first = int(offsets[number])
        index[first : first + count] = torch.arange(count, dtype=torch.int32)
        expert[first : first + count] = number % EXPERTS
    given = torch.rand(index.shape[0], generator=torch.Generator().manual_seed(2)) + 0.1
    real = index >= 0
    given[~real] = float("nan")
    found = case.grouped([index, given, counts, offsets])
    assert bool(found[real].isfinite().all()) and bool(found[~real].isnan().all())
    wanted = _each_alone(case, index, given, expert, real)
    assert off(found[real], wanted[real]) < ERROR[format]


def _bytes(tensor: torch.Tensor, experts: int) -> torch.Tensor:
    kept = tensor.view(torch.uint8)[[expert % EXPERTS for expert in range(experts)]]
    return kept.contiguous().view(tensor.dtype)


def _each_alone(case: Case, index: Any, given: Any, expert: Any, real: torch.Tensor) -> torch.Tensor:
    """The reference's expert_ffn of every real slot's row with its one expert."""
    wanted = torch.full((index.shape[0], WIDTH), float("nan"))
    rows = case.x[index[real].long()]
    ids, weights = expert[real].long().unsqueeze(1), given[real].unsqueeze(1)
    wanted[real] = reference().expert_ffn(rows, ids, weights, case.gate_up, case.down, LIMIT)
    return wanted


@pytest.mark.invariant("F3")
def test_a_nan_that_the_clamps_meet_stays_one() -> None:
    """The sum of a row with one NaN is NaN; a minimum that drops it would give the limit."""
    case = Case(PLAIN, 4)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    case.x[1, 7] = float("nan")
    found = case.grouped(layout)
    assert bool(found[layout[0] == 1].isnan().all()) and bool(found[layout[0] != 1].isfinite().all())


@pytest.mark.invariant("F3")
def test_a_nan_of_the_payload_stays_one() -> None:
    case = Case(FP4_BLOCK32, 4)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    values, scales = scaled(case.x, 128, 448.0, 1e-4, Workspace(torch.device("cpu")))
    payload = values.to(torch.float8_e4m3fn)
    payload.view(torch.uint8)[3, 200] = 0x7F
    found = case.grouped(layout, payload, scales)
    assert bool(found[layout[0] == 3].isnan().all()) and bool(found[layout[0] != 3].isfinite().all())


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_looked_up_on_the_device(format: str) -> None:
    """The bits are those of the layer's own weights, for each layer of a table."""
    layers = [Case(format, 3, seed=seed) for seed in range(2)]
    layout = reference().expert_layout(layers[0].ids, layers[0].weights, 0, EXPERTS, 1)
    tables = [WeightTable.of([getattr(case, name) for case in layers]) for name in ("gate_up", "down")]
    for number, case in enumerate(layers):
        case.x = layers[0].x
        layer = torch.tensor([number], dtype=torch.int32)
        out = torch.full((layout[0].shape[0], WIDTH), float("nan"))
        workspace = Workspace(torch.device("cpu"))
        routes.grouped_ffn(case.x, None, *layout[:4], *tables, LIMIT, layer, out=out, ws=workspace)()
        assert torch.equal(out, case.grouped(layout))


def test_a_short_result_takes_the_rounded_input_from_the_workspace() -> None:
    """bf16 rows of 128 do not hold 128 channels in fp32: the same numbers as where they do, cut to bf16."""
    case = Case(FP4_BLOCK32, 5)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    case.down = stack(FP4_BLOCK32, 128, INNER, torch.Generator().manual_seed(9))
    case.gate_up = stack(FP4_BLOCK32, 2 * INNER, 128, torch.Generator().manual_seed(8))
    x = case.x[:, :128].contiguous()
    wide, short = (
        torch.full((layout[0].shape[0], 128), float("nan"), dtype=d) for d in (torch.float32, torch.bfloat16)
    )
    for out in (wide, short):
        workspace = Workspace(torch.device("cpu"))
        assert routes.wide_stride(case.down, out.dtype) == (128, out is wide)
        routes.grouped_ffn(x, None, *layout[:4], case.gate_up, case.down, LIMIT, out=out, ws=workspace)()
    torch.testing.assert_close(short.float(), wide, rtol=2**-7, atol=0)


@pytest.mark.parametrize("most", [1, 30, 200, 780])
def test_every_size_has_tiles_that_were_compiled(most: int) -> None:
    for format in FORMATS:
        least = fitting.FROM_ROWS[format]
        for shared in (48 << 10, 163 << 10, 227 << 10):
            known = all_tiles(format, most, shared)
            sizes = range(max(1, int(least * 128)), max(most, int(least)) * 128 + 1, 16)
            assert {tiles_for(format, max(slots, least * 128), 128, shared) for slots in sizes} == set(known)
            for tiles in known:
                assert tiles.slots % tiles.piece == 0 and tiles.piece >= 16
                for size in range(tiles.piece, tiles.slots + 1, tiles.piece):
                    rest = size - (1 << (size.bit_length() - 1))
                    assert not rest & (rest - 1), "a size is one or two powers of two"


@pytest.mark.parametrize(
    ("change", "part"), [("scale", "2^-60"), ("nan scale", "2^128"), ("nan code", "NaN"), ("address", "16 bytes")]
)
def test_weights_that_cannot_be_exact_are_refused(change: str, part: str) -> None:
    case = Case(FP8_BLOCK128, 3)
    layout = reference().expert_layout(case.ids, case.weights, 0, EXPERTS, 1)
    case.grouped(layout)
    data, scale = case.down.data.clone(), case.down.scales.clone()
    if change == "scale":
        scale.view(torch.uint8)[3, 1, 0] = 127 - 60
    elif change == "nan scale":
        scale.view(torch.uint8)[3, 1, 0] = 255
    elif change == "nan code":
        data.view(torch.uint8)[4, 255, 127] = 0xFF
    else:
        moved = torch.empty(data.numel() + 8, dtype=torch.uint8)[8:].view(torch.float8_e4m3fn).view(data.shape)
        data = moved.copy_(data)
    case.down = Weight(data, scale, FP8_BLOCK128, "fp8")
    with pytest.raises(DispatchError, match=part.replace("^", r"\^")):
        case.grouped(layout)


def test_what_does_not_fit_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(FP4_BLOCK32, 2)
    small = {"x": case.x, "ids": case.ids, "weights": case.weights, "gate_up": case.gate_up, "down": case.down}
    least = fitting.FROM_ROWS[FP4_BLOCK32]
    assert f"below {least:g}" in str(fits_ffn(Call("expert_ffn", small, "any")))
    monkeypatch.setattr(fitting, "FROM_ROWS", dict.fromkeys(FORMATS, 0))
    good = {"x": case.x, "ids": case.ids, "weights": case.weights, "gate_up": case.gate_up, "down": case.down}
    assert fits_ffn(Call("expert_ffn", good, "any")) is None
    for name, value, part in (
        ("x", case.x.float(), "float32"),
        ("weights", case.weights.double(), "float64"),
        ("ids", case.ids[:0], "no pairs"),
        ("down", Weight(torch.zeros(EXPERTS, WIDTH, 96).bfloat16()), "96"),
        ("gate_up", Weight(torch.zeros(EXPERTS, 2 * INNER, WIDTH)), "float32"),
    ):
        reason = fits_ffn(Call("expert_ffn", {**good, name: value}, "any"))
        assert reason is not None and part in reason, name
    grouped = {**good, "rows": case.x, "slot_weights": case.weights, "dtype": torch.float64, "index": case.ids}
    assert "float64" in str(fits_grouped(Call("grouped_ffn", grouped, "any")))
