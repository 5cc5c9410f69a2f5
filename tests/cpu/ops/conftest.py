"""Tests of the families below run twice: with our own CPU routes, and with the references that they stand in for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halma.hal.dispatch import table
from halma.ops import families as _families  # noqa: F401  (defines every op)
from halma.ops.routes import register_routes
from tests.cpu.ops import checks

register_routes(table.add_route)

_BOTH = ("attention", "cache", "compressor", "hyper_connection", "linear", "norm", "routing")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = any("chosen_routes" in mark.args for mark in metafunc.definition.iter_markers("parametrize"))
    if metafunc.module.__name__.rpartition("test_")[2] in _BOTH and not named:
        metafunc.parametrize("chosen_routes", ["own", "reference"], indirect=True)


@pytest.fixture(autouse=True)
def chosen_routes(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which routes ``run`` and ``check_contract`` take."""
    chosen: str = getattr(request, "param", "own")
    checks.forced_routes.clear()
    if chosen == "reference":
        checks.forced_routes.update({name: "reference" for name in table.ops})
    yield chosen
    checks.forced_routes.clear()
