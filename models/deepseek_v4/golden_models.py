"""Where a golden case's model comes from: the case itself, or a tiny checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from halma.hal.backend import Backend
from halma.models.deepseek_v4.checkpoint import Checkpoint
from halma.models.deepseek_v4.golden import CaseFile, CaseModel, Loader
from halma.models.deepseek_v4.load import resolve_model


def loader_for(path: Path, model: str, backend: Backend) -> Loader:
    """A loader for the case at ``path``; ``model`` serves the cases that bring no weights."""
    case = CaseFile(path)

    @functools.cache
    def load(arithmetic: str, carrier: torch.dtype) -> CaseModel:
        if case.random:
            checkpoint = Checkpoint.open_case(path)
        else:
            source = resolve_model(model)
            checkpoint = Checkpoint.open(source.path, config=source.config)
        device = backend.device.torch_device
        weights = checkpoint.load(carrier=carrier, arithmetic=arithmetic, dequantise=True, device=device)
        return CaseModel(checkpoint.config, weights)

    return load
