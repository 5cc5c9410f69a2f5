"""What all tests share: quiet threads, fixed seeds, no settings from outside, evidence by folder."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None
_not_collected = 0


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("halma.hal.testing.plugin") and not config.pluginmanager.has_plugin("halma"):
        raise pytest.UsageError("halma is not installed, so its entry points are missing: pip install -e .")
    if HAS_TORCH:
        import torch

        # Two cores in CI. Workers of pytest-xdist share them.
        torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch only files that say ``torchfree`` are imported; how many were not is in the header's summary."""
    global _not_collected
    if HAS_TORCH or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if "pytest.mark.torchfree" in collection_path.read_text(encoding="utf-8"):
        return None
    _not_collected += 1
    return True


def pytest_report_collectionfinish() -> str | None:
    return f"no torch: {_not_collected} test files that need it were not collected" if _not_collected else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE / "simulated" in item.path.parents and item.get_closest_marker("evidence") is None:
            item.add_marker(pytest.mark.evidence("simulated"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> Iterator[None]:
    random.seed(0)
    if HAS_TORCH:
        import torch

        torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HALMA_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of golden cases."""
    return HERE / "data" / "cases"
