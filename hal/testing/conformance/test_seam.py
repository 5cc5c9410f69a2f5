"""The capture scope: what it refuses, how it ends, and what a failure leaves behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError, HalmaError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome, counters
from halma.hal.graph.breaks import Break, Cell, break_here, break_point
from halma.hal.graph.current import current_scope, note_failure, open_captures, open_scopes
from halma.hal.graph.retire import waiting
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.conformance.recording import Injected
from halma.hal.testing.conformance.toys import PIECEWISE, Program, Toy, needs_capture
from halma.hal.workspace import Workspace

FULL = CaptureMode.FULL


@pytest.fixture
def toy(halma_backend: Backend) -> Iterator[Toy]:
    """Without gradients, and with nothing left open behind the test."""
    needs_capture(halma_backend, segments=True)
    counters.clear()
    with torch.no_grad():
        yield Toy(halma_backend)
    gc.collect()
    assert current_scope() is None and not open_captures and not open_scopes


def one_break(toy: Toy) -> Callable[[], torch.Tensor]:
    """x + 1, a break that doubles, + 3; with a cell of its own for each capture."""

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=Cell(), name="double") as host:
            doubled = host(lambda x: x * 2, x)
        return toy.plus(doubled, 3.0)

    return program


# -- segments and replay (G1) -----------------------------------------------------------------------------


@pytest.mark.invariant("G1", control=True)
def test_without_a_break_it_is_one_segment_that_runs_nothing_until_its_replay(toy: Toy) -> None:
    seen = toy.full(-1.0)
    graph = toy.capture(lambda: torch.add(toy.x, 1.0, out=seen), FULL)
    assert toy.first(seen) == [-1.0], "a capture runs nothing"
    assert toy.backend.since() == ["Begin", "End", "Instantiate"]
    assert graph.captured and (len(graph.segments), len(graph.breaks), graph.mode) == (1, 0, FULL)
    assert toy.replay(graph, 5.0) == [6.0] and graph.replays == 1
    assert toy.replay(graph, 7.0) == [8.0] and toy.backend.since() == ["Replay", "Replay"]


@pytest.mark.invariant("G1", control=True)
@pytest.mark.parametrize("breaks", [1, 2, 7])
def test_there_is_one_segment_more_than_breaks(toy: Toy, breaks: int) -> None:
    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        for _ in range(breaks):
            break_here()
            x = toy.plus(x, 1.0)
        return x

    graph = toy.capture(program)
    assert len(graph.segments) == breaks + 1 and len(graph.breaks) == breaks
    assert toy.backend.since() == ["Begin", "End", "Instantiate"] * (breaks + 1)
    assert toy.replay(graph, 1.0) == [2.0 + breaks]
    assert toy.backend.since() == ["Replay"] * (breaks + 1)


@pytest.mark.invariant("G1")
@pytest.mark.parametrize("what", ["break", "segment", "lost break"])
def test_segments_that_do_not_match_the_breaks_are_refused_at_replay(toy: Toy, what: str) -> None:
    graph = toy.capture(one_break(toy))
    if what == "break":
        graph.breaks.append(Break("extra"))
    elif what == "segment":
        graph.segments.append(graph.segments[0])
    else:
        graph.breaks.clear()
    toy.backend.since()
    with pytest.raises(CaptureError, match="segments do not match"):
        graph.replay()
    assert toy.backend.since() == []
    if what == "segment":
        graph.segments.pop()


@pytest.mark.invariant("G1")
def test_a_break_that_was_made_and_not_entered_is_refused_by_name(toy: Toy) -> None:
    def program() -> torch.Tensor:
        break_point(name="forgotten")
        return toy.plus(toy.x, 1.0)

    toy.plan(program)
    with pytest.raises(CaptureError, match=r"break 'forgotten' at .*test_seam.py:\d+ was made and never entered"):
        toy.capture(program)


# -- nesting, containers, threads (G2) --------------------------------------------------------------------


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
def test_nesting_is_refused_before_any_backend_call_and_fails_the_outer_capture(toy: Toy, enabled: bool) -> None:
    inner = Toy(toy.backend)
    graph, second = toy.graph(), inner.graph()
    toy.plan(lambda: toy.plus(toy.x, 1.0))
    with (
        pytest.raises(CaptureError, match="open on this thread"),
        toy.scope(graph, enabled=enabled),
    ):
        with pytest.raises(CaptureError, match=r"open on this thread[\s\S]*toy"), inner.scope(second):
            pass
        assert current_scope() is not None and toy.backend.since() == ["Begin"] * enabled
    assert graph.outcome is Outcome.FAILED and second.outcome is Outcome.EMPTY


@pytest.mark.invariant("G2", control=True)
def test_scopes_one_after_another_are_fine(toy: Toy) -> None:
    program = one_break(toy)
    first, second = toy.capture(program), toy.capture(program)
    assert toy.replay(first, 10.0) == toy.replay(second, 10.0) == [25.0]


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("held", ["capture", "breaks"])
def test_a_container_that_holds_something_is_refused_before_any_backend_call(
    toy: Toy, enabled: bool, held: str
) -> None:
    graph = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    if held == "breaks":
        graph.reset()
        graph.breaks.append(Break("left over"))
    toy.backend.since()
    with pytest.raises(CaptureError, match="not empty"), toy.scope(graph, enabled=enabled):
        pass
    assert toy.backend.since() == [] and current_scope() is None


def in_a_thread(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` raises on a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("where", ["segment", "break"])
def test_a_second_thread_cannot_open_a_scope_also_not_between_segments(toy: Toy, enabled: bool, where: str) -> None:
    other, found = Toy(toy.backend), list[Any]()

    def capture_elsewhere() -> None:
        graph = BreakableGraph(toy.backend)

        def enter() -> None:
            with GraphCaptureScope(graph, other.workspace, enabled=enabled):
                pass

        found.append((in_a_thread(enter), graph.outcome))

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        if current_scope() is not None and where == "segment":
            capture_elsewhere()
        with break_point() as host:
            if current_scope() is not None and where == "break":
                host(capture_elsewhere)
        return toy.plus(x, 1.0)

    toy.plan(program)
    graph = toy.capture(program, enabled=enabled)
    assert isinstance(found[0][0], CaptureError) and "open on another thread" in str(found[0][0])
    assert "toy" in str(found[0][0]) and found[0][1] is Outcome.EMPTY
    assert graph.outcome is (Outcome.CAPTURED if enabled else Outcome.INERT)


@pytest.mark.invariant("G22")
def test_a_step_driven_by_two_threads_is_refused_to_the_second_with_both_named(toy: Toy) -> None:
    found = list[Any]()
    graph: BreakableGraph | None = None

    def second_step() -> None:
        if graph is not None and graph.captured:
            found.append(in_a_thread(graph.replay))

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point() as host:
            host(second_step)
        return toy.plus(x, 2.0)

    graph = toy.capture(program)
    assert toy.replay(graph, 10.0) == [13.0], "the first step is unharmed"
    text = str(found[0])
    assert isinstance(found[0], CaptureError) and "one active user" in text
    assert "a replay of toy on thread 'second'" in text and "on thread 'MainThread'" in text
    assert graph.replays == 1


@pytest.mark.invariant("G22", control=True)
def test_threads_that_take_turns_may_replay(toy: Toy) -> None:
    graph = toy.capture(one_break(toy))
    assert in_a_thread(graph.replay) is None and toy.replay(graph, 10.0) == [25.0] and graph.replays == 2


@pytest.mark.invariant("G22")
def test_a_graph_cannot_be_replayed_inside_a_break_of_its_own_workspace(toy: Toy) -> None:
    inner = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point() as host:
            host(lambda: inner.replay() and None)
        return x

    with pytest.raises(CaptureError, match=r"one active user[\s\S]*a replay of toy[\s\S]*a capture of toy"):
        toy.capture(program, allow_empty=True)
    assert toy.replay(inner, 1.0) == [2.0]


@pytest.mark.invariant("G22")
def test_a_replay_on_another_stream_waits_for_the_last_one(toy: Toy) -> None:
    graph = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    side = toy.device.new_stream("side")
    toy.replay(graph, 1.0)
    toy.backend.since()
    graph.replay(side)
    graph.replay(side)
    main = toy.device.current_stream().name
    assert toy.backend.since() == [f"Record {main}", "Wait side", "Replay", "Replay"]


@pytest.mark.invariant("G22")
def test_replaying_inside_a_capture_is_refused(toy: Toy) -> None:
    toy.plan(lambda: toy.plus(toy.x, 1.0))
    inner = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    graph = toy.graph()
    with pytest.raises(CaptureError, match="cannot be replayed inside a capture"), toy.scope(graph):
        inner.replay()
    assert graph.outcome is Outcome.FAILED


# -- destroys (G22) ---------------------------------------------------------------------------------------


@pytest.mark.invariant("G22")
@pytest.mark.parametrize("how", ["reset", "dropped"])
@pytest.mark.parametrize("where", ["segment", "break"])
def test_a_destroy_while_a_capture_is_open_comes_after_it(toy: Toy, how: str, where: str) -> None:
    def plain() -> torch.Tensor:
        return toy.plus(toy.x, 1.0)

    def program() -> torch.Tensor:
        if where == "segment":
            give_up()
        x = plain()
        with break_point() as host:
            if where == "break":
                host(give_up)
        return toy.plus(x, 1.0)

    def give_up() -> None:
        if how == "reset" and old:
            old[0].reset()
        old.clear()
        gc.collect()

    old: list[BreakableGraph] = []
    toy.plan(program)
    old.append(toy.capture(plain, FULL))
    toy.backend.since()
    graph = toy.capture(program)
    assert toy.backend.since() == ["Begin", "End", "Instantiate"] * 2 + ["Destroy"]
    assert graph.captured and toy.backend.graphs.live == 2 and waiting() == 0


@pytest.mark.invariant("G22", control=True)
def test_outside_a_capture_reset_destroys_every_segment_at_once(toy: Toy) -> None:
    graph = toy.capture(one_break(toy))
    toy.backend.since()
    graph.reset()
    assert toy.backend.since() == ["Destroy"] * 2 and toy.backend.graphs.live == 0
    assert graph.empty and graph.outcome is Outcome.EMPTY and graph.replays == 0
    with pytest.raises(CaptureError, match="nothing was captured"):
        graph.replay()


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
    with toy.scope(graph):
        graph.set_outputs(one_break(toy)())
    assert graph.error is None and toy.replay(graph, 10.0) == [25.0]


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
from halma.hal.testing.conformance.test_seam import one_break
from halma.hal.testing.conformance.toys import Toy

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
    run = subprocess.run(
        [sys.executable, "-c", CHILD, backend],
        capture_output=True,
        env={**os.environ, "HALMA_GRAPH": switch, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=120,
    )
    return json.loads(run.stdout)  # empty, and so an error, if the child ran nothing


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


# -- modes and counters (G5) ------------------------------------------------------------------------------


@pytest.mark.invariant("G5")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_full_capture_refuses_a_break_by_name_whether_or_not_it_is_on(toy: Toy, enabled: bool) -> None:
    program = one_break(toy)
    toy.plan(program)
    with pytest.raises(CaptureError, match=r"break 'double' at .*test_seam.py:\d+ cannot be part of a full capture"):
        toy.capture(program, FULL, enabled=enabled)
    assert "End" not in toy.backend.since()


@pytest.mark.invariant("G5", control=True)
def test_the_mode_shows_in_the_counters(toy: Toy) -> None:
    program = one_break(toy)
    graph = toy.capture(program)
    counters.clear()
    toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    assert (counters.scopes_full, counters.scopes_piecewise) == (1, 0)
    again = toy.capture(program)
    assert (counters.scopes_full, counters.scopes_piecewise) == (1, 1)
    assert (counters.breaks_reached, counters.breaks_registered, counters.segments_captured) == (1, 1, 3)
    toy.replay(graph, 1.0)
    toy.replay(again, 1.0)
    assert counters.replays == 2 and graph.replays == again.replays == 1
    assert GraphCaptureScope(graph, toy.workspace).mode is FULL, "the default"


# -- empty segments (G23), census, grad mode (G24) ---------------------------------------------------------


def idle(toy: Toy, where: str) -> Program:
    """A program with an empty segment."""

    def act() -> None:
        return None

    def ordinary() -> None:
        with break_point(name=where) as host:
            host(act)

    def program() -> torch.Tensor | None:
        if where == "all":
            return None
        if where == "before the first break":
            ordinary()
        x = toy.plus(toy.x, 1.0)
        if where == "between breaks":
            ordinary()
            ordinary()
        elif where == "after a marker":
            break_here()
            ordinary()
        if where != "after the last break":
            return toy.plus(x, 1.0)
        ordinary()
        return x

    return program


@pytest.mark.invariant("G23")
@pytest.mark.parametrize("where", ["all", "between breaks"])
def test_a_segment_without_work_is_refused(toy: Toy, where: str) -> None:
    program = idle(toy, where)
    toy.plan(program)
    with pytest.raises(CaptureError, match=rf"segment {int(where != 'all')} of toy recorded no work"):
        toy.capture(program)
    graph = toy.capture(program, allow_empty=True)
    assert graph.captured and graph.segments[int(where != "all")].empty
    graph.replay()


@pytest.mark.invariant("G23", control=True)
@pytest.mark.parametrize("where", ["before the first break", "after the last break", "after a marker", "none"])
def test_a_break_at_an_end_and_a_bare_marker_declare_it(toy: Toy, where: str) -> None:
    program = idle(toy, where)
    graph = toy.capture(program)
    assert graph.captured and any(segment.empty for segment in graph.segments) == (where != "none")
    graph.replay()


def test_the_census_counts_each_segment_and_the_workspace_it_used(toy: Toy) -> None:
    graph = toy.capture(one_break(toy))
    assert [segment.counts.kernels for segment in graph.segments] == [1, 1] and graph.counts().kernels == 2
    assert [segment.workspace_bytes for segment in graph.segments] == [toy.workspace.report().total] * 2


@pytest.mark.invariant("G24")
def test_a_replay_in_another_grad_mode_is_refused(toy: Toy) -> None:
    graph = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    toy.backend.since()
    with torch.enable_grad(), pytest.raises(CaptureError, match="grad mode"):
        graph.replay()
    with torch.inference_mode(), pytest.raises(CaptureError, match="grad mode"):
        graph.replay()
    assert toy.backend.since() == []


@pytest.mark.invariant("G24", control=True)
def test_a_replay_in_the_same_grad_mode_works(toy: Toy) -> None:
    graph = toy.capture(lambda: toy.plus(toy.x, 1.0), FULL)
    assert toy.replay(graph, 4.0) == [5.0]


def test_a_workspace_that_is_not_sealed_fails_the_capture_before_anything_runs(toy: Toy) -> None:
    graph = BreakableGraph(toy.backend)
    with pytest.raises(CaptureError, match="sealed"), GraphCaptureScope(graph, Workspace(toy.device.torch_device)):
        pass
    assert graph.outcome is Outcome.FAILED and current_scope() is None
