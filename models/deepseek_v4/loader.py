"""Reads tensors into prepared weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.layout import MatrixSpec
from halma.models.deepseek_v4.preparation import LoadOptions, Piece, format_of, plan_matrix
from halma.models.deepseek_v4.sources import Index, TensorSource
from halma.ops.weight import FP4_BLOCK, FP4_BLOCK32, FP8_BLOCK, PLAIN, Weight, dequantise

Progress = Callable[[int, int, str], None]
"""(bytes read, bytes to read, name of the tensor just read)."""


class Loader:
    """The builder that reads; everything was checked by a :class:`Survey` of the same source before."""

    def __init__(self, options: LoadOptions, source: TensorSource, total: int, progress: Progress | None) -> None:
        self._options, self._source, self._progress = options, source, progress
        self._done, self._total = 0, total

    def matrix(self, spec: MatrixSpec) -> Weight:
        first = self._source.entry(f"{spec.groups[0][0].stem}.weight")
        assert first is not None and first.dtype is not None
        plan = plan_matrix(spec, format_of(first) or PLAIN, self._options)
        out = plan.empty(self._options, fp4_dtype=first.dtype)
        for index, group in enumerate(plan.groups):
            target, offset = out.matrix(index) if spec.stacked else out, 0
            for piece in group:
                rows = piece.rows[1] - piece.rows[0]
                self._copy(piece, plan.stored, target.narrow_rows(offset, rows))
                offset += rows
        return out

    def vector(self, name: str, shape: tuple[int, ...], *, split: bool = False) -> torch.Tensor:
        start, stop = self._options.cut(shape[0], split)
        tensor = self._read(name, slice(start, stop)) if split else self._read(name)
        return tensor.to(device=self._options.device, dtype=self._options.accumulator, copy=True)

    def table(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        tensor = self._read(name).to(torch.int64, copy=True)
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= below:  # a wrong entry would read another expert's memory, or none
            raise ModelError(
                "a table of experts points outside",
                asked=f"{name} in {self._source.label}",
                found=f"values {low} to {high}; must be 0 to {below - 1}",
                do="check that config.json and the weights come from the same checkpoint",
            )
        return tensor.to(self._options.device)

    def _copy(self, piece: Piece, stored: str, target: Weight) -> None:
        """Read one piece and write it, packed as it is or as plain values."""
        name = piece.part.stem
        rows, columns = slice(*piece.cover_rows), slice(*piece.cover_columns)
        if stored == PLAIN:
            target.data.copy_(self._read(f"{name}.weight", rows, columns))
            return
        if stored == FP4_BLOCK32:
            data = self._read(f"{name}.weight", rows, slice(columns.start // 2, columns.stop // 2))
            scale_index = (rows, slice(columns.start // FP4_BLOCK, columns.stop // FP4_BLOCK))
        else:
            data = self._read(f"{name}.weight", rows, columns)
            scale_index = tuple(slice(s.start // FP8_BLOCK, -(-s.stop // FP8_BLOCK)) for s in (rows, columns))
        # As bits: a numeric copy between e8m0 and another dtype is a known trap (vllm-project/vllm#43416, #51946).
        scale = self._read(f"{name}.scale", *scale_index).view(torch.uint8)
        if target.scale is not None:
            target.data.view(torch.uint8).copy_(data.view(torch.uint8))
            target.scale.view(torch.uint8).copy_(scale)
            return
        values = dequantise(Weight(data, scale.view(torch.float8_e8m0fnu), stored), self._options.carrier).data
        top, left = piece.rows[0] - rows.start, piece.columns[0] - columns.start
        target.data.copy_(values[top : top + target.shape[0], left : left + target.shape[1]])

    def _read(self, name: str, *index: Index) -> torch.Tensor:
        tensor = self._source.read(name, *index)
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total, name)
        return tensor
