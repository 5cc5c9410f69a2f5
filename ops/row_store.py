"""Where rows are kept: pages of rows, in the carrier or packed as shipped, and the arithmetic of their sizes.

A packed page holds the data of all its rows first and the scales of all its rows behind them, as serving
software lays it out; reading scales beside their row is a known trap (HYGON-AI/vllm-plugin-das#89).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch

from halma.hal.errors import ModelError
from halma.ops.quant import KV_BLOCK
from halma.ops.weight import FP4_BLOCK

PLAIN: Final = "plain"
KV_FP8: Final = "kv_fp8"
INDEX_FP4: Final = "index_fp4"
INDEX_FP8: Final = "index_fp8"
FORMATS: Final = (PLAIN, KV_FP8, INDEX_FP4, INDEX_FP8)

_SCALE_ALIGNMENT = 8
"""Bytes to which the scales of a kv_fp8 row are padded: 7 of the shipped row become 8."""


@dataclass(frozen=True)
class RowLayout:
    """Bytes of one row of a format.

    Attributes:
        data_bytes: the row itself.
        scale_bytes: its scales, behind the data of the whole page; 0 for plain rows.
    """

    data_bytes: int
    scale_bytes: int

    @staticmethod
    def of(format: str, width: int, tail: int, dtype: torch.dtype) -> RowLayout:
        """The layout of rows of ``width`` channels of which the last ``tail`` carry rope.

        Raises:
            ModelError: no such format, or it cannot hold rows of this shape.
        """
        if format == PLAIN:
            return RowLayout(width * dtype.itemsize, 0)
        if format == KV_FP8:
            blocks = -(-(width - tail) // KV_BLOCK)
            padded = -(-blocks // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
            layout = RowLayout(width - tail + 2 * tail, padded)
            need = "0 <= tail < width and width - tail even" if not 0 <= tail < width or (width - tail) % 2 else None
        elif format == INDEX_FP4:
            layout = RowLayout(width // 2, width // FP4_BLOCK)
            need = f"a multiple of {FP4_BLOCK} channels" if width % FP4_BLOCK or not width else None
        elif format == INDEX_FP8:
            layout = RowLayout(width, torch.float32.itemsize)
            need = None
        else:
            raise ModelError(
                f"no row format is called {format!r}", asked=f"a store of {format!r}", found=", ".join(FORMATS)
            )
        if need is None and layout.data_bytes % layout.scale_bytes:
            need = f"data bytes that are a multiple of the scales' {layout.scale_bytes}"
        if need is not None:
            raise ModelError(
                f"rows of this shape cannot be kept as {format}",
                asked=f"width {width}, tail {tail}: {layout.data_bytes} bytes of data a row",
                found=f"the format needs {need}",
                do="keep them plain (exact arithmetic)",
            )
        return layout

    def page_bytes(self, page_rows: int) -> int:
        """Bytes of a page: data, scales, and room up to a whole number of rows' data.

        So the distance of two pages is a number of rows and also a number of scales: one flat index finds either.
        """
        used = page_rows * (self.data_bytes + self.scale_bytes)
        return -(-used // self.data_bytes) * self.data_bytes


@dataclass(frozen=True, eq=False, repr=False)
class RowStore:
    """Pages of rows. Page 0 is the null page: padding rows are written there, and its contents mean nothing.

    Args:
        data: ``plain``: [pages, page_rows, width] in the carrier; packed: uint8 [pages, page_bytes].
        format: ``plain``; ``kv_fp8`` (e4m3 with one e8m0 scale per 64 channels, the tail in bf16; 584 bytes for
            512 channels with a tail of 64); ``index_fp4`` (e2m1, one e8m0 per 32: 68 bytes for 128 channels);
            ``index_fp8`` (e4m3, one fp32 scale a row: 132 bytes for 128 channels).
        page_rows: rows a page.
        width, tail: channels of a row, and how many of them at the end carry rope.

    Holds a reference to ``data``; lives as long as the state that owns it.

    Raises:
        ModelError: data and format do not fit one another.
    """

    data: torch.Tensor
    format: str
    page_rows: int
    width: int
    tail: int
    layout: RowLayout = field(init=False)
    plan_key: str = field(init=False)
    """Format, shape and dtype; stores with equal keys share a plan."""

    def __repr__(self) -> str:
        return f"RowStore({self.plan_key})"  # never the values: printing reads the device

    def __post_init__(self) -> None:
        dtype, shape = self.data.dtype, tuple(self.data.shape)
        layout = RowLayout.of(self.format, self.width, self.tail, dtype)
        plain = self.format == PLAIN
        expected = (self.page_rows, self.width) if plain else (layout.page_bytes(self.page_rows),)
        fits = dtype.is_floating_point if plain else dtype == torch.uint8
        if shape[1:] != expected or not fits or not self.data.is_contiguous():
            raise ModelError(
                "a row store does not fit its format",
                asked=f"{self.format}: {'floating' if plain else 'uint8'} [pages, {', '.join(map(str, expected))}]",
                found=f"{dtype} {list(shape)}, strides {list(self.data.stride())}",
                do="make it with RowStore.new",
            )
        object.__setattr__(self, "layout", layout)
        name = str(dtype).removeprefix("torch.")
        key = f"{self.format}:{name}{list(shape)}:{self.page_rows}x{self.width}/{self.tail}@{self.data.device.type}"
        object.__setattr__(self, "plan_key", key)

    @staticmethod
    def new(
        pages: int,
        page_rows: int,
        width: int,
        tail: int,
        format: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> RowStore:
        """A store of zeros. ``pages`` counts page 0; ``dtype`` is the carrier, used by plain stores only.

        Raises:
            ModelError: the format is unknown or cannot hold such rows.
        """
        layout = RowLayout.of(format, width, tail, dtype)
        if format == PLAIN:
            data = torch.zeros((pages, page_rows, width), dtype=dtype, device=device)
        else:
            data = torch.zeros((pages, layout.page_bytes(page_rows)), dtype=torch.uint8, device=device)
        return RowStore(data, format, page_rows, width, tail)

    @staticmethod
    def nbytes_for(pages: int, page_rows: int, width: int, tail: int, format: str, dtype: torch.dtype) -> int:
        """Bytes that :meth:`new` would allocate, without allocating."""
        return pages * RowLayout.of(format, width, tail, dtype).page_bytes(page_rows)

    @property
    def pages(self) -> int:
        """Pages, the null page among them."""
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return self.data.nbytes

    # -- flat views, for index_select and index_copy_ ----------------------------------------------

    @cached_property
    def rows(self) -> torch.Tensor:
        """Data of all pages as one list of rows; row i of page p is number ``p * row_pitch + i``."""
        return self.data.view(-1, self.width if self.format == PLAIN else self.layout.data_bytes)

    @cached_property
    def row_pitch(self) -> int:
        """Distance of two pages in rows of :attr:`rows`."""
        return self.rows.shape[0] // self.pages

    @cached_property
    def scales(self) -> torch.Tensor:
        """Scale bytes as one list; those of row i of page p are number ``p * scale_pitch + i`` (packed stores)."""
        whole = self.data.view(-1, self.layout.scale_bytes)
        return whole[self.page_rows * self.layout.data_bytes // self.layout.scale_bytes :]

    @cached_property
    def scale_pitch(self) -> int:
        """Distance of two pages in rows of :attr:`scales` (packed stores)."""
        return self.data.shape[1] // self.layout.scale_bytes
