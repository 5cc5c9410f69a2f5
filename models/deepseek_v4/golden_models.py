"""Where a golden case's model comes from: the case itself, or a tiny checkpoint; and whether ranks can share it."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from halma.hal.backend import Backend
from halma.hal.errors import ModelError
from halma.models.deepseek_v4.checkpoint import LoadOptions, case_config, load_case, load_checkpoint
from halma.models.deepseek_v4.golden import CaseFile, CaseModel, Loader
from halma.models.deepseek_v4.load import resolve_model
from halma.models.deepseek_v4.preparation import check_world


def loader_for(path: Path, model: str, backend: Backend, *, rank: int = 0, world: int = 1) -> Loader:
    """A loader for the case at ``path``; ``model`` serves the cases that bring no weights."""
    case = CaseFile(path)

    @functools.cache
    def load(arithmetic: str, carrier: torch.dtype) -> CaseModel:
        device = backend.device.torch_device
        options = LoadOptions(carrier, arithmetic, device=device, rank=rank, world=world)
        loaded = load_case(path, options) if case.random else load_checkpoint(resolve_model(model).path, options)
        return CaseModel(loaded.config, loaded.weights)

    return load


def check_case(path: Path, model: str, world: int) -> None:
    """Whether ``world`` ranks can share the case's model and be held to its tolerance. Nothing is loaded.

    Raises:
        ModelError: no case, or no model for it; sizes that ``world`` does not divide, or a case with roundings.
    """
    case = CaseFile(path)
    config = case_config(path) if case.random else resolve_model(model).config
    try:
        check_world(config, world)
    except ModelError as error:
        raise ModelError(f"{path.stem}: {error}") from error
    if case.quantised and world > 1:
        raise ModelError(
            "the case holds the official roundings as one rank makes them",
            asked=f"{path}, on {world} ranks",
            found="an fp8 rounding takes its scale from 128 values, and ranks cut some of these blocks",
            do="--tp 1 for this case, and cases in exact arithmetic for ranks",
        )
