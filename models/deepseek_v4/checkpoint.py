"""Loads a checkpoint: checked whole before the first byte is read, so that nothing is ever half loaded.

The order of checks is from cheap to dear: index, configuration, does it fit (from these two alone), are all
files there and sound, is every tensor there with the right shape, and only then the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.drafter import require_mtp, with_drafter
from halma.models.deepseek_v4.layout import assemble
from halma.models.deepseek_v4.loader import Loader, Progress
from halma.models.deepseek_v4.preparation import LoadOptions, check_world
from halma.models.deepseek_v4.sizing import MemoryLimit, check_fit, human
from halma.models.deepseek_v4.sources import FileSource, TensorSource, TransformersSource, unused
from halma.models.deepseek_v4.survey import Survey
from halma.models.deepseek_v4.tensor_files import find_shards, read_header
from halma.models.deepseek_v4.weights import V4Weights

__all__ = [
    "Checkpoint",
    "LoadOptions",
    "Progress",
    "Sizes",
    "load_case",
    "load_checkpoint",
    "load_source",
    "require_mtp",
    "weight_sizes",
    "with_drafter",
]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model.

    Attributes:
        config: with ``drafter`` as the tensors have it.
        notes: what a user should know: tensors ignored, a drafter that cannot be run, weights not kept packed.
    """

    config: V4Config
    weights: V4Weights
    options: LoadOptions
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Bytes of a load: ``weights`` that stay, ``read`` from the files, ``buffer`` for the largest piece."""

    weights: int
    read: int
    buffer: int


def weight_sizes(config: V4Config, options: LoadOptions | None = None, source: TensorSource | None = None) -> Sizes:
    """Bytes that loading takes, from the configuration (or a source's headers) alone.

    Raises:
        ModelError: the model cannot be divided among ``options.world`` ranks.
    """
    options = options or LoadOptions()
    survey, weights = _survey(config, options, source)
    return Sizes(weights.nbytes, survey.read_bytes, survey.largest_read)


def load_checkpoint(
    directory: str | Path,
    options: LoadOptions | None = None,
    *,
    limits: Sequence[MemoryLimit] = (),
    state_bytes: int | Callable[[V4Config], int] = 0,
    kept_free: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Load a directory with ``config.json`` and safetensors files under the published names.

    Args:
        options: carrier, arithmetic, device, rank; see :class:`LoadOptions`.
        limits: memory that weights and state must fit into (:func:`host_limits`, the device's free memory).
        state_bytes: what else will be allocated beside the weights, or a function of the configuration.
        kept_free: bytes that must be left then, by what for.
        progress: called after every tensor.

    Raises:
        ModelError: anything wrong with configuration, files or tensors, or it does not fit.
    """
    options, directory = options or LoadOptions(), Path(directory)
    shards = find_shards(directory)
    config = V4Config.from_file(directory / "config.json")
    state = state_bytes(config) if callable(state_bytes) else state_bytes
    asked = str(directory) if shards.total_size is None else f"{directory} ({human(shards.total_size)} of tensors)"
    _check_fit(weight_sizes(config, options), state, kept_free, limits, asked)
    with FileSource(shards.entries(), str(directory)) as source:
        return load_source(
            config, source, options, limits=limits, state_bytes=state, kept_free=kept_free, progress=progress
        )


def load_case(
    path: str | Path, options: LoadOptions | None = None, *, prefix: str = "w.", progress: Progress | None = None
) -> Checkpoint:
    """Load the model that a golden case brings: transformers' names behind ``prefix``, configuration in the metadata.

    Raises:
        ModelError: the file holds no such model.
    """
    path = Path(path)
    config = case_config(path)
    with FileSource(read_header(path), str(path)) as files:
        return load_source(config, TransformersSource(files, prefix), options, progress=progress)


def case_config(path: Path) -> V4Config:
    """The configuration of the model that a golden case brings; nothing is loaded.

    Raises:
        ModelError: the file holds no such model.
    """
    if not path.is_file():
        raise ModelError(
            "the case does not exist", asked=str(path), found="no such file", do="give a .safetensors file"
        )
    read_header(path)
    metadata = _metadata(path)
    text = metadata.get("official_config") or metadata.get("config")
    try:
        raw = json.loads(text or "null")
    except json.JSONDecodeError as error:
        raise ModelError(
            "the case's configuration is not valid JSON", asked=str(path), found=str(error), do="make the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(
            "the case brings no configuration",
            asked=str(path),
            found=f"metadata keys: {', '.join(sorted(metadata)) or 'none'}",
            do="give a file whose metadata has official_config or config",
        )
    return V4Config.from_dict(raw, f"{path}, metadata")


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:  # read_header has checked it
        raw = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = raw.get("__metadata__")
    return found if isinstance(found, dict) else {}


def load_source(
    config: V4Config,
    source: TensorSource,
    options: LoadOptions | None = None,
    *,
    limits: Sequence[MemoryLimit] = (),
    state_bytes: int = 0,
    kept_free: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Load from any :class:`TensorSource`; as :func:`load_checkpoint` otherwise."""
    options = options or LoadOptions()
    config, notes = with_drafter(config, source)
    survey, planned = _survey(config, options, source)
    survey.check()
    sizes = Sizes(planned.nbytes, survey.read_bytes, survey.largest_read)
    _check_fit(sizes, state_bytes, kept_free, limits, source.label)
    notes += _notes(survey, source) if options.experts is True else []
    loader = Loader(options, source, survey.read_bytes, progress)
    with torch.no_grad():
        weights = assemble(config, loader, mtp=options.drafter, experts=options.experts)
    return Checkpoint(config, weights, options, tuple(notes))


def _survey(config: V4Config, options: LoadOptions, source: TensorSource | None) -> tuple[Survey, V4Weights]:
    check_world(config, options.world)
    survey = Survey(config, options, source)
    return survey, assemble(config, survey, mtp=options.drafter, experts=options.experts)


def _check_fit(
    sizes: Sizes, state_bytes: int, kept_free: Mapping[str, int] | None, limits: Sequence[MemoryLimit], asked: str
) -> None:
    needed = {"weights": sizes.weights, "state": state_bytes, "reading buffer": sizes.buffer, **(kept_free or {})}
    check_fit(needed, limits, asked=asked)


def _notes(survey: Survey, source: TensorSource) -> list[str]:
    notes: list[str] = []
    extra = [name for name in unused(source, survey.used) if not name.startswith("mtp.")]
    if extra:
        notes.append(f"{len(extra)} tensors are unknown and were ignored: {', '.join(extra[:3])}")
    if survey.unpacked:
        notes.append(
            f"{len(survey.unpacked)} weights are plain, because a slice or fusion cuts their blocks of scales: "
            + ", ".join(survey.unpacked[:3])
        )
    return notes
