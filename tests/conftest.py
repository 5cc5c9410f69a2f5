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

        # One thread: the tests' tensors are tiny, workers of pytest-xdist share the cores, and two OpenMP
        # threads that spin for each other on a busy machine made the engine's tests twenty times slower.
        torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch only files that say ``torchfree`` are imported, and folders with such files, since a conftest
    may need it too; how many files were passed over is said after collection."""
    global _not_collected
    if HAS_TORCH:
        return None
    if collection_path.is_dir():
        tests = list(collection_path.rglob("test_*.py"))
        if any(_says_torchfree(path) for path in tests):
            return None
        _not_collected += len(tests)
        return True
    if not collection_path.match("test_*.py") or _says_torchfree(collection_path):
        return None
    _not_collected += 1
    return True


def _says_torchfree(path: Path) -> bool:
    return "pytest.mark.torchfree" in path.read_text(encoding="utf-8")


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
