"""Inputs: refreshed or refused (G12), padding and capture-time work declared (G13), a failing query (G25)."""

# pyright: basic
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError, StaleInputError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import InputSet, PersistentInput, persistent_input
from halma.hal.testing.conformance.capturing import F32, captured, empty, numbers
from halma.hal.workspace import Workspace


def rows_input(backend: Backend, name: str = "x", **more: Any) -> PersistentInput:
    return persistent_input(backend, name, (6, 2), F32, **{"pad": -1.0, **more})


class Doubling:
    """A captured program that doubles the input ``x`` into the workspace."""

    def __init__(self, backend: Backend) -> None:
        self.x, self.y = rows_input(backend), rows_input(backend, "y")
        self.graph = BreakableGraph(backend)
        self.graph.inputs = InputSet([self.x, self.y])
        self.graph.inputs.valid_work()
        captured(backend, self.program, into=self.graph)

    def program(self, workspace: Workspace) -> torch.Tensor:
        out = workspace.take(self.x.tensor.shape, F32)
        return torch.add(self.x.tensor, self.y.tensor, out=out)


# -- G12 ------------------------------------------------------------------------------------------------


@pytest.mark.invariant("G12")
def test_an_input_that_was_not_refreshed_stops_the_replay_before_anything_runs(capturing: Backend) -> None:
    toy = Doubling(capturing)
    toy.x.refresh(numbers(capturing, 6, 2))
    with pytest.raises(StaleInputError, match="'y' was not refreshed") as caught:
        toy.graph.replay()
    assert caught.value.found == ("y: never refreshed",)
    assert toy.graph.replays == 0 and toy.x.fresh, "what was refreshed still counts"


@pytest.mark.invariant("G12")
def test_the_second_replay_wants_rows_of_its_own(capturing: Backend) -> None:
    toy = Doubling(capturing)
    for one in (toy.x, toy.y):
        one.refresh(numbers(capturing, 6, 2))
    toy.graph.replay()
    with pytest.raises(StaleInputError, match="'x', 'y'") as caught:
        toy.graph.replay()
    source = "host" if capturing.device.torch_device.type == "cpu" else "device"
    assert f"the last came from the {source}" in caught.value.found[0] and "keep()" in caught.value.do[0]


@pytest.mark.invariant("G12")
def test_capture_time_work_is_no_refresh(capturing: Backend) -> None:
    toy = Doubling(capturing)
    for one in (toy.x, toy.y):
        one.refresh(numbers(capturing, 2, 2))
    toy.graph.inputs.valid_work()
    with pytest.raises(StaleInputError):
        toy.graph.replay()
    with pytest.raises(CaptureError, match="kept before any refresh"):
        toy.x.keep()


@pytest.mark.invariant("G12")
def test_memory_that_was_replaced_is_refused(capturing: Backend) -> None:
    toy = Doubling(capturing)
    toy.y.refresh(numbers(capturing, 1, 2))
    toy.x.refresh(numbers(capturing, 1, 2))
    toy.x.tensor = toy.x.tensor.clone()
    with pytest.raises(CaptureError, match="'x' has moved"):
        toy.graph.replay()


@pytest.mark.invariant("G12")
@pytest.mark.parametrize(("per", "rows"), [("token", 7), ("request", 3)])
def test_more_rows_than_the_step_has_are_refused(halma_backend: Backend, per: Any, rows: int) -> None:
    x = persistent_input(halma_backend, "x", (8, 2), F32, pad=0.0, per=per)
    x.refresh(torch.ones(rows, 2))
    with pytest.raises(CaptureError, match=f"'x' holds {rows} rows, one a {per}"):
        InputSet((x,)).check(Descriptor("verify", 2, 3))


@pytest.mark.invariant("G12", control=True)
@pytest.mark.parametrize(("per", "rows"), [("token", 6), ("token", 0), ("request", 2), ("step", 8)])
def test_rows_that_the_step_has_pass(halma_backend: Backend, per: Any, rows: int) -> None:
    x = persistent_input(halma_backend, "x", (8, 2), F32, pad=0.0, per=per)
    x.refresh(torch.ones(rows, 2))
    InputSet((x,)).check(Descriptor("verify", 2, 3))


@pytest.mark.invariant("G12", control=True)
def test_refreshed_and_kept_inputs_replay(capturing: Backend) -> None:
    toy = Doubling(capturing)
    toy.y.refresh(numbers(capturing, 6, 2, start=100.0))
    for step in range(4):
        if step:
            toy.y.keep()
        toy.x.refresh(numbers(capturing, 6, 2, start=float(step)))
        assert toy.graph.replay()[0].tolist() == [100.0 + step, 102.0 + step]
    counted = toy.graph.inputs.counters()["y"]
    assert (counted.binds, counted.host_refreshes + counted.device_refreshes, counted.keeps) == (1, 1, 3)


@pytest.mark.invariant("G12", control=True)
def test_a_graph_without_declared_inputs_replays_as_often_as_it_likes(capturing: Backend) -> None:
    x = numbers(capturing, 3)
    graph = captured(capturing, lambda ws: torch.add(x, 1.0, out=ws.take((3,), F32)))
    for _ in range(3):
        assert graph.replay().tolist() == [1.0, 2.0, 3.0]


# -- where rows come from ---------------------------------------------------------------------------------


def test_rows_of_the_host_are_the_callers_again_at_once(halma_backend: Backend) -> None:
    x = rows_input(halma_backend)
    rows = torch.zeros(6, 2)
    for step in range(5):  # more steps than staging buffers
        rows.fill_(float(step))
        x.refresh(rows)
        rows.fill_(float("nan"))
        assert x.tensor.tolist() == [[float(step)] * 2] * 6
    assert x.counters.host_refreshes == 5 and x.counters.last_source == "host"


def test_rows_written_on_another_stream_are_waited_for(capturing: Backend) -> None:
    toy, side = Doubling(capturing), capturing.device.new_stream("refresh")
    with side:
        for one in (toy.x, toy.y):
            one.refresh(torch.ones(6, 2))
    assert toy.graph.replay().tolist() == [[2.0, 2.0]] * 6


def test_a_refresh_inside_a_capture_is_refused(capturing: Backend) -> None:
    x, rows = rows_input(capturing), torch.ones(1, 2)
    x.refresh(rows)
    for write in (lambda: x.refresh(rows), x.keep, x.valid_work):
        with pytest.raises(CaptureError, match="'x' cannot take .* inside a capture"):
            captured(capturing, lambda _, write=write: write(), empty(capturing))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (torch.zeros(7, 2), "room for 6 rows"),
        (torch.zeros(2, 3), "another shape"),
        (torch.zeros(6), "another shape"),
        (torch.zeros(2, 2, dtype=torch.int64), "another dtype"),
        (torch.zeros(2, 2, device="meta"), "the host or its own device"),
    ],
    ids=["too many", "too wide", "flat", "dtype", "device"],
)
def test_rows_that_do_not_fit_are_refused_by_name(halma_backend: Backend, rows: torch.Tensor, says: str) -> None:
    x = rows_input(halma_backend, "positions")
    with pytest.raises(CaptureError, match=f"'positions' .*{says}"):
        x.refresh(rows)
    assert not x.fresh and x.rows is None


def test_inputs_that_cannot_be_are_refused_by_name(halma_backend: Backend) -> None:
    memory = halma_backend.memory
    for shape, dtype, pad, says in (
        ((), F32, 0, "tensor of rows"),
        ((4,), torch.int32, 0.5, "pad value"),
        ((4,), torch.uint8, -1, "pad value"),
        ((4,), torch.float16, 1e9, "pad value"),
    ):
        with pytest.raises(CaptureError, match=f"'odd' .*{says}"):
            PersistentInput("odd", memory.empty(shape, dtype), pad=pad, backend=halma_backend)
    with pytest.raises(CaptureError, match="null value"):
        persistent_input(halma_backend, "odd", (4,), torch.uint8, pad=0, null=256)
    with pytest.raises(CaptureError, match="one name"):
        InputSet([rows_input(halma_backend), rows_input(halma_backend)])
    with pytest.raises(CaptureError, match="no input 'z'"):
        InputSet([rows_input(halma_backend)])["z"]
    with pytest.raises(CaptureError, match="7 rows"):
        rows_input(halma_backend).prefix(7)


def test_a_prefix_is_a_view_of_the_same_address(halma_backend: Backend) -> None:
    x = rows_input(halma_backend)
    assert [x.prefix(n).data_ptr() for n in (1, 6)] == [x.tensor.data_ptr()] * 2 and x.prefix(3).shape == (3, 2)


# -- G13 ------------------------------------------------------------------------------------------------


@pytest.mark.invariant("G13")
def test_rows_behind_the_steps_own_are_rewritten_every_step(halma_backend: Backend) -> None:
    x = rows_input(halma_backend)
    for count in (6, 2, 0, 4):
        x.refresh(numbers(halma_backend, count, 2, start=1.0))
        assert x.tensor[count:].tolist() == [[-1.0, -1.0]] * (6 - count)
        x.tensor[count:].fill_(float("nan"))  # a program that writes into its padding
        x.keep()
        assert x.tensor[count:].tolist() == [[-1.0, -1.0]] * (6 - count)


@pytest.mark.invariant("G13", control=True)
def test_rows_of_the_step_are_left_alone(halma_backend: Backend) -> None:
    x = rows_input(halma_backend)
    rows = numbers(halma_backend, 6, 2, start=1.0)
    x.refresh(rows)
    x.keep()
    assert torch.equal(x.tensor, rows) and x.rows == 6


@pytest.mark.invariant("G13")
def test_capture_sees_valid_work_in_every_row(halma_backend: Backend) -> None:
    slots = persistent_input(halma_backend, "slots", (4,), torch.int64, pad=-1, null=7)
    weights = rows_input(halma_backend, "weights", pad=0.5)
    slots.refresh(torch.arange(2))
    InputSet([slots, weights]).valid_work()
    assert slots.tensor.tolist() == [7] * 4, "-1 would make the program skip its work"
    assert weights.tensor.unique().tolist() == [0.5]


@pytest.mark.invariant("G13", control=True)
def test_the_next_step_brings_its_own_work(halma_backend: Backend) -> None:
    slots = persistent_input(halma_backend, "slots", (4,), torch.int64, pad=-1, null=7)
    slots.valid_work()
    slots.refresh(torch.arange(2))
    assert slots.tensor[:2].tolist() == [0, 1] and slots.fresh


# -- G25 ------------------------------------------------------------------------------------------------


def asked(backend: Backend, answer: bool | Exception) -> Backend:
    """The backend, with another answer to whether this thread captures."""

    def is_capturing() -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    graphs = SimpleNamespace(is_capturing=is_capturing)
    return cast("Backend", SimpleNamespace(graphs=graphs, device=backend.device, memory=backend.memory))


@pytest.mark.invariant("G25")
def test_a_query_that_fails_is_no_answer(halma_backend: Backend) -> None:
    x = rows_input(asked(halma_backend, RuntimeError("the driver does not say")))
    with pytest.raises(RuntimeError, match="does not say"):
        x.refresh(torch.ones(2, 2))
    assert not x.fresh and x.tensor.unique().tolist() == [-1.0], "nothing was copied"


@pytest.mark.invariant("G25", control=True)
def test_a_query_that_answers_no_lets_the_copy_pass(halma_backend: Backend) -> None:
    x = rows_input(asked(halma_backend, False))
    x.refresh(torch.ones(2, 2))
    assert x.fresh


@pytest.mark.invariant("G25", control=True)
def test_the_backend_answers_truly(capturing: Backend) -> None:
    seen: list[bool] = []
    x = torch.zeros(2, device=capturing.device.torch_device)

    def program(_: Workspace) -> None:
        seen.append(capturing.graphs.is_capturing())
        x.add_(1.0)

    captured(capturing, program, empty(capturing))
    assert seen == [True] and not capturing.graphs.is_capturing()
