"""The safetensors files of a checkpoint: found, their headers checked, nothing read yet."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config_fields import read_json_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_HEADER = 100 * 1024 * 1024

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Entry:
    """A stored tensor: ``dtype`` is None for a type that halma does not know, ``label`` is the file's word."""

    dtype: torch.dtype | None
    label: str
    shape: tuple[int, ...]
    file: Path | None = None


@dataclass(frozen=True)
class Shards:
    """Where a checkpoint's tensors are, as its index says; ``weight_map`` is None for a single file."""

    directory: Path
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None = None
    total_size: int | None = None

    def check_present(self) -> None:
        """Every file exists.

        Raises:
            ModelError: naming the missing shards.
        """
        missing = [path.name for path in self.files if not path.is_file()]
        if missing:
            raise ModelError(
                f"{len(missing)} of the checkpoint's {len(self.files)} files are missing",
                asked=str(self.directory / INDEX),
                found=[f"no file {name}" for name in missing[:5]] + _more(len(missing) - 5),
                do="download the missing files into the same directory",
            )

    def entries(self) -> dict[str, Entry]:
        """Every tensor by name, from the headers.

        Raises:
            ModelError: a file is missing, truncated, no safetensors file, or lacks what the index says it has.
        """
        self.check_present()
        entries: dict[str, Entry] = {}
        for path in self.files:
            entries.update(read_header(path))
        lost = [
            f"{name} is not in {shard}"
            for name, shard in (self.weight_map or {}).items()
            if name not in entries or entries[name].file != self.directory / shard
        ]
        if lost:
            raise ModelError(
                "the index and the files of the checkpoint disagree",
                asked=str(self.directory / INDEX),
                found=lost[:5] + _more(len(lost) - 5),
                do="download the index and the files again, from one revision",
            )
        return entries


def _more(count: int) -> list[str]:
    return [f"and {count} more"] if count > 0 else []


def find_shards(directory: Path) -> Shards:
    """The files of a checkpoint directory; opens the index alone.

    Raises:
        ModelError: no such directory, no weights in it, or a damaged index.
    """
    if not directory.is_dir():
        raise ModelError(
            "the model directory does not exist",
            asked=str(directory),
            found="a file" if directory.exists() else "nothing of that name",
            do="give a directory with config.json and safetensors files",
        )
    if (directory / INDEX).exists():
        return _from_index(directory)
    if (directory / SINGLE).exists():
        return Shards(directory, (directory / SINGLE,))
    present = sorted(path.name for path in directory.iterdir())
    raise ModelError(
        "the directory holds no weights",
        asked=str(directory),
        found=f"neither {SINGLE} nor {INDEX}; it holds: {', '.join(present[:8]) or 'nothing'}",
        do="download the checkpoint's safetensors files into it",
    )


def _from_index(directory: Path) -> Shards:
    path = directory / INDEX
    raw = read_json_object(path, "the checkpoint's index")
    found = raw.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(
            "the checkpoint's index holds no weight_map",
            asked=str(path),
            found=f"keys: {', '.join(sorted(raw)) or 'none'}",
            do="download the index again",
        )
    names = sorted(set(found.values()))
    outside = [name for name in names if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", "..")]
    if outside:  # an index must not be able to point anywhere else on this machine
        raise ModelError(
            "the checkpoint's index points outside its directory",
            asked=str(path),
            found=outside[:5],
            do="shard names must be plain file names; do not trust this checkpoint",
        )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = int(total) if isinstance(total, (int, float)) and math.isfinite(total) else None
    return Shards(directory, tuple(directory / name for name in names), found, size)


def read_header(path: Path) -> dict[str, Entry]:
    """Tensors of one safetensors file; reads its header alone and checks it against the file's length.

    Raises:
        ModelError: truncated, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise _damaged(path, f"{size} bytes, whose header would take {length} bytes")
            raw = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise ModelError(
            "a checkpoint file cannot be read", asked=str(path), found=str(error), do="check it"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _damaged(path, "its header is not a JSON object")
    raw.pop("__metadata__", None)
    return {name: _entry(path, name, value, size - 8 - length) for name, value in raw.items()}


def _entry(path: Path, name: str, value: Any, available: int) -> Entry:
    try:
        label, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        if not (isinstance(label, str) and whole and begin <= end):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"the header's entry for {name} makes no sense: {value!r}") from error
    if end > available:
        raise _damaged(path, f"{name} ends at byte {end} of the data, and the file holds {available}")
    dtype = _DTYPES.get(label)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise _damaged(path, f"{name} is {label} {list(shape)}, and takes {end - begin} bytes")
    return Entry(dtype, label, shape, path)


def _damaged(path: Path, found: str) -> ModelError:
    return ModelError(
        "a checkpoint file is truncated or damaged", asked=str(path), found=found, do="download the file again"
    )
