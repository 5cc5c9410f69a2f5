"""Where results of breaks go: every replay writes the address of the capture, or is refused (G6)."""

# pyright: basic
from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import Outcome
from halma.hal.graph.breaks import NO_WRITE_BACK, Cell, break_point
from halma.hal.testing.conformance.toys import Doubling, Toy, copies_of, double

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
@pytest.mark.parametrize("given", [True, False], ids=["an argument", "out of sight"])
def test_a_result_that_is_a_view_of_state_leaves_the_state_alone(toy: Toy, given: bool) -> None:
    state = torch.stack([toy.full(10.0), toy.full(20.0), toy.full(30.0)])
    row = [0]
    program = Doubling(toy, fn=lambda x: state[row[0]])
    if given:

        def program() -> torch.Tensor:  # the whole of it, in another row at each step
            toy.plus(toy.x, 1.0)
            with break_point(out=Cell()) as host:
                y = host(lambda rows: rows.roll(row[0], 0) if row[0] else rows, state)
            return toy.plus(y[0], 3.0)

    graph = toy.capture(program)
    for row[0], wanted in ((1, 33.0 if given else 23.0), (2, 23.0 if given else 33.0), (0, 13.0)):
        assert toy.replay(graph, 1.0) == [wanted]
        assert state[:, 0].tolist() == [10.0, 20.0, 30.0]


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
        toy.plus(toy.x, 1.0)
        with break_point(out=NO_WRITE_BACK) as host:
            found = host(Opaque)
        return toy.plus(found.rows, 3.0)

    graph = toy.capture(declared)
    assert copies_of(toy, graph.replay) == 0 and toy.replay(graph, 100.0) == [10.0]


def test_no_write_back_keeps_the_captured_result_alive_and_unchanged(toy: Toy) -> None:
    def program() -> torch.Tensor:
        toy.plus(toy.x, 1.0)
        with break_point(out=NO_WRITE_BACK) as host:
            y = host(toy.full, 99.0)
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
    with pytest.raises(CaptureError, match=r"break 'raw' at .*test_cells.py:\d+: it returned a raw tensor"):
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
