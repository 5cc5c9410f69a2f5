"""The CPU simulator's captures: they replay, and the known misbehaviours of torch_musa 2.7.1 bite."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from halma.backends.musa.graphs import EXECUTABLES
from halma.backends.musa.simulator.faults import CEILING
from tests.simulated.children import findings


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return findings("tests.simulated.graph_program")


def test_a_capture_runs_nothing_and_replays(found: dict[str, Any]) -> None:
    assert found["replays"] == [0.0, 2.0, 5.0]
    assert "needs a capture that ended well" in found["after reset"][0]


def test_captures_are_refused_as_a_driver_does(found: dict[str, Any]) -> None:
    assert "the default stream cannot be captured" in found["default stream"]
    assert found["joined"] == ""
    for name in ("host read", "host wait", "pageable copy", "mask"):
        assert "previous error during capture" in found[name], name
    assert "unjoined work" in found["unjoined"]
    assert "previous error during capture" in found["event from outside"]
    assert "none of global, thread_local and relaxed" in found["unknown mode"]
    assert "The MUSA Graph is empty" in found["empty"]
    assert found["usable afterwards"] == ""


def test_another_threads_wait_breaks_a_capture_in_the_global_mode_alone(found: dict[str, Any]) -> None:
    assert "previous error during capture" in found["global mode"]
    assert found["thread mode"] == ""


def test_reset_does_not_give_the_pool_back(found: dict[str, Any]) -> None:
    kept, released = found["kept"], found["released"]
    assert all(later - earlier == 1 << 20 for earlier, later in itertools.pairwise(kept)), kept
    assert len(set(released)) == 1, released


def test_the_executable_after_the_last_one_fails(found: dict[str, Any]) -> None:
    filled, error = found["ceiling"]
    assert CEILING == 2048
    assert filled
    assert "illegal memory access" in error
    assert found["one less"] == ""


@pytest.mark.nightly
@pytest.mark.invariant("G21")
def test_without_the_budget_the_driver_fails() -> None:
    captures, error = findings("tests.simulated.graph_program", "no budget")["captures"]
    assert EXECUTABLES < captures < CEILING + 1
    assert "illegal memory access" in error


@pytest.mark.nightly
@pytest.mark.invariant("G21", control=True)
def test_the_budget_refuses_before_the_driver_fails() -> None:
    captures, error = findings("tests.simulated.graph_program", "budget")["captures"]
    assert captures <= EXECUTABLES
    assert "no more graphs can be captured" in error
