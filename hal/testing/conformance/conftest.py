"""Every test of the suite runs without gradients, with fixed seeds and default settings, and leaves nothing open."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.graph.breakable import counters
from halma.hal.graph.current import current_recorder, current_scope, open_captures, open_scopes
from halma.hal.settings import OF_THE_MACHINE, PREFIX
from halma.hal.testing.conformance.capturing import Make
from halma.hal.testing.conformance.toys import Toy, needs_capture
from halma.hal.testing.ranks import RankPools
from halma.hal.workspace import Workspace


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What shows internals of the CPU backend is not asked of another one."""
    name: str | None = config.getoption("--halma-backend")
    return True if collection_path.match("test_cpu_*.py") and name not in (None, "cpu") else None


@pytest.fixture(autouse=True)
def no_gradients_and_nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that leaves a capture open would blame the next one."""
    for name in [name for name in os.environ if name.startswith(PREFIX) and name not in OF_THE_MACHINE]:
        monkeypatch.delenv(name)
    random.seed(0)
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        yield
    assert current_recorder() is None and not open_captures and current_scope() is None


@pytest.fixture
def capturing(halma_backend: Backend) -> Backend:
    """The backend, where it can capture; the test is skipped in the backend's own words where it cannot.

    One that declares the capability and then cannot is at fault (B8).
    """
    reason = halma_backend.graphs.unsupported()
    if reason is not None:
        if halma_backend.capabilities.graph_capture:
            pytest.fail(f"the capability graph_capture is declared, and yet: {reason}")
        pytest.skip(reason)
    return halma_backend


@pytest.fixture
def toy(halma_backend: Backend) -> Iterator[Toy]:
    """A program that can have breaks, fresh counters, and nothing left open behind the test."""
    needs_capture(halma_backend, segments=True)
    counters.clear()
    yield Toy(halma_backend)
    gc.collect()
    assert current_scope() is None and not open_captures and not open_scopes


@pytest.fixture
def listing(capturing: Backend) -> Backend:
    """The backend, where the host values of a captured graph can be listed."""
    found = capturing.capabilities.graph_parameters
    if not found:
        pytest.skip(f"capability graph_parameters is {found}")
    return capturing


@pytest.fixture(scope="session")
def make(halma_backend: Backend) -> Make:
    """``make(checked=...)``: an empty workspace on the backend's device."""
    return partial(Workspace, halma_backend.device.torch_device)


@pytest.fixture(scope="session")
def all_ranks(halma_backend: Backend, halma_rank_pools: RankPools) -> RankPools:
    """Pools of rank processes by world size, for a backend whose ranks can share memory."""
    reason = halma_backend.collectives.unsupported() or halma_backend.memory.not_exportable()
    if reason is None and not halma_backend.capabilities.ipc:
        reason = f"capability ipc is {halma_backend.capabilities.ipc}"
    if reason is not None:
        pytest.skip(reason)
    return halma_rank_pools


@pytest.fixture
def ranks(all_ranks: RankPools, halma_backend: Backend) -> RankPools:
    """As ``all_ranks``, where calls are captured too."""
    needs_capture(halma_backend)
    return all_ranks
