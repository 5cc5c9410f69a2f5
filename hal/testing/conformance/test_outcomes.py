"""How a capture ends: captured, inert or failed, wherever it throws; and the switch."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from halma.hal.errors import CaptureError, HalmaError
from halma.hal.graph.breakable import CaptureMode, Outcome, counters
from halma.hal.graph.breaks import Cell, break_here, break_point
from halma.hal.graph.current import current_scope, note_failure, open_captures, open_scopes
from halma.hal.graph.retire import waiting
from halma.hal.testing.conformance.recording import Injected
from halma.hal.testing.conformance.toys import (
    PIECEWISE,
    Program,
    Toy,
    one_break,
)
from halma.hal.testing.forks import script

FULL = CaptureMode.FULL


# -- the three outcomes (G3) ------------------------------------------------------------------------------


POINTS = [
    ("Begin", 1), ("End", 1), ("Instantiate", 1),
    ("Begin", 2), ("End", 2), ("Instantiate", 2),
    ("model before", 0), ("model after", 0), ("break", 0), ("op", 0), ("copy", 0),
]  # fmt: skip


def throwing(toy: Toy, point: str, *, swallow: bool) -> Program:
    """The program with one break that raises at ``point``; nothing runs for real after that."""

    def raises(name: str) -> None:
        if point == name and current_scope() is not None:
            raise Injected(name)

    def double(x: torch.Tensor) -> torch.Tensor:
        raises("break")
        if point == "copy" and current_scope() is not None:
            return torch.zeros(SIZE_MISMATCH, device=x.device)
        return x * 2

    def program() -> torch.Tensor:
        raises("model before")
        x = toy.plus(toy.x, 1.0)
        doubled = x
        cell = Cell(toy.full(0.0)) if point == "copy" else Cell()
        try:
            with break_point(out=cell, name="double") as host:
                doubled = host(double, x)
            if point == "op" and current_scope() is not None:
                error = Injected("op")
                note_failure(error)
                raise error
        except (Injected, HalmaError):
            if not swallow:
                raise
        raises("model after")
        return toy.plus(doubled, 3.0)

    return program


SIZE_MISMATCH = 3


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(("point", "nth"), POINTS, ids=lambda value: str(value))
def test_wherever_a_capture_throws_the_state_is_clean_and_the_first_error_is_shown(
    toy: Toy, point: str, nth: int, swallow: bool
) -> None:
    program = throwing(toy, point, swallow=swallow)
    toy.plan(program)
    graph = toy.graph()
    if nth:
        toy.backend.graphs.fail = {point: nth}
    with pytest.raises((Injected, CaptureError), match=point if point != "copy" else "does not fit") as caught:
        with toy.scope(graph):
            graph.set_outputs(program())
    assert graph.outcome is Outcome.FAILED and graph.error is caught.value and not graph.segments
    assert current_scope() is None and not open_captures and not open_scopes
    assert toy.backend.graphs.live == 0 and waiting() == 0
    with pytest.raises(CaptureError, match="failed capture"):
        graph.outputs()
    with pytest.raises(CaptureError, match="failed capture"):
        graph.replay()
    assert toy.workspace.path() == "main" and counters.scopes_failed == 1
    toy.device.synchronize()
    toy.backend.graphs.fail = {}
    if swallow:  # an explicit reset forgets the failure too; without one the next scope does
        graph.reset()
        assert graph.outcome is Outcome.EMPTY and graph.error is None
    with toy.scope(graph):
        graph.set_outputs(one_break(toy)())
    assert graph.error is None and toy.replay(graph, 10.0) == [25.0]


@pytest.mark.invariant("G3")
def test_a_failed_capture_closes_the_workspace_scopes_that_it_left_open(toy: Toy) -> None:
    def program(throws: bool) -> torch.Tensor:
        node = toy.workspace.enter("layer")
        x = toy.plus(toy.x, 1.0)
        if throws:
            raise Injected("amid a layer")
        toy.workspace.leave(node)
        return x

    toy.plan(lambda: program(False))
    with pytest.raises(Injected, match="amid"):
        toy.capture(lambda: program(True), FULL)
    assert toy.workspace.path() == "main" and toy.capture(lambda: program(False), FULL).captured


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("point", ["Begin", "End"])
def test_after_a_failed_break_a_program_that_swallows_it_cannot_go_on_to_replay_fork_or_break(
    toy: Toy, point: str
) -> None:
    refused: list[BaseException] = []
    other = Toy(toy.backend)
    inner = other.capture(lambda: other.plus(other.x, 1.0), FULL)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        for attempt in (break_here, break_here, inner.replay):
            try:
                attempt()
            except (Injected, CaptureError) as error:
                refused.append(error)
        return x

    toy.plan(lambda: toy.plus(toy.x, 1.0))
    toy.backend.graphs.fail = {point: 2 if point == "Begin" else 1}
    graph = toy.graph()
    with pytest.raises(Injected, match=point), toy.scope(graph):
        program()
    assert isinstance(refused[0], Injected) and len(refused) >= 2
    assert "comes after the capture failed" in str(refused[1])


@pytest.mark.invariant("G3")
def test_an_exception_swallowed_inside_the_scope_still_fails_it_and_the_first_is_shown(toy: Toy) -> None:
    toy.plan(lambda: toy.plus(toy.x, 1.0))
    graph = toy.graph()
    with pytest.raises(Injected, match="first"), toy.scope(graph):
        note_failure(Injected("first"))
        note_failure(Injected("second"))
        graph.set_outputs(toy.plus(toy.x, 1.0))
    assert graph.outcome is Outcome.FAILED and str(graph.error) == "first"
    with pytest.raises(CaptureError, match="first"):
        graph.outputs()


@pytest.mark.invariant("G3")
def test_a_later_error_does_not_hide_the_first_unless_it_names_it_as_its_cause(toy: Toy) -> None:
    toy.plan(lambda: toy.plus(toy.x, 1.0))
    first = Injected("first")
    with pytest.raises(Injected, match="first"), toy.scope(toy.graph()):
        note_failure(first)
        raise KeyError("later")
    with pytest.raises(KeyError, match="explained") as caught, toy.scope(toy.graph()):
        note_failure(first)
        raise KeyError("explained") from first
    assert caught.value.__cause__ is first
    with pytest.raises(KeyboardInterrupt), toy.scope(toy.graph()):
        note_failure(first)
        raise KeyboardInterrupt


@pytest.mark.invariant("G3", control=True)
def test_an_exception_that_the_layer_never_saw_is_the_programs_own_business(toy: Toy) -> None:
    def program() -> torch.Tensor:
        try:
            raise KeyError("a look-up of the model's own")
        except KeyError:
            return toy.plus(toy.x, 1.0)

    assert toy.replay(toy.capture(program), 1.0) == [2.0]


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_an_inert_scope_runs_the_program_once_without_a_call_to_the_backend(toy: Toy, mode: CaptureMode) -> None:
    program = one_break(toy) if mode is PIECEWISE else lambda: toy.plus(toy.x, 20.0)
    toy.plan(program)
    graph = toy.graph()
    with toy.scope(graph, mode, enabled=False, why_off="HALMA_GRAPH_DRAFT=0") as scope:
        graph.set_outputs(program())
    assert toy.backend.since() == [] and scope.why_inert == "HALMA_GRAPH_DRAFT=0"
    assert graph.outcome is Outcome.INERT and toy.first(graph.outputs()) == [15.0 if mode is PIECEWISE else 25.0]
    with pytest.raises(CaptureError, match="inert"):
        graph.replay()
    assert (counters.scopes_inert, counters.scopes_full, counters.scopes_piecewise) == (1, 0, 0)
    assert counters.breaks_registered == counters.segments_captured == 0


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("missing", ["graph_capture", "graph_segments"])
def test_a_backend_that_cannot_makes_the_scope_inert_with_its_reason(toy: Toy, missing: str) -> None:
    from dataclasses import replace

    if missing == "graph_segments":
        toy.backend.capabilities = replace(toy.backend.capabilities, graph_segments=False)
    else:
        toy.backend.graphs.unsupported = lambda: "graph_capture is off"
    ran: list[int] = []
    graph = toy.graph()
    toy.workspace.seal()
    with toy.scope(graph) as scope:
        with break_point() as host:
            host(lambda: ran.append(1))
    assert scope.why_inert is not None and missing in scope.why_inert
    assert graph.outcome is Outcome.INERT and ran == [1] and toy.backend.since() == []


CHILD = """
import json, sys, torch
from halma.hal.graph.breakable import counters
from halma.hal.registry import default_registry
from halma.hal.settings import settings
from halma.hal.testing.conformance.toys import Toy, one_break

toy = Toy(default_registry().select(sys.argv[1]))
program, graph = one_break(toy), toy.graph()
with torch.no_grad():
    toy.plan(program)
    with toy.backend.graphs.counting() as counts:
        with toy.scope(graph, enabled=settings().graph):
            graph.set_outputs(program())
found = counts()
print(json.dumps({
    "outcome": graph.outcome.value, "calls": toy.backend.since(), "reached": counters.breaks_reached,
    "work": [found.kernels, found.copies], "out": toy.first(graph.outputs()) if graph.outcome.value == "inert" else [],
}))
"""


def child(backend: str, switch: str) -> dict[str, Any]:
    done = script(CHILD, backend, environment={**os.environ, "HALMA_GRAPH": switch}).end(120)
    assert done.code == 0, done.err
    return json.loads(done.out)  # empty, and so an error, if the child ran nothing


@pytest.mark.invariant("G4")
def test_the_switch_in_a_child_process_makes_a_capable_backend_run_once_and_eagerly(toy: Toy) -> None:
    found = child(toy.backend.name, "0")
    assert found["outcome"] == "inert" and found["calls"] == [] and found["out"] == [15.0]
    assert found["work"] == [3, 0], "add, multiply, add: once each, nothing copied back"
    assert found["reached"] == 2, "the break of the dry run and that of the one run"


@pytest.mark.invariant("G4", control=True)
def test_without_the_switch_the_child_captures(toy: Toy) -> None:
    found = child(toy.backend.name, "1")
    assert found["outcome"] == "captured" and found["calls"] == ["Begin", "End", "Instantiate"] * 2
