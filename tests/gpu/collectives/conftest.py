"""Labs of ranks on one GPU, one a world size, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from halma.hal.backend import Backend
from halma.hal.collectives.contract import WORLD_SIZES
from tests.gpu.collectives.lab import Lab


@pytest.fixture(scope="session")
def gpu(halma_backend: Backend) -> Backend:
    """A backend that launches kernels."""
    reason = halma_backend.kernels.unsupported()
    if reason is not None:
        pytest.skip(reason)
    return halma_backend


@pytest.fixture(params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """Every world size that the kernels are written for."""
    return request.param


@pytest.fixture(scope="module")
def labs(gpu: Backend) -> Iterator[Callable[[int], Lab]]:
    """A lab by world size; its channel must come out of a test without a fault."""
    made: dict[int, Lab] = {}

    def lab(size: int) -> Lab:
        if size not in made:
            made[size] = Lab(gpu, size)
        return made[size]

    yield lab
    for one in made.values():
        one.synchronize()
        assert one.guards_hold()
        assert one.errors() == [None] * one.size
