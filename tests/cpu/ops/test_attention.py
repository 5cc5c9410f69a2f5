"""Attention over a window and chosen blocks, against the sum written down key by key."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from tests.cpu.ops.checks import check_contract, fresh_ops, no_allocation, rows_are_invariant, run, same_bits
from tests.cpu.ops.stores import SLOTS, Layer, again, filled_layer, normal

FP32, FP64 = torch.float32, torch.float64


def expected(
    layer: Layer,
    q: torch.Tensor,
    position: int,
    slot: int,
    sink: torch.Tensor,
    window: int,
    scale: float,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row in fp64: keys by absolute position, no ring, no tiles."""
    keys = list(layer.kv[slot][max(0, position - window + 1) : position + 1])
    if chosen is not None:
        keys += [layer.blocks[slot][w] for w in chosen.tolist() if w >= 0]
    stacked = torch.stack(keys)
    out = torch.empty(q.shape, dtype=FP64)
    for head in range(q.shape[0]):
        scores = stacked @ q[head].double() * scale
        top = torch.maximum(scores.max(), sink[head].double())
        weights = torch.exp(scores - top)
        out[head] = weights @ stacked / (weights.sum() + torch.exp(sink[head].double() - top))
    return out


def choices(rows: int, k: int, below: int, seed: int = 3) -> torch.Tensor:
    """[rows, k] distinct blocks with -1 among them, more of them in later rows."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, max(below, k), generator=generator).argsort(1)[:, :k]
    absent = torch.rand(rows, k, generator=generator) < torch.linspace(0.1, 1.0, rows).unsqueeze(1)
    return torch.where(absent | (order >= below), -1, order)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {FP64: {"rtol": 1e-11, "atol": 1e-12}, FP32: {"rtol": 2e-5, "atol": 2e-6}}.get(
        dtype, {"rtol": 1e-2, "atol": 1e-2}
    )


SHAPES = [(FP32, window, k) for window in (1, 16, 64, 100) for k in (None, 1, 64, 70)]
SHAPES += [(dtype, window, k) for dtype in (FP64, torch.bfloat16) for window, k in ((16, 20), (64, None), (100, 70))]


@pytest.mark.parametrize(("dtype", "window", "k"), SHAPES)
def test_rows_are_the_sum_over_their_keys(dtype: torch.dtype, window: int, k: int | None) -> None:
    count = 128
    for length in (163, 5, window + 3):
        layer = filled_layer(length=length, count=count, ring=window + 6, dtype=dtype)
        at = torch.arange(max(0, length - 7), length)  # what a step of seven tokens asks, the ring wrapped or not
        rows = len(at)
        slots = torch.arange(rows) % SLOTS + 1
        q, sink = normal(rows, 3, 48, seed=1, dtype=dtype), normal(3, seed=2)
        chosen = None if k is None else choices(rows, k, count)
        more = () if chosen is None else (layer.compressed, layer.table, chosen)
        found = again("attend", q, layer.window, at, slots, sink, window, 48**-0.5, *more)
        assert found.dtype == dtype
        for i in range(rows):
            one = None if chosen is None else chosen[i]
            wanted = expected(layer, q[i], int(at[i]), int(slots[i]), sink, window, 48**-0.5, one)
            torch.testing.assert_close(found[i].double(), wanted, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_packed_rows_are_attended_as_stored(dtype: torch.dtype) -> None:
    layer = filled_layer(length=90, count=40, width=136, tail=40, ring=40, format="kv_fp8", dtype=dtype)
    at, slots = torch.tensor([87, 88, 89, 80]), torch.tensor([1, 2, 3, 1])
    q, sink, chosen = normal(4, 5, 136, seed=1, dtype=dtype), normal(5, seed=2), choices(4, 21, 40)
    found = run("attend", q, layer.window, at, slots, sink, 30, 0.1, layer.compressed, layer.table, chosen)
    for i in range(4):
        wanted = expected(layer, q[i], int(at[i]), int(slots[i]), sink, 30, 0.1, chosen[i])
        torch.testing.assert_close(found[i].double(), wanted, rtol=1e-4, atol=2e-5 if dtype is FP32 else 1e-12)


def real_layer() -> Layer:
    return filled_layer(length=90, count=60, ring=40)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize(("heads", "width", "window", "k"), [(3, 48, 20, 21), (4, 128, 64, 70), (64, 40, 20, 140)])
def test_a_row_does_not_depend_on_its_neighbours(heads: int, width: int, window: int, k: int) -> None:
    layer = filled_layer(length=90, count=60, width=width, ring=window + 10)
    at, slots = 89 - torch.arange(64) % 10, torch.arange(64) % SLOTS + 1
    q, chosen, sink = normal(64, heads, width, seed=1), choices(64, k, 60), normal(heads, seed=2)

    def call(q: torch.Tensor, at: torch.Tensor, slots: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return again("attend", q, layer.window, at, slots, sink, window, 0.2, layer.compressed, layer.table, chosen)

    rows_are_invariant(call, q, at, slots, chosen)
    rows_are_invariant(lambda *rows: again("attend", rows[0], layer.window, *rows[1:], sink, window, 0.2), q, at, slots)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_bits_do_not_depend_on_how_far_the_choice_is_padded(dtype: torch.dtype) -> None:
    layer = filled_layer(length=90, count=60, ring=40, dtype=dtype)
    at, slots = torch.tensor([80, 85, 89]), torch.tensor([1, 2, 3])
    q, sink = normal(3, 4, 48, seed=1, dtype=dtype), normal(4, seed=2)
    chosen = choices(3, 37, 60)
    whole = run("attend", q, layer.window, at, slots, sink, 30, 0.2, layer.compressed, layer.table, chosen)
    for more in (1, 27, 28, 100, 500):
        longer = torch.cat((chosen, torch.full((3, more), -1)), 1)
        again = run("attend", q, layer.window, at, slots, sink, 30, 0.2, layer.compressed, layer.table, longer)
        assert same_bits(again, whole), f"{more} places more"
    nothing = run("attend", q, layer.window, at, slots, sink, 30, 0.2)
    absent = torch.full((3, 70), -1)
    assert same_bits(
        run("attend", q, layer.window, at, slots, sink, 30, 0.2, layer.compressed, layer.table, absent), nothing
    )


@pytest.mark.invariant("K7")
def test_many_tiles_are_added_in_sequence() -> None:
    """Torch sums a long dimension in groups that follow its length; a few tiles do not show it."""
    layer = filled_layer(length=90, count=60, ring=40)
    at, slots, sink = torch.tensor([80, 85, 89]), torch.tensor([1, 2, 3]), normal(16, seed=2)
    q = normal(3, 16, 48, seed=1)
    chosen = torch.randint(0, 60, (3, 2600), generator=torch.Generator().manual_seed(4))
    arguments = (q, layer.window, at, slots, sink, 30, 0.05, layer.compressed, layer.table)
    whole = again("attend", *arguments, chosen)
    for more in (64, 600, 6000):
        longer = torch.cat((chosen, torch.full((3, more), -1)), 1)
        assert same_bits(again("attend", *arguments, longer), whole), f"{more} places more"


@pytest.mark.parametrize("ring", [30, 37, 64, 89])
def test_bits_do_not_depend_on_the_ring(ring: int) -> None:
    q, sink, at = normal(1, 4, 48, seed=1), normal(4, seed=2), torch.tensor([88])
    found, small = (
        run("attend", q, filled_layer(length=89, count=0, ring=r).window, at, torch.tensor([2]), sink, 30, 0.2)
        for r in (ring, 41)
    )
    assert same_bits(found, small)


def test_what_nobody_wrote_never_reaches_a_row() -> None:
    """Unwritten ring rows, blocks and the null page hold NaN; so do tokens behind the row's own position."""
    layer = real_layer()
    at, slots, sink = torch.tensor([82]), torch.tensor([1]), normal(4, seed=2)
    q, chosen = normal(1, 4, 48, seed=1), torch.tensor([[4, -1, 7]])
    arguments = (q, layer.window, at, slots, sink, 30, 0.2, layer.compressed, layer.table, chosen)
    before = run("attend", *arguments)
    assert before.isfinite().all()
    layer.window.data[0], layer.compressed.data[0] = float("nan"), float("inf")
    for position in range(83, 90):
        layer.window.data[1, position % 40] = float("nan")
    layer.window.data[2:] = float("nan")
    mine = {(int(layer.table[1, w // 8]), w % 8) for w in (4, 7)}
    for page in range(layer.compressed.pages):
        for row in range(8):
            if (page, row) not in mine:
                layer.compressed.data[page, row] = float("nan")
    assert same_bits(run("attend", *arguments), before)
    layer.compressed.data[layer.table[1, 0], 4] = float("nan")
    assert run("attend", *arguments).isnan().all(), "control: a chosen block is read"


@pytest.mark.parametrize("length", [1, 2, 29])
def test_a_short_request_reads_no_row_before_its_first(length: int) -> None:
    layer = filled_layer(length=length, count=0, ring=40)
    q, sink = normal(1, 4, 48, seed=1), normal(4, seed=2)
    at, slots = torch.tensor([length - 1]), torch.tensor([3])
    found = run("attend", q, layer.window, at, slots, sink, 30, 0.2)
    torch.testing.assert_close(
        found[0].double(), expected(layer, q[0], length - 1, 3, sink, 30, 0.2), rtol=2e-5, atol=2e-6
    )
    none = torch.full((1, 5), -1)
    assert same_bits(
        run("attend", q, layer.window, at, slots, sink, 30, 0.2, layer.compressed, layer.table, none), found
    )


def test_a_sink_far_above_and_far_below() -> None:
    layer = real_layer()
    q, at, slots = normal(1, 3, 48, seed=1), torch.tensor([89]), torch.tensor([1])
    found = run("attend", q, layer.window, at, slots, torch.tensor([1e4, -1e4, float("-inf")]), 30, 0.2)[0]
    assert (found[0] == 0).all()
    plain = expected(layer, q[0], 89, 1, torch.full((3,), -1e30), 30, 0.2)
    torch.testing.assert_close(found[1:].double(), plain[1:], rtol=2e-5, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    layer = real_layer()
    q, at, slots, sink = normal(1, 3, 48, scale=1e4), torch.tensor([89]), torch.tensor([1]), normal(3)
    found = run("attend", q, layer.window, at, slots, sink, 30, 1.0)[0]
    torch.testing.assert_close(found.double(), expected(layer, q[0], 89, 1, sink, 30, 1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [FP32, FP64, torch.bfloat16])
@pytest.mark.parametrize("format", ["plain", "kv_fp8"])
def test_contract(format: str, dtype: torch.dtype) -> None:
    layer = filled_layer(length=90, count=60, width=72, ring=40, format=format, dtype=dtype)

    def make(rows: int) -> tuple[object, ...]:
        slots = torch.arange(rows) % SLOTS + 1
        q, at = normal(rows, 3, 72, dtype=dtype), 89 - torch.arange(rows) % 10
        return q, layer.window, at, slots, normal(3), 30, 0.2, layer.compressed, layer.table, choices(rows, 20, 60)

    check_contract("attend", lambda: make(2))
    check_contract("attend", lambda: make(19))


@pytest.mark.invariant("W2")
def test_the_largest_plan_serves_every_smaller_call() -> None:
    layer = real_layer()
    ops = fresh_ops()
    for rows, k in ((33, 70), (1, 1), (16, 64), (17, 3), (2, 65)):
        q, slots, at = normal(rows, 3, 48), torch.arange(rows) % SLOTS + 1, 89 - torch.arange(rows) % 10
        ops.workspace.start()
        chosen = choices(rows, k, 60)
        ops.attend(q, layer.window, at, slots, normal(3), 30, 0.2, layer.compressed, layer.table, chosen)
        if not ops.workspace.sealed:
            ops.workspace.seal()
    assert ops.workspace.sealed


def test_a_decode_step_is_cheap() -> None:
    """One row, 128 window rows and 64 blocks: about 25 writing calls; they are most of a small model's step."""
    layer = filled_layer(length=140, count=64, width=64, ring=135)
    ops = fresh_ops(checked=False)
    q, at, slots, sink = normal(1, 4, 64), torch.tensor([139]), torch.tensor([1]), normal(4)
    window_only = (q, layer.window, at, slots, sink, 128, 0.125)
    both = (*window_only, layer.compressed, layer.table, torch.arange(64).view(1, 64))
    for arguments, most in ((window_only, 18), (both, 27)):
        ops.attend(*arguments)
        ops.workspace.start()
        with no_allocation() as guard:
            ops.attend(*arguments)
        ops.workspace.start()
        assert guard.calls <= most


def test_arguments_that_do_not_fit_are_refused() -> None:
    layer = real_layer()
    q, at, slots, sink = normal(1, 3, 48), torch.tensor([9]), torch.tensor([1]), normal(3)
    with pytest.raises(DispatchError, match="window of 41 in a ring of 40"):
        run("attend", q, layer.window, at, slots, sink, 41, 0.2)
    with pytest.raises(DispatchError, match="48 channels"):
        run("attend", normal(1, 3, 40), layer.window, at, slots, sink, 30, 0.2)
    with pytest.raises(DispatchError, match="without the store"):
        run("attend", q, layer.window, at, slots, sink, 30, 0.2, None, None, torch.zeros(1, 2).long())
