"""Checks and measures a load before anything is read."""

from __future__ import annotations

import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.layout import DENSE, EXPERT, LINEAR, MatrixSpec, Part
from halma.models.deepseek_v4.preparation import FLOATS, LoadOptions, format_of, plan_matrix, stored_bytes
from halma.models.deepseek_v4.sources import TensorSource, nearest
from halma.models.deepseek_v4.tensor_files import Entry
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight

SCALES = (torch.float8_e8m0fnu, torch.uint8)
"""e8m0 scales are read as bits, whichever of the two a file calls them."""

_ALLOWED = {LINEAR: (PLAIN, FP8_BLOCK128), EXPERT: (PLAIN, FP8_BLOCK128, FP4_BLOCK32), DENSE: (PLAIN,)}


class Survey:
    """A builder that reads nothing: checks names, shapes and dtypes, and counts bytes. Its weights are meta tensors.

    Args:
        config, options: what is to be loaded.
        source: where from; None takes the formats that ``config`` promises (sizing before anything is opened).

    Attributes:
        problems: everything wrong, as lines for a message.
        missing: names of missing tensors, in the source's vocabulary.
        used: published names that belong to the model.
        read_bytes: stored bytes that loading reads; largest_read: the largest single piece.
        unpacked: weights that were to stay packed, but whose blocks a slice or a fusion cuts.
    """

    def __init__(self, config: V4Config, options: LoadOptions, source: TensorSource | None) -> None:
        self.config, self.options, self.source = config, options, source
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.used: list[str] = []
        self.unpacked: list[str] = []
        self.read_bytes = 0
        self.largest_read = 0

    def matrix(self, spec: MatrixSpec) -> Weight:
        plan = plan_matrix(spec, self._stored(spec), self.options)
        for group in plan.groups:
            for piece in group:
                self._count(*stored_bytes(piece, plan.stored, self._item(f"{piece.part.stem}.weight", 2)))
        if plan.stored != PLAIN and plan.format == PLAIN and not self.options.dequantise:
            self.unpacked.append(spec.groups[0][0].stem)
        return plan.empty(self.options, meta=True)

    def vector(self, name: str, shape: tuple[int, ...], *, split: bool = False) -> torch.Tensor:
        self._check(name, shape, FLOATS)
        start, stop = self.options.cut(shape[0], split)
        out = torch.empty((stop - start, *shape[1:]), dtype=self.options.accumulator, device="meta")
        self._count(out.numel() * self._item(name, 2 if name.endswith(".weight") else 4))
        return out

    def table(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        self._check(name, shape, (torch.int64, torch.int32))
        out = torch.empty(shape, dtype=torch.int64, device="meta")
        self._count(out.numel() * self._item(name, 8))
        return out

    def _count(self, *sizes: int) -> None:
        self.read_bytes += sum(sizes)
        self.largest_read = max(self.largest_read, *sizes)

    def _item(self, name: str, promised: int) -> int:
        """Stored bytes of one element."""
        entry = self.source.entry(name) if self.source is not None else None
        return entry.dtype.itemsize if entry is not None and entry.dtype is not None else promised

    def _stored(self, spec: MatrixSpec) -> str:
        """The one format of the parts, checked."""
        if self.source is None:
            return self._promised(spec.role)
        formats = {part.stem: self._check_part(part, spec) for group in spec.groups for part in group}
        first, stored = next(iter(formats.items()))
        other = next((stem for stem, found in formats.items() if found not in (None, stored)), None)
        if stored is not None and other is not None:
            self.problems.append(f"{first} is stored as {stored} and {other} as {formats[other]}; must be one format")
        return stored or self._promised(spec.role)

    def _promised(self, role: str) -> str:
        if role == EXPERT:
            return {"fp4": FP4_BLOCK32, "fp8": FP8_BLOCK128}.get(self.config.expert_dtype, PLAIN)
        return FP8_BLOCK128 if role == LINEAR and self.config.quantised else PLAIN

    def _check_part(self, part: Part, spec: MatrixSpec) -> str | None:
        """Its format, or None where something is wrong."""
        name = f"{part.stem}.weight"
        entry = self._find(name)
        if entry is None:
            return None
        found = format_of(entry)
        if found is None or found not in _ALLOWED[spec.role]:
            self.problems.append(f"{self._own(name)} is {entry.label}; must be {' or '.join(_ALLOWED[spec.role])}")
            return None
        logical = (part.rows, spec.columns)
        self._check_shape(name, entry, (part.rows, spec.columns // 2) if found == FP4_BLOCK32 else logical)
        if found != PLAIN:
            self._check_scale(part.stem, entry, Weight.scale_shape(logical, found))
        return found

    def _check_scale(self, stem: str, weight: Entry, shape: tuple[int, ...]) -> None:
        name = f"{stem}.scale"
        entry = self._find(name, because=f"{stem}.weight is {weight.label} and means nothing without it")
        if entry is None:
            return
        if entry.dtype not in SCALES:
            self.problems.append(f"{name} is {entry.label}; must be F8_E8M0")
        self._check_shape(name, entry, shape)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if self.source is None:
            return
        entry = self._find(name)
        if entry is None:
            return
        if entry.dtype not in dtypes:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.problems.append(f"{self._own(name)} is {entry.label}; must be {words}")
        self._check_shape(name, entry, shape)

    def _check_shape(self, name: str, entry: Entry, shape: tuple[int, ...]) -> None:
        if entry.shape != shape:
            self.problems.append(f"{self._own(name)} has shape {list(entry.shape)}; must be {list(shape)}")

    def _own(self, name: str) -> str:
        return self.source.own_name(name) if self.source is not None else name

    def _find(self, name: str, because: str = "") -> Entry | None:
        assert self.source is not None
        self.used.append(name)
        entry = self.source.entry(name)
        own = self._own(name)
        if entry is None and own not in self.missing:  # transformers keeps a layer's experts in one tensor
            self.missing.append(own)
            self.problems.append(f"{own} is missing" + (f"; {self._advice(name, because)}" if self._early() else ""))
        return entry

    def _early(self) -> bool:
        """Looking for the nearest name is slow among 69,000: only the first few are looked for."""
        return len(self.missing) <= 3

    def _advice(self, name: str, because: str) -> str:
        assert self.source is not None
        close = nearest(self.source, name)
        return because or (f"the nearest present is {close}" if close else "nothing like it is present")

    def check(self) -> None:
        """Everything was as it must be.

        Raises:
            ModelError: with every problem (the first eight, and how many more).
        """
        if not self.problems:
            return
        shown = self.problems[:8]
        if len(self.problems) > len(shown):
            shown = [*shown, f"and {len(self.problems) - len(shown)} more"]
        kinds = "tensors are missing" if len(self.missing) == len(self.problems) else "tensors are missing or wrong"
        raise ModelError(
            f"the checkpoint does not fit its configuration: {kinds}",
            asked=self.source.label if self.source is not None else "the configuration",
            found=shown,
            do="check that config.json and the weights come from the same, complete checkpoint",
        )
