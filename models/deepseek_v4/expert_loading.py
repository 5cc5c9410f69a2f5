"""Loads what an FFN rank holds: some experts of every layer, and the shared one. Nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.drafter import with_drafter
from halma.models.deepseek_v4.layout import assemble_experts
from halma.models.deepseek_v4.loader import Loader, Progress
from halma.models.deepseek_v4.preparation import LoadOptions
from halma.models.deepseek_v4.sizing import MemoryLimit, check_fit
from halma.models.deepseek_v4.sources import FileSource, TensorSource
from halma.models.deepseek_v4.survey import Survey
from halma.models.deepseek_v4.tensor_files import find_shards
from halma.models.deepseek_v4.weights import FfnWeights, nbytes_of


@dataclass(frozen=True, eq=False)
class ExpertLayers:
    """Experts ``first`` .. ``last`` - 1 of a model; ``layers`` by number, the MTP modules' behind the rest."""

    config: V4Config
    layers: tuple[FfnWeights, ...]
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return nbytes_of(self.layers)


def load_experts(
    directory: Path,
    options: LoadOptions,
    part: tuple[int, int],
    *,
    limits: Sequence[MemoryLimit] = (),
    progress: Progress | None = None,
) -> ExpertLayers:
    """Of a checkpoint directory; ``part``: experts from, to.

    Raises:
        ModelError: anything wrong with configuration, files or tensors that are read, or it does not fit.
    """
    shards = find_shards(directory)
    config = V4Config.from_file(directory / "config.json")
    with FileSource(shards.entries(), str(directory)) as source:
        return experts_of(config, source, options, part, limits=limits, progress=progress)


def experts_of(
    config: V4Config,
    source: TensorSource,
    options: LoadOptions,
    part: tuple[int, int],
    *,
    limits: Sequence[MemoryLimit] = (),
    progress: Progress | None = None,
) -> ExpertLayers:
    """As :func:`load_experts`, of any source."""
    config, _ = with_drafter(config, source)
    first, last = part
    survey = Survey(config, options, source)
    planned = assemble_experts(config, survey, mtp=options.drafter, first=first, last=last)
    survey.check()
    needed = {"experts": nbytes_of(planned), "reading buffer": survey.largest_read}
    check_fit(needed, limits, asked=f"experts {first} to {last - 1} of {source.label}")
    loader = Loader(options, source, survey.read_bytes, progress)
    with torch.no_grad():
        layers = assemble_experts(config, loader, mtp=options.drafter, first=first, last=last)
    return ExpertLayers(config, layers, first, last)
