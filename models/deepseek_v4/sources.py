"""Where tensors come from: files, a dict in memory, either under transformers' names. All speak published names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.names import transformers_place
from halma.models.deepseek_v4.tensor_files import Entry

Index = slice | int


class TensorSource(Protocol):
    """Tensors by published name, read whole or in part."""

    @property
    def label(self) -> str:
        """What to call it in a message."""
        ...

    def names(self) -> Collection[str]:
        """The names it holds, in its own vocabulary."""
        ...

    def own_name(self, name: str) -> str:
        """Its own name for a published name."""
        ...

    def entry(self, name: str) -> Entry | None:
        """Dtype and shape of a published tensor, or None where it is not there. Reads no data."""
        ...

    def read(self, name: str, *index: Index) -> torch.Tensor:
        """The tensor, or the part that ``index`` picks in the published tensor. May share memory."""
        ...


class FileSource:
    """Tensors in safetensors files, opened when first needed.

    Args:
        entries: from :meth:`Shards.entries`.
        label: the directory or file.

    Use as a context manager: files stay open until its end, and so does memory that tensors share with them.
    """

    def __init__(self, entries: Mapping[str, Entry], label: str) -> None:
        self.label = label
        self._entries = entries
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def own_name(self, name: str) -> str:
        return name

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def read(self, name: str, *index: Index) -> torch.Tensor:
        path = self._entries[name].file
        assert path is not None
        try:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = safe_open(str(path), framework="pt")
            return file.get_slice(name)[index] if index else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                "a tensor cannot be read", asked=f"{name} in {path}", found=str(error), do="download the file again"
            ) from error


class DictSource:
    """Tensors in memory, published names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], label: str = "tensors in memory") -> None:
        self.label = label
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def own_name(self, name: str) -> str:
        return name

    def entry(self, name: str) -> Entry | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        return Entry(tensor.dtype, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def read(self, name: str, *index: Index) -> torch.Tensor:
        return self._tensors[name][index] if index else self._tensors[name]


class TransformersSource:
    """Another source whose names are transformers', perhaps behind a prefix (``w.`` in golden cases)."""

    def __init__(self, base: TensorSource, prefix: str = "") -> None:
        self._base, self._prefix = base, prefix
        self._names = [name.removeprefix(prefix) for name in base.names() if name.startswith(prefix)]

    @property
    def label(self) -> str:
        return self._base.label

    def names(self) -> Collection[str]:
        return self._names

    def own_name(self, name: str) -> str:
        place = transformers_place(name)
        return name if place is None else place.tensor

    def entry(self, name: str) -> Entry | None:
        place = transformers_place(name)
        whole = self._base.entry(self._prefix + place.tensor) if place is not None else None
        if place is None or whole is None or place.expert is None:
            return whole
        if len(whole.shape) != 3 or place.expert >= whole.shape[0] or (place.half is not None and whole.shape[1] % 2):
            return Entry(whole.dtype, whole.label, (0, *whole.shape), whole.file)  # no expert to be had: a wrong shape
        _, rows, columns = whole.shape
        return Entry(whole.dtype, whole.label, (rows if place.half is None else rows // 2, columns), whole.file)

    def read(self, name: str, *index: Index) -> torch.Tensor:
        place = transformers_place(name)
        assert place is not None
        tensor = self._prefix + place.tensor
        if place.expert is None:
            return self._base.read(tensor, *index)
        entry = self.entry(name)
        assert entry is not None
        rows = index[0] if index else slice(0, entry.shape[0])
        assert isinstance(rows, slice)
        start, stop, _ = rows.indices(entry.shape[0])
        offset = entry.shape[0] * (place.half or 0)
        return self._base.read(tensor, place.expert, slice(start + offset, stop + offset), *index[1:])


def nearest(source: TensorSource, name: str) -> str:
    """A present name that looks most like a missing one, in the same layer where there is one; may be empty."""
    wanted = source.own_name(name)
    group = _group(wanted)
    near = [other for other in source.names() if _group(other) == group] or list(source.names())[:1000]
    return next(iter(difflib.get_close_matches(wanted, near, n=1, cutoff=0.5)), "")


def _group(name: str) -> tuple[str, ...]:
    """The layer part of a name: the words up to the first number."""
    words = name.split(".")
    numbers = [position for position, word in enumerate(words) if word.isdigit()]
    return tuple(words[: numbers[0] + 1]) if numbers else ()


def unused(source: TensorSource, used: Iterable[str]) -> list[str]:
    """Names in the source that belong to no published tensor of ``used``."""
    known = {source.own_name(name) for name in used}
    return sorted(name for name in source.names() if name not in known)
