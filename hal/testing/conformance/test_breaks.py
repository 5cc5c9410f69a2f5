"""Breaks: what runs at capture and at replay, on which stream, and what a graph keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.baked import baked_values
from halma.hal.graph.breakable import CaptureMode, Outcome, counters
from halma.hal.graph.breaks import IN_PLACE, Cell, break_here, break_point, eager_break
from halma.hal.testing.conformance.toys import SIZE, Doubling, Toy, copies_of, double

# -- what runs when ----------------------------------------------------------------------------------------


@pytest.mark.invariant("G6", control=True)
def test_one_break_runs_between_two_segments_at_every_replay(toy: Toy) -> None:
    program = Doubling(toy)
    graph = toy.capture(program)
    assert toy.backend.since() == ["Begin", "End", "Instantiate"] * 2
    assert (len(graph.segments), len(graph.breaks)) == (2, 1)
    runs = program.runs
    for x, expected in ((10.0, 25.0), (0.0, 5.0), (-1.0, 3.0)):
        assert toy.replay(graph, x) == [expected]
        assert toy.first(program.cell.value) == [2 * (x + 1)]
    assert program.runs == runs + 3 and toy.backend.since() == ["Replay", "Replay"] * 3


@pytest.mark.invariant("G6", control=True)
def test_two_breaks_run_in_the_programs_order(toy: Toy) -> None:
    seen: list[str] = []

    def step(name: str, x: torch.Tensor, number: float) -> None:
        seen.append(name)
        toy.log.append(name)
        x.add_(number) if name == "first" else x.mul_(number)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=IN_PLACE) as host:
            host(step, "first", x, 1.0)
        y = toy.times(x, 1.0)
        with break_point(out=IN_PLACE) as host:
            host(step, "second", y, 2.0)
        return toy.plus(y, 2.0)

    toy.plan(program)
    seen.clear()
    graph = toy.capture(program)
    assert seen == ["first", "second"], "each once at the capture"
    part = ["Begin", "End", "Instantiate"]
    assert toy.backend.since() == [*part, "first", *part, "second", *part]
    for _ in range(3):
        assert toy.replay(graph, 5.0) == [16.0]
        assert toy.backend.since() == ["Replay", "first", "Replay", "second", "Replay"]


def test_several_calls_in_one_break_run_in_order_and_take_the_same_memory_at_replay(toy: Toy) -> None:
    def placed(x: torch.Tensor) -> torch.Tensor:
        with toy.workspace.scope("host"):
            scratch = toy.times(x, 10.0)
            return scratch + 1.0

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        kept = Cell()
        with toy.workspace.scope("layer"):
            below = toy.plus(x, 100.0)
            with break_point(out=kept) as host:
                y = host(placed, x)
            z = toy.plus(y, 1.0)
            torch.add(z, below, out=x)
        return x

    graph = toy.capture(program)
    toy.workspace.start()
    before = toy.workspace.path(), toy.workspace.place()
    for x in (1.0, 4.0):
        assert toy.replay(graph, x) == [(x + 1) * 10 + 1 + 1 + x + 101]
    assert (toy.workspace.path(), toy.workspace.place()) == before


@pytest.mark.parametrize("form", ["marker", "block"])
def test_a_bare_marker_splits_and_runs_nothing(toy: Toy, form: str) -> None:
    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        if form == "marker":
            break_here("here")
        else:
            with break_point(name="here"):
                pass
        return toy.plus(x, 2.0)

    graph = toy.capture(program)
    toy.backend.since()
    assert toy.replay(graph, 10.0) == [13.0] and toy.backend.since() == ["Replay", "Replay"]
    assert len(graph.segments) == 2 and graph.breaks[0].marker and "break 'here'" in graph.breaks[0].name


@pytest.mark.invariant("G6", control=True)
@pytest.mark.parametrize("where", ["outside", "inert"])
def test_outside_a_capture_a_break_just_runs(toy: Toy, where: str) -> None:
    program = Doubling(toy)
    toy.plan(program)
    ran = program.runs
    counters.clear()
    toy.workspace.start()
    toy.x.fill_(10.0)
    if where == "outside":
        assert copies_of(toy, lambda: program()) == 0, "nothing is copied"
        with toy.device.current_stream():
            toy.workspace.start()
            assert toy.first(program()) == [25.0]
        assert program.runs == ran + 2
    else:
        graph = toy.graph()
        with toy.scope(graph, enabled=False):
            graph.set_outputs(program())
        assert graph.outcome is Outcome.INERT and toy.first(graph.outputs()) == [25.0] and program.runs == ran + 1
    assert toy.backend.since() == [] and toy.first(program.cell.value) == [22.0]
    assert counters.breaks_reached == program.runs - ran and counters.breaks_registered == 0


def test_a_break_inside_another_breaks_host_call_is_part_of_it(toy: Toy) -> None:
    cell = Cell()

    def inner(x: torch.Tensor) -> torch.Tensor:
        with break_point(out=cell, name="inner") as host:
            return host(double, x)

    program = Doubling(toy, fn=inner)
    graph = toy.capture(program)
    assert len(graph.breaks) == 1 and toy.replay(graph, 10.0) == [25.0] and toy.replay(graph, 1.0) == [7.0]


# -- lifetimes (G7) ----------------------------------------------------------------------------------------


@pytest.mark.invariant("G7")
def test_inputs_of_a_break_live_as_long_as_the_graph(toy: Toy) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def program() -> torch.Tensor:
        weight = toy.full(7.0)
        alive[:] = [weakref.ref(weight)]
        x = toy.plus(toy.x, 1.0)
        with break_point() as host:
            host(_multiply_in_place, x, by=weight)
        return toy.plus(x, 0.0)

    toy.plan(program)
    graph = toy.capture(_weight_made_outside(toy, alive))
    gc.collect()
    assert alive[0]() is not None
    junk = [toy.full(-1.0) for _ in range(64)]
    assert toy.replay(graph, 1.0) == [14.0] and toy.replay(graph, 2.0) == [21.0] and len(junk) == 64
    graph.reset()
    gc.collect()
    assert alive[0]() is None, "and no longer"


def _multiply_in_place(x: torch.Tensor, *, by: torch.Tensor) -> None:
    x.mul_(by)


def _weight_made_outside(toy: Toy, alive: list[weakref.ref[torch.Tensor]]) -> Callable[[], torch.Tensor]:
    weights = [toy.full(7.0)]
    alive[:] = [weakref.ref(weights[0])]

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point() as host:
            host(_multiply_in_place, x, by=weights.pop())
        return toy.plus(x, 0.0)

    return program


@pytest.mark.invariant("G7", control=True)
def test_workspace_inputs_of_a_break_are_not_recycled_before_it_at_replay(toy: Toy) -> None:
    def program() -> torch.Tensor:
        out = toy.workspace.take((SIZE,), torch.float32)
        with toy.workspace.scope("first"):
            x = toy.plus(toy.x, 1.0)
            with break_point() as host:
                host(_copy_to, x, out)
        with toy.workspace.scope("second"):  # lies where the first scope lay
            toy.plus(toy.x, 1000.0)
        return out

    graph = toy.capture(program)
    for x in (10.0, 20.0, 30.0):
        assert toy.replay(graph, x) == [x + 1]


def _copy_to(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@pytest.mark.invariant("G7")
def test_a_destination_outlives_the_frame_that_declared_it(toy: Toy) -> None:
    def layer() -> torch.Tensor:
        toy.plus(toy.x, 1.0)
        with break_point(out=Cell()) as host:
            y = host(toy.full, 99.0)
        return toy.plus(y, 0.0)

    graph = toy.capture(layer)
    gc.collect()
    junk = [toy.full(-1.0) for _ in range(64)]
    assert toy.replay(graph, 1.0) == [99.0] and len(junk) == 64


@pytest.mark.invariant("G11")
def test_host_values_given_to_a_break_are_seen_as_baked(toy: Toy) -> None:
    length = 10

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(name="lengths") as host:
            host(_add_in_place, x, length)
        return toy.plus(x, 0.0)

    first = toy.capture(program).nodes()
    assert baked_values(first, toy.capture(program).nodes()) == []
    length = 11
    found = baked_values(first, toy.capture(program).nodes())
    assert [value.name for value in found] == ["break"] and "10" in str(found[0]) and "11" in str(found[0])


def _add_in_place(x: torch.Tensor, number: float) -> None:
    x.add_(number)


# -- the decorator -----------------------------------------------------------------------------------------


def test_a_decorated_function_breaks_at_every_call_with_a_cell_of_its_own(toy: Toy) -> None:
    doubled = eager_break(out=Cell)(double)
    add_one = eager_break(out=IN_PLACE)(_add_in_place)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        for _ in range(3):
            x = toy.plus(doubled(x), 1.0)
        add_one(x, 1.0)
        return toy.plus(x, 0.0)

    graph = toy.capture(program)
    assert len(graph.breaks) == 4 and "break 'double' at" in graph.breaks[0].name
    for x in (0.0, 1.0, 2.0):
        assert toy.replay(graph, x) == [((x + 1) * 2 + 1) * 4 + 3 + 1]
    assert doubled.__name__ == "double" and toy.first(doubled(toy.full(4.0))) == [8.0]


@pytest.mark.invariant("G5")
def test_a_decorated_function_is_refused_in_full_mode(toy: Toy) -> None:
    doubled = eager_break(out=Cell)(double)
    with pytest.raises(CaptureError, match=r"break 'double' at .*test_breaks.py:\d+ cannot be part of a full capture"):
        toy.capture(lambda: toy.plus(doubled(toy.plus(toy.x, 1.0)), 1.0), CaptureMode.FULL)


def test_host_work_of_a_break_runs_on_the_stream_of_the_replay(toy: Toy) -> None:
    names: list[str] = []

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point() as host:
            host(lambda: names.append(toy.device.current_stream().name))
        return toy.plus(x, 1.0)

    toy.plan(program)
    own = toy.device.new_stream("own")
    graph = toy.graph()
    with toy.scope(graph, stream=own):
        graph.set_outputs(program())
    graph.replay(own)
    graph.replay()
    assert names[1:] == ["own", "own", toy.device.current_stream().name]
