"""Roles on a GPU: rings whose ranks are streams of one process, and processes with a GPU each."""

from __future__ import annotations

import pytest

from halma.hal.backend import Backend


@pytest.fixture(scope="session")
def gpu(halma_backend: Backend) -> Backend:
    """A backend that launches kernels."""
    reason = halma_backend.kernels.unsupported()
    if reason is not None:
        pytest.skip(reason)
    return halma_backend
