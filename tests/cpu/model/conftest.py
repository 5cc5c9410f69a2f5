"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4 import loader


@pytest.fixture(scope="session")
def all_ranks() -> Iterator[RankPools]:
    """Processes that share a model, by how many they are."""
    pools = RankPools("cpu")
    yield pools
    pools.close()


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a byte of tensor data is read."""

    def refuse(*_: Any) -> None:
        raise AssertionError("data was read although the checkpoint is bad")

    monkeypatch.setattr(loader.Loader, "_read", refuse)
