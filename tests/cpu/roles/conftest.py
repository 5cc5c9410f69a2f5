"""What tests of roles share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halma.hal.testing.ranks import RankPools


@pytest.fixture(scope="module")
def all_ranks() -> Iterator[RankPools]:
    """Processes by their number."""
    pools = RankPools("cpu")
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
