"""Every test of this folder runs without gradients, as programs do, and leaves the thread clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from halma.backends.cpu.backend import CpuBackend
from halma.hal.graph.current import current_recorder, current_scope, open_captures


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture(autouse=True)
def _no_grad_and_nothing_left_behind() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert not _get_current_dispatch_mode_stack() and not torch.overrides._get_current_function_mode_stack()
    assert current_recorder() is None and not open_captures and current_scope() is None
