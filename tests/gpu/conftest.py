"""Tests that need a GPU: collected only where ``--halma-backend`` names a backend that is not the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halma.hal.backend import Backend


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A row of the CPU neither collects nor skips them; files of one vendor belong to its backend."""
    name = config.getoption("--halma-backend")
    if name in (None, "cpu"):
        return True
    if collection_path.match("test_rank_processes.py") and torch.accelerator.device_count() < 2:
        return True
    return True if collection_path.match("test_cuda_*.py") and name != "cuda" else None


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def backend(halma_backend: Backend) -> Backend:
    """The backend under test."""
    return halma_backend
