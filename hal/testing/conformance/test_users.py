"""Who may use a workspace and its graphs, and when executables are destroyed (G22)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome
from halma.hal.graph.breaks import break_point
from halma.hal.graph.retire import waiting
from halma.hal.testing.conformance.toys import (
    Toy,
    in_a_thread,
    one_break,
)

FULL = CaptureMode.FULL


# -- one user at a time ------------------------------------------------------------------------------------


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
