"""Index keys, their scores, and the choice of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from halma.hal.errors import DispatchError
from halma.ops.row_store import RowStore
from tests.cpu.ops.checks import check_contract, poisoned, rows_are_invariant, run, same_bits
from tests.cpu.ops.stores import SLOTS, again, normal, poisoned_store, shuffled_table

CASE = Path(__file__).parents[2] / "data" / "cases" / "tiny_v4_quant.safetensors"
RATIO, HEADS, WIDTH = 4, 3, 32


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# -- rounding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_index_rows(dtype: torch.dtype) -> None:
    with safe_open(CASE, "pt") as file:
        x, y = file.get_tensor("op.index.x").to(dtype), file.get_tensor("op.index.y").to(dtype)
    assert same_bits(run("round_index", x, "index_fp4"), y)
    store = RowStore.new(2, 5, 128, 64, "index_fp4", dtype)
    run("insert_rows", y, numbers(*[1] * 5), torch.arange(5), store)
    before = store.data.clone()
    run("insert_rows", run("round_index", x, "index_fp4"), numbers(*[1] * 5), torch.arange(5), store)
    assert torch.equal(store.data, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fp8_keys_have_one_scale_a_row_and_plain_ones_stay(dtype: torch.dtype) -> None:
    x = normal(2, 3, 64, dtype=dtype)
    turned = run("hadamard", x.double())
    found = run("round_index", x, "index_fp8").double()
    step = torch.exp2(torch.ceil(torch.log2(turned.abs().amax(-1, keepdim=True) / 448)))
    expected = (turned / step).float().to(torch.float8_e4m3fn).double() * step
    if dtype is torch.float64:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0.07, atol=0.01)
    assert same_bits(run("round_index", x, "plain"), x)


def test_rounded_rows_keep_their_bits_among_others() -> None:
    x = normal(64, 2, 64)
    for format in ("index_fp4", "index_fp8", "plain"):
        rows_are_invariant(lambda rows, format=format: again("round_index", rows, format), x)
        check_contract("round_index", lambda format=format: (x[:3].clone(), format))


def test_formats_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DispatchError, match="kv_fp8"):
        run("round_index", normal(1, 64), "kv_fp8")
    for width, format in ((96, "index_fp4"), (16, "index_fp4"), (48, "index_fp8")):
        with pytest.raises(DispatchError, match="power of two"):
            run("round_index", normal(1, width), format)


# -- all blocks -----------------------------------------------------------------------------------------


def test_a_token_sees_the_block_that_it_completes() -> None:
    found = run("all_blocks", numbers(0, 2, 3, 7, 8, 100), RATIO, 5)
    assert found.tolist() == [
        [-1] * 5,
        [-1] * 5,
        [0, -1, -1, -1, -1],
        [0, 1, -1, -1, -1],
        [0, 1, -1, -1, -1],
        [0, 1, 2, 3, 4],
    ]
    check_contract("all_blocks", lambda: (numbers(5, 0, 99), RATIO, 7))


# -- scores ---------------------------------------------------------------------------------------------


def filled_index(
    count: int, format: str = "plain", dtype: torch.dtype = torch.float32, page_rows: int = 8, pages: int = 40
) -> tuple[RowStore, torch.Tensor, list[torch.Tensor]]:
    """Poisoned pages in which each slot has ``count`` keys; the keys as stored, in fp64."""
    store = poisoned_store(SLOTS * pages + 1, page_rows, WIDTH, 0, format, dtype)
    table = shuffled_table(pages)
    keys = [torch.empty(0)]
    for slot in range(1, SLOTS + 1):
        rows = run("round_index", normal(count, WIDTH, seed=slot, dtype=dtype), format)
        run("block_insert", rows, torch.arange(count), numbers(slot), table, store)
        keys.append(rows.double())
    return store, table, keys


def expected_scores(
    q: torch.Tensor, weights: torch.Tensor, scale: float, keys: torch.Tensor, position: int, capacity: int
) -> torch.Tensor:
    out = torch.full((capacity,), float("-inf"), dtype=torch.float64)
    count = min((position + 1) // RATIO, capacity)
    dots = torch.relu(q.double() @ keys[:count].double().t())
    out[:count] = scale * (weights.double().unsqueeze(1) * dots).sum(0)
    return out


@pytest.mark.parametrize("format", ["plain", "index_fp4", "index_fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("capacity", [3, 8, 21, 40, 300])
def test_scores_are_the_weighted_relu_sum(format: str, dtype: torch.dtype, capacity: int) -> None:
    count = min(capacity, 33)
    store, table, keys = filled_index(count, format, dtype)
    positions = numbers(0, RATIO - 1, RATIO * count - 1, RATIO * count // 2, 2)
    slots = numbers(1, 2, 3, 1, 0)
    q = run("round_index", normal(5, HEADS, WIDTH, seed=5, dtype=dtype), format)
    weights = normal(5, HEADS, seed=6, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    found = run("index_scores", q, weights, 0.25, store, positions, slots, table, RATIO, capacity)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for row in range(4):
        expected = expected_scores(q[row], weights[row], 0.25, keys[slots[row]], int(positions[row]), capacity)
        torch.testing.assert_close(found[row].double(), expected, rtol=tolerance, atol=tolerance)
    assert found.shape == (5, capacity)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("heads", [3, 64])
def test_scores_do_not_depend_on_capacity_or_neighbours(heads: int) -> None:
    store, table, _ = filled_index(60)
    positions, slots = 239 - torch.arange(64) % 90, torch.arange(64) % SLOTS + 1
    q, weights = normal(64, heads, WIDTH, seed=5), normal(64, heads, seed=6)

    def call(q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return again("index_scores", q, weights, 0.25, store, positions, slots, table, RATIO, 60)

    rows_are_invariant(call, q, weights, positions, slots)
    whole = call(q, weights, positions, slots)
    for capacity in (61, 64, 150, 320):
        more = run("index_scores", q, weights, 0.25, store, positions, slots, table, RATIO, capacity)
        assert same_bits(more[:, :60].contiguous(), whole)
        assert more[:, 60:].isneginf().all()


def test_scores_contract() -> None:
    store, table, _ = filled_index(60)

    def make(rows: int) -> tuple[object, ...]:
        slots = torch.arange(rows) % SLOTS + 1
        return normal(rows, HEADS, WIDTH), normal(rows, HEADS), 0.5, store, slots + 200, slots, table, RATIO, 60

    assert check_contract("index_scores", lambda: make(1)) <= 14
    check_contract("index_scores", lambda: make(19))


def test_more_blocks_than_the_page_table_holds_are_refused() -> None:
    store, table, _ = filled_index(3, pages=2)
    arguments = normal(1, HEADS, WIDTH), normal(1, HEADS), 0.5, store, numbers(5), numbers(1), table, RATIO
    assert run("index_scores", *arguments, 16).shape == (1, 16)
    with pytest.raises(DispatchError, match="page table for 16 blocks"):
        run("index_scores", *arguments, 17)


# -- choice ---------------------------------------------------------------------------------------------

HIDDEN = float("-inf")


def test_the_best_blocks_in_ascending_order() -> None:
    scores = torch.tensor(
        [
            [1.0, 5.0, 3.0, -2.0, 4.0],
            [2.0, 1.0, HIDDEN, HIDDEN, HIDDEN],
            [HIDDEN] * 5,
            [0.0, 0.0, 0.0, 0.0, 1.0],
            [-1.0, -3.0, -2.0, -0.0, HIDDEN],
        ]
    )
    assert run("top_blocks", scores, 3).tolist() == [[1, 2, 4], [0, 1, -1], [-1, -1, -1], [0, 1, 4], [0, 2, 3]]
    assert run("top_blocks", scores, 7)[1].tolist() == [0, 1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize(("blocks", "k"), [(300, 17), (64, 64), (5, 9), (257, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_block(blocks: int, k: int, dtype: torch.dtype) -> None:
    scores = torch.randint(0, 4, (9, blocks), generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = torch.arange(9).mul(blocks).div(8, rounding_mode="floor")
    scores.masked_fill_(torch.arange(blocks) >= seen.unsqueeze(1), HIDDEN)
    found = run("top_blocks", scores, k)
    for row in range(9):
        order = sorted(range(int(seen[row])), key=lambda w, row=row: (-float(scores[row, w]), w))[:k]
        assert found[row].tolist() == sorted(order) + [-1] * (k - len(order))


def test_choice_does_not_depend_on_capacity_or_neighbours() -> None:
    scores = normal(64, 50)
    scores.masked_fill_(torch.arange(50) >= torch.arange(64).unsqueeze(1), HIDDEN)
    rows_are_invariant(lambda rows: again("top_blocks", rows, 12), scores)
    more = torch.cat((scores, torch.full((64, 77), HIDDEN)), 1)
    assert torch.equal(run("top_blocks", more, 12), run("top_blocks", scores, 12))
    for k in (12, 60):
        check_contract("top_blocks", lambda k=k: (scores[:3].clone(), k))
    spoiled = poisoned((4, 50), torch.float32)
    spoiled[2] = scores[40]
    assert torch.equal(run("top_blocks", spoiled, 12)[2], run("top_blocks", scores, 12)[40])
