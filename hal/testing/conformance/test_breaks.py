"""Breaks: what runs at capture and at replay, where results go, what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError
from halma.hal.graph.baked import baked_values
from halma.hal.graph.breakable import CaptureMode, Outcome, counters
from halma.hal.graph.breaks import IN_PLACE, NO_WRITE_BACK, Cell, break_here, break_point, eager_break
from halma.hal.graph.current import current_scope
from halma.hal.testing.conformance.toys import SIZE, Toy, needs_capture


@pytest.fixture
def toy(halma_backend: Backend) -> Iterator[Toy]:
    """Without gradients, and with no scope left open behind the test."""
    needs_capture(halma_backend, segments=True)
    counters.clear()
    with torch.no_grad():
        yield Toy(halma_backend)
    assert current_scope() is None


def double(x: torch.Tensor) -> torch.Tensor:
    """What most breaks here do: a fresh tensor."""
    return x * 2


class Doubling:
    """x + 1, a break that doubles into ``cell``, + 3."""

    def __init__(self, toy: Toy, cell: Cell | None = None, fn: Callable[[torch.Tensor], Any] = double) -> None:
        self.toy = toy
        self.cell = cell or Cell(name="doubled")
        self.fn = fn
        self.runs = 0

    def __call__(self) -> torch.Tensor:
        x = self.toy.plus(self.toy.x, 1.0)
        with break_point(out=self.cell, name="double") as host:
            y = host(self._run, x)
        return self.toy.plus(y if isinstance(y, torch.Tensor) else self.tensor_of(y), 3.0)

    def _run(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return self.fn(x)

    def tensor_of(self, value: Any) -> torch.Tensor:
        """The tensor to go on with."""
        return value["a"] if isinstance(value, dict) else getattr(value, "rows", value)


def copies_of(toy: Toy, work: Callable[[], Any]) -> int:
    """Copies that ``work`` makes eagerly, between the segments of a replay."""
    with toy.backend.graphs.counting() as counts:
        work()
    return counts().copies


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


# -- destinations ------------------------------------------------------------------------------------------


@pytest.mark.invariant("G6")
def test_every_replay_writes_the_address_of_the_capture(toy: Toy) -> None:
    program = Doubling(toy)
    graph = toy.capture(program)
    address = program.cell.value.data_ptr()
    for x in (10.0, 15.5, 21.0):
        assert copies_of(toy, graph.replay) == 1
        toy.replay(graph, x)
        assert program.cell.value.data_ptr() == address and toy.first(program.cell.value) == [2 * x + 2]


@pytest.mark.invariant("G6", control=True)
def test_a_result_that_is_its_destination_already_is_not_copied(toy: Toy) -> None:
    own = toy.full(0.0)
    program = Doubling(toy, fn=lambda x: torch.mul(x, 2.0, out=own))
    graph = toy.capture(program)
    assert copies_of(toy, graph.replay) == 0 and toy.replay(graph, 10.0) == [25.0]


@pytest.mark.invariant("G6")
def test_an_eager_step_between_replays_does_not_move_the_destination(toy: Toy) -> None:
    program = Doubling(toy)
    graph = toy.capture(program)
    toy.workspace.start()
    toy.x.fill_(100.0)
    assert toy.first(program()) == [205.0]
    assert toy.replay(graph, 10.0) == [25.0] and toy.first(program.cell.value) == [22.0]


@pytest.mark.invariant("G6", control=True)
@pytest.mark.parametrize("captured", [True, False])
def test_a_cell_with_memory_of_its_own_keeps_it_everywhere(toy: Toy, captured: bool) -> None:
    memory = toy.full(0.0)
    program = Doubling(toy, Cell(memory))
    toy.plan(program)
    toy.x.fill_(10.0)
    if captured:
        assert toy.replay(toy.capture(program), 10.0) == [25.0]
    else:
        toy.workspace.start()
        assert toy.first(program()) == [25.0]
    assert program.cell.value is memory and toy.first(memory) == [22.0]


@dataclass(frozen=True)
class Labelled:
    """A result with a value that is no tensor."""

    rows: torch.Tensor
    label: str


@pytest.mark.invariant("G6", control=True)
def test_a_mapping_is_written_key_by_key(toy: Toy) -> None:
    program = Doubling(toy, fn=lambda x: {"a": x * 2, "b": x * 3})
    graph = toy.capture(program)
    before = {key: tensor.data_ptr() for key, tensor in program.cell.value.items()}
    assert copies_of(toy, graph.replay) == 2
    assert toy.replay(graph, 10.0) == [25.0] and toy.first(program.cell.value["b"]) == [33.0]
    assert {key: tensor.data_ptr() for key, tensor in program.cell.value.items()} == before


@pytest.mark.invariant("G6", control=True)
def test_a_dataclass_and_a_tuple_copy_their_tensors_and_take_over_the_rest(toy: Toy) -> None:
    calls: list[int] = []

    def labelled(x: torch.Tensor) -> Labelled:
        calls.append(1)
        return Labelled(x * 2, f"call {len(calls)}")

    program = Doubling(toy, fn=labelled)
    graph = toy.capture(program)
    address, label = program.cell.value.rows.data_ptr(), program.cell.value.label
    assert copies_of(toy, graph.replay) == 1 and toy.replay(graph, 10.0) == [25.0]
    assert program.cell.value.rows.data_ptr() == address and program.cell.value.label == f"call {len(calls)}" != label


@pytest.mark.invariant("G6")
def test_what_cannot_be_copied_is_refused_unless_no_write_back_is_declared(toy: Toy) -> None:
    class Opaque:
        rows = toy.full(7.0)

    toy.plan(lambda: toy.plus(toy.plus(toy.x, 1.0), 3.0))
    program = Doubling(toy, fn=lambda x: Opaque())
    with pytest.raises(CaptureError, match=r"break 'double'[\s\S]*Opaque holds no tensor[\s\S]*NO_WRITE_BACK"):
        toy.capture(program)

    def declared() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=NO_WRITE_BACK) as host:
            found = host(lambda x: Opaque(), x)
        return toy.plus(found.rows, 3.0)

    graph = toy.capture(declared)
    assert copies_of(toy, graph.replay) == 0 and toy.replay(graph, 100.0) == [10.0]


def test_no_write_back_keeps_the_captured_result_alive_and_unchanged(toy: Toy) -> None:
    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=NO_WRITE_BACK) as host:
            y = host(lambda x: toy.full(99.0), x)
        return toy.plus(y, 1.0)

    graph = toy.capture(program)
    gc.collect()
    junk = [toy.full(-1.0) for _ in range(64)]
    assert toy.replay(graph, 1.0) == toy.replay(graph, 2.0) == [100.0] and len(junk) == 64


@pytest.mark.invariant("G6")
@pytest.mark.parametrize("captured", [True, False])
def test_a_raw_returned_tensor_is_refused_wherever_the_break_runs(toy: Toy, captured: bool) -> None:
    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(name="raw") as host:
            y = host(double, x)
        return toy.plus(y, 1.0)

    toy.workspace.start()
    with pytest.raises(CaptureError, match=r"break 'raw' at .*test_breaks.py:\d+: it returned a raw tensor"):
        toy.capture(program) if captured else program()
    toy.workspace.reset()


@pytest.mark.invariant("G6")
@pytest.mark.parametrize("value", ["tensor", "number"])
def test_a_break_that_returns_only_at_replay_is_refused_there(toy: Toy, value: str) -> None:
    results: list[Any] = [None, None, toy.x if value == "tensor" else 3]

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(name="late") as host:
            host(lambda: results.pop(0))
        return toy.plus(x, 1.0)

    graph = toy.capture(program)
    with pytest.raises(CaptureError, match="break 'late'.*it returned"):
        graph.replay()
    results.append(None)
    assert toy.replay(graph, 1.0) == [3.0] and graph.replays == 1


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda x: {"a": x * 2, "b": x.to(torch.float64)},
    "shape": lambda x: {"a": x * 2, "b": x[:3] * 1},
    "key": lambda x: {"a": x * 2, "c": x * 3},
    "fewer": lambda x: {"a": x * 2},
    "kind": lambda x: x * 2,
    "leaf": lambda x: {"a": x * 2, "b": 3.0},
    "none": lambda x: None,
}


@pytest.mark.invariant("G6")
@pytest.mark.parametrize("change", CHANGES)
def test_a_result_of_another_form_is_refused_at_its_replay_with_nothing_copied(toy: Toy, change: str) -> None:
    program = Doubling(toy, fn=lambda x: {"a": x * 2, "b": x * 3})
    graph = toy.capture(program)
    assert toy.replay(graph, 10.0) == [25.0]
    good, program.fn = program.fn, CHANGES[change]
    toy.backend.since()

    def refused() -> None:
        with pytest.raises(CaptureError, match=r"break 'double' at .*: its result does not fit its destination"):
            graph.replay()

    copies = copies_of(toy, refused)
    assert copies == (1 if change == "dtype" else 0), "its own cast, and none of ours"
    assert toy.backend.since() == ["Replay"] and toy.first(program.cell.value["a"]) == [22.0] and graph.replays == 1
    program.fn = good
    assert toy.replay(graph, 1.0) == [7.0]


@pytest.mark.invariant("G6")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("same_break", [True, False])
def test_a_destination_used_twice_is_refused_naming_both(toy: Toy, enabled: bool, same_break: bool) -> None:
    cells = [Cell(name="one"), Cell(name="two")]

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(out=cells[0], name="first") as host:
            y = host(double, x)
            if same_break:
                host(double, x)
        x = toy.plus(y, 1.0)
        with break_point(out=cells[-1], name="second") as host:
            y = host(double, x)
        return toy.plus(y, 1.0)

    if same_break:
        toy.workspace.start()
        with pytest.raises(CaptureError, match="the cell 'one' was written already in this break"):
            program()
        toy.workspace.reset()
        return
    graph = toy.capture(program, enabled=enabled)
    assert graph.outcome is not Outcome.FAILED, "two cells are fine, also in a later capture"
    toy.capture(program, enabled=enabled)
    del cells[1]
    with pytest.raises(CaptureError, match=r"break 'second'[\s\S]*another break of this capture[\s\S]*break 'first'"):
        toy.capture(program, enabled=enabled)


@pytest.mark.invariant("G6")
def test_a_cell_that_nothing_wrote_and_an_undeclared_output_are_refused(toy: Toy) -> None:
    with pytest.raises(CaptureError, match="nothing was written into the cell 'idle'"):
        with break_point(out=Cell(name="idle")) as host:
            host(lambda: None)
    with pytest.raises(CaptureError, match="is empty"):
        Cell(name="idle").value  # noqa: B018
    not_a_cell: Any = toy.x
    with pytest.raises(CaptureError, match="does not declare its output"):
        break_point(out=not_a_cell, name="plain")
    with pytest.raises(CaptureError, match="holds no tensor"):
        Cell([1, 2])


@pytest.mark.invariant("G6")
@pytest.mark.parametrize("captured", [True, False])
def test_torch_work_of_the_block_outside_host_is_refused(toy: Toy, captured: bool) -> None:
    side = toy.full(0.0)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with break_point(name="loose") as host:
            view = x.view(2, -1)  # no work
            side.add_(1.0)
            host(view.mul_, 2.0)
        return x

    toy.workspace.start()
    with pytest.raises(CaptureError, match=r"break 'loose'.*torch work outside host\(\)[\s\S]*add_"):
        toy.capture(program) if captured else program()
    assert toy.first(side) == [0.0]
    toy.workspace.reset()


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
        x = toy.plus(toy.x, 1.0)
        with break_point(out=Cell()) as host:
            y = host(lambda x: toy.full(99.0), x)
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
