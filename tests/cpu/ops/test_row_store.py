"""Sizes and layout of stored rows, by the published numbers."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import ModelError
from halma.ops.row_store import FORMATS, RowLayout, RowStore

FP32 = torch.float32


@pytest.mark.parametrize(
    ("format", "width", "tail", "data", "scales"),
    [
        ("kv_fp8", 512, 64, 576, 8),
        ("index_fp4", 128, 64, 64, 4),
        ("index_fp8", 128, 64, 128, 4),
        ("kv_fp8", 128, 64, 192, 8),
        ("kv_fp8", 200, 8, 208, 8),
        ("plain", 512, 64, 2048, 0),
    ],
)
def test_bytes_of_a_row(format: str, width: int, tail: int, data: int, scales: int) -> None:
    assert RowLayout.of(format, width, tail, FP32) == RowLayout(data, scales)


def test_rows_of_the_shipped_model_take_584_68_and_132_bytes() -> None:
    found = [RowLayout.of(f, w, 64, FP32) for f, w in (("kv_fp8", 512), ("index_fp4", 128), ("index_fp8", 128))]
    assert [layout.data_bytes + layout.scale_bytes for layout in found] == [584, 68, 132]


@pytest.mark.parametrize(("rows", "size"), [(64, 37440), (2, 1728), (1, 1152), (72, 42048)])
def test_a_page_of_the_shipped_model_is_a_whole_number_of_576_bytes(rows: int, size: int) -> None:
    assert RowLayout.of("kv_fp8", 512, 64, FP32).page_bytes(rows) == size
    assert size % 576 == 0 and size >= rows * 584


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_planned_bytes_are_the_allocated_ones(format: str, page_rows: int, dtype: torch.dtype) -> None:
    arguments = (5, page_rows, 128, 64, format, dtype)
    store = RowStore.new(*arguments, torch.device("cpu"))
    assert store.nbytes == RowStore.nbytes_for(*arguments) == store.data.numel() * store.data.element_size()
    assert store.pages == 5


def test_planning_allocates_nothing() -> None:
    assert RowStore.nbytes_for(1 << 20, 64, 512, 64, "kv_fp8", FP32) == (1 << 20) * 37440


@pytest.mark.parametrize("format", ["kv_fp8", "index_fp4", "index_fp8"])
@pytest.mark.parametrize("page_rows", [1, 2, 5, 64])
def test_flat_views_find_every_row_and_its_scales(format: str, page_rows: int) -> None:
    store = RowStore.new(4, page_rows, 128, 64, format, FP32)
    layout, split = store.layout, page_rows * store.layout.data_bytes
    places = [(page, row) for page in range(4) for row in range(page_rows)]
    for number, (page, row) in enumerate(places):
        store.rows[page * store.row_pitch + row] = 1 + number % 100
        store.scales[page * store.scale_pitch + row] = 101 + number % 100
    for number, (page, row) in enumerate(places):
        data = store.data[page]
        assert (data[row * layout.data_bytes :][: layout.data_bytes] == 1 + number % 100).all()
        assert (data[split + row * layout.scale_bytes :][: layout.scale_bytes] == 101 + number % 100).all()
    assert (store.data[:, split + page_rows * layout.scale_bytes :] == 0).all(), "the rest of a page is nobody's"


def test_stores_of_one_shape_share_a_plan() -> None:
    a, b = (RowStore.new(3, 4, 128, 64, "kv_fp8", FP32) for _ in range(2))
    assert a.plan_key == b.plan_key
    others = [
        RowStore.new(3, 4, 128, 64, "index_fp8", FP32),
        RowStore.new(4, 4, 128, 64, "kv_fp8", FP32),
        RowStore.new(3, 5, 128, 64, "kv_fp8", FP32),
        RowStore.new(3, 4, 128, 64, "plain", FP32),
        RowStore.new(3, 4, 128, 64, "plain", torch.float64),
    ]
    assert len({store.plan_key for store in [a, *others]}) == 6


@pytest.mark.parametrize(
    ("format", "width", "tail", "words"),
    [
        ("kv_fp16", 128, 64, "no row format"),
        ("kv_fp8", 130, 64, "multiple of the scales"),
        ("kv_fp8", 135, 64, "even"),
        ("kv_fp8", 64, 64, "tail < width"),
        ("index_fp4", 48, 0, "multiple of 32"),
        ("index_fp8", 30, 0, "multiple of the scales"),
    ],
)
def test_shapes_that_a_format_cannot_hold_are_refused(format: str, width: int, tail: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        RowStore.new(2, 4, width, tail, format, FP32)


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (torch.zeros(3, 4, 64), "plain"),
        (torch.zeros(3, 4, 128, dtype=torch.uint8), "plain"),
        (torch.zeros(3, 4, 256)[..., ::2], "plain"),
        (torch.zeros(3, 800, dtype=torch.uint8), "kv_fp8"),
        (torch.zeros(3, 960), "kv_fp8"),
    ],
)
def test_data_of_another_shape_is_refused(data: torch.Tensor, format: str) -> None:
    with pytest.raises(ModelError, match="does not fit its format"):
        RowStore(data, format, 4, 128, 64)


def test_the_right_data_is_taken() -> None:
    assert RowStore(torch.zeros(3, 960, dtype=torch.uint8), "kv_fp8", 4, 128, 64).pages == 3
