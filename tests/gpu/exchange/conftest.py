"""A backend that launches kernels, and world sizes."""

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


@pytest.fixture(params=(2, 4, 8), ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """World sizes."""
    return request.param
