"""What the backend found out about this process does not outlive a test."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest


@pytest.fixture(autouse=True)
def _forgotten() -> Generator[None]:
    yield
    if "tests.cpu.musa.fakes" in sys.modules:
        sys.modules["tests.cpu.musa.fakes"].forget()
