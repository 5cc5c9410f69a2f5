"""The capture scope: segments, modes, and what it refuses on entry and at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome, counters
from halma.hal.graph.breaks import Break, break_here, break_point
from halma.hal.graph.current import current_scope
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.conformance.toys import (
    Program,
    Toy,
    in_a_thread,
    one_break,
)
from halma.hal.workspace import Workspace

FULL = CaptureMode.FULL


# -- segments and replay (G1) -----------------------------------------------------------------------------


@pytest.mark.invariant("G1", control=True)
def test_without_a_break_it_is_one_segment_that_runs_nothing_until_its_replay(toy: Toy) -> None:
    seen = toy.full(0.0)
    toy.plan(lambda: torch.add(toy.x, 1.0, out=seen))
    seen.fill_(-1.0)  # a dry run may have written it
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


# -- modes and counters (G5) ------------------------------------------------------------------------------


@pytest.mark.invariant("G5")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_full_capture_refuses_a_break_by_name_whether_or_not_it_is_on(toy: Toy, enabled: bool) -> None:
    program = one_break(toy)
    toy.plan(program)
    with pytest.raises(CaptureError, match=r"break 'double' at .*toys.py:\d+ cannot be part of a full capture"):
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
