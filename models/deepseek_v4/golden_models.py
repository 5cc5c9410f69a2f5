"""Where a golden case's model comes from: the case itself, or a tiny checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from halma.hal.backend import Backend
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_case, load_checkpoint
from halma.models.deepseek_v4.golden import CaseFile, CaseModel, Loader
from halma.models.deepseek_v4.load import resolve_model


def loader_for(path: Path, model: str, backend: Backend) -> Loader:
    """A loader for the case at ``path``; ``model`` serves the cases that bring no weights."""
    case = CaseFile(path)

    @functools.cache
    def load(arithmetic: str, carrier: torch.dtype) -> CaseModel:
        options = LoadOptions(carrier=carrier, arithmetic=arithmetic, device=backend.device.torch_device, drafter=False)
        loaded = load_case(path, options) if case.random else load_checkpoint(resolve_model(model).path, options)
        return CaseModel(loaded.config, loaded.weights)

    return load
