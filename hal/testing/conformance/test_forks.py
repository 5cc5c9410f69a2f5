"""Side streams in a capture: forks that are joined before a segment closes, and events that stay in theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halma.hal.backend import Stream
from halma.hal.errors import CaptureError, WorkspaceError
from halma.hal.graph.breakable import CaptureMode, Outcome, counters
from halma.hal.graph.breaks import break_here, break_point
from halma.hal.graph.current import current_scope
from halma.hal.graph.forks import fork, note_fork, note_join
from halma.hal.testing.conformance.toys import SIZE, Toy

FULL, PIECEWISE = CaptureMode.FULL, CaptureMode.PIECEWISE


class Beside:
    """(x + 1) * 2 on a side stream beside (x + 1) * 10 on the current one, added up.

    ``between`` runs between the two pieces, inside the fork.
    """

    def __init__(self, toy: Toy, *, join: bool = True, between: Callable[[], None] | None = None) -> None:
        self.toy = toy
        self.side = toy.device.new_stream("side")
        self.join = join
        self.between = between
        self.shared = toy.full(0.0)

    def __call__(self) -> torch.Tensor:
        toy = self.toy
        x = toy.plus(toy.x, 1.0)
        with fork(self.side, toy.workspace) as branch:
            with branch:
                assert toy.device.current_stream() == self.side
                in_lane = toy.times(x, 2.0)
                self.shared.copy_(in_lane)
            if self.between is not None:
                self.between()
            large = toy.times(x, 10.0)
            if self.join:
                branch.join()
                return torch.add(large, in_lane, out=large)
        return torch.add(large, self.shared, out=large)


class ByHand:
    """The same with plain streams and events, told to the scope or not, joined or not."""

    def __init__(self, toy: Toy, *, told: bool = True, joined: bool = False, again: bool = False) -> None:
        self.toy, self.told, self.joined, self.again = toy, told, joined, again
        self.side = toy.device.new_stream("side")
        self.out = toy.full(0.0)

    def __call__(self) -> torch.Tensor:
        toy, device, side = self.toy, self.toy.device, self.side
        main = device.current_stream()
        x = toy.plus(toy.x, 1.0)
        for _ in range(1 + self.again):
            start = device.new_event("start")
            main.record(start)
            side.wait(start)
            if self.told:
                note_fork(side)
        with side:
            torch.mul(x, 2.0, out=self.out)
        planning = current_scope() is None
        if self.joined or planning:  # the dry run has no scope that would join for it
            done = device.new_event("done")
            side.record(done)
            main.wait(done)
            note_join(side)
        return self.out


def main_name(toy: Toy) -> str:
    return toy.device.current_stream().name


# -- joined by the program ---------------------------------------------------------------------------------


@pytest.mark.invariant("G8", control=True)
@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_a_fork_is_captured_with_one_fork_and_one_join(toy: Toy, join: bool, mode: CaptureMode) -> None:
    graph = toy.capture(Beside(toy, join=join), mode)
    main = main_name(toy)
    assert toy.backend.since() == [
        "Begin", f"Record {main}", "Wait side", "Record side", f"Wait {main}", "End", "Instantiate",
    ]  # fmt: skip
    assert (counters.forks_tracked, counters.forks_auto_joined) == (1, 0)
    for x in (0.0, 1.0, 2.0):
        assert toy.replay(graph, x) == [12 * (x + 1)]


def test_outside_a_capture_the_same_code_forks_and_joins_with_the_same_calls(toy: Toy) -> None:
    program = Beside(toy)
    toy.plan(program)
    toy.workspace.start()
    toy.x.fill_(4.0)
    assert toy.first(program()) == [60.0]
    main = main_name(toy)
    assert toy.backend.since() == [f"Record {main}", "Wait side", "Record side", f"Wait {main}"]
    assert counters.forks_tracked == 0
    with toy.scope(toy.graph(), enabled=False) as scope:
        assert toy.first(program()) == [60.0]
    assert scope.why_inert and counters.forks_tracked == 0


def test_a_fork_through_the_scope_reads_the_same(toy: Toy) -> None:
    side = toy.device.new_stream("side")
    out = toy.full(0.0)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        scope = current_scope()
        with fork(side, toy.workspace) if scope is None else scope.fork(side) as branch:
            with branch:
                torch.mul(x, 2.0, out=out)
        return out

    assert toy.replay(toy.capture(program, FULL), 1.0) == [4.0]


# -- joined by the scope (G8) ------------------------------------------------------------------------------


@pytest.mark.invariant("G8")
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_a_fork_that_is_still_out_is_joined_before_the_segment_closes(toy: Toy, mode: CaptureMode) -> None:
    graph = toy.capture(ByHand(toy), mode)
    main = main_name(toy)
    assert toy.backend.since() == [
        "Begin", f"Record {main}", "Wait side", "Record side", f"Wait {main}", "End", "Instantiate",
    ]  # fmt: skip
    assert (counters.forks_tracked, counters.forks_auto_joined) == (1, 1)
    assert toy.replay(graph, 4.0) == [10.0]


@pytest.mark.invariant("G8", control=True)
def test_a_fork_that_the_program_joined_is_not_joined_again(toy: Toy) -> None:
    graph = toy.capture(ByHand(toy, joined=True), FULL)
    main = main_name(toy)
    assert toy.backend.since().count(f"Wait {main}") == 1
    assert (counters.forks_tracked, counters.forks_auto_joined) == (1, 0) and toy.replay(graph, 4.0) == [10.0]


@pytest.mark.invariant("G8")
def test_a_stream_forked_twice_is_one_fork(toy: Toy) -> None:
    toy.capture(ByHand(toy, again=True), FULL)
    assert toy.backend.since().count("Record side") == 1
    assert (counters.forks_tracked, counters.forks_auto_joined) == (1, 1)


@pytest.mark.invariant("G8")
def test_in_an_inert_scope_nothing_is_told_and_nothing_joined(toy: Toy) -> None:
    program = ByHand(toy)
    toy.plan(program)
    with toy.scope(toy.graph(), enabled=False):
        program()
    assert toy.backend.since() == [f"Record {main_name(toy)}", "Wait side"]
    assert (counters.forks_tracked, counters.forks_auto_joined) == (0, 0)
    toy.device.synchronize()


@pytest.mark.invariant("G8")
@pytest.mark.parametrize("join", [True, False])
def test_a_break_inside_a_fork_joins_it_in_one_trace_and_the_block_does_not_again(toy: Toy, join: bool) -> None:
    program = Beside(toy, join=join, between=break_here)

    def planned() -> torch.Tensor:  # outside a scope the same program is joined at the end of its block
        return program()

    toy.plan(planned)
    graph = toy.capture(planned)
    main = main_name(toy)
    assert toy.backend.since() == [
        "Begin", f"Record {main}", "Wait side", "Record side", f"Wait {main}", "End", "Instantiate",
        "Begin", "End", "Instantiate",
    ]  # fmt: skip
    assert (counters.forks_tracked, counters.forks_auto_joined) == (1, 1)
    for x in (0.0, 1.0, 2.0):
        assert toy.replay(graph, x) == [12 * (x + 1)]


@pytest.mark.invariant("G8", control=True)
def test_a_branch_entered_after_a_break_is_forked_again_in_its_own_segment(toy: Toy) -> None:
    side, out = toy.device.new_stream("side"), toy.full(0.0)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with fork(side, toy.workspace) as branch:
            break_here()
            with branch:
                torch.mul(x, 2.0, out=out)
        return out

    graph = toy.capture(program)
    assert (counters.forks_tracked, counters.forks_auto_joined) == (2, 1)
    assert toy.replay(graph, 4.0) == [10.0] and toy.replay(graph, 5.0) == [12.0]


@pytest.mark.invariant("G8")
@pytest.mark.parametrize("told", [False, True])
def test_work_left_on_a_side_stream_that_nobody_declared_fails_the_capture(toy: Toy, told: bool) -> None:
    program = ByHand(toy, told=told)
    toy.plan(program)
    graph = toy.graph()
    if told:  # the control
        with toy.scope(graph, FULL):
            graph.set_outputs(program())
        assert toy.replay(graph, 4.0) == [10.0]
        return
    with pytest.raises(Exception) as caught, toy.scope(graph, FULL):
        graph.set_outputs(program())
    assert graph.outcome is Outcome.FAILED and graph.error is caught.value
    with pytest.raises(CaptureError, match="failed capture"):
        graph.outputs()
    assert toy.replay(toy.capture(ByHand(toy, told=True), FULL), 4.0) == [10.0], "and the stream is usable"


@pytest.mark.invariant("G8")
def test_a_break_on_a_side_stream_is_refused_by_name(toy: Toy) -> None:
    side = toy.device.new_stream("side")

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with fork(side, toy.workspace) as branch:
            with branch:
                y = toy.plus(x, 1.0)
                with break_point(name="inside"):
                    pass
        return y

    toy.plan(program)
    with pytest.raises(CaptureError, match=r"break 'inside' at .*test_forks.py:\d+ was reached on a side stream"):
        toy.capture(program)


@pytest.mark.invariant("G8")
def test_a_stream_cannot_be_forked_from_itself(toy: Toy) -> None:
    with pytest.raises(CaptureError, match="cannot be forked from itself"):
        with fork(toy.device.current_stream(), toy.workspace):
            pass


# -- errors on the way -------------------------------------------------------------------------------------


@pytest.mark.invariant("G3")
@pytest.mark.parametrize("where", ["branch", "main"])
@pytest.mark.parametrize("swallowed", [True, False])
def test_an_exception_inside_a_fork_leaves_it_joined_and_its_lane_free(toy: Toy, where: str, swallowed: bool) -> None:
    side = toy.device.new_stream("side")

    def raise_at(place: str) -> None:
        if place == where and armed:
            raise KeyError(place)

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        try:
            with fork(side, toy.workspace) as branch:
                with branch:
                    toy.times(x, 2.0)
                    raise_at("branch")
                raise_at("main")
        except KeyError:
            if not swallowed:
                raise
        assert toy.device.current_stream() != side
        return toy.plus(x, 1.0)

    armed = False
    toy.plan(program)
    armed = True
    graph = toy.graph()
    if swallowed:  # the model's own business: the layer saw nothing wrong, and the fork is joined
        with toy.scope(graph, FULL):
            graph.set_outputs(program())
        assert toy.replay(graph, 1.0) == [3.0]
    else:
        with pytest.raises(KeyError, match=where), toy.scope(graph, FULL):
            program()
        assert graph.outcome is Outcome.FAILED
    armed = False
    assert toy.replay(toy.capture(program, FULL), 1.0) == [3.0]


# -- lanes (W6) --------------------------------------------------------------------------------------------


@pytest.mark.invariant("W6")
def test_a_lane_is_recycled_only_after_its_join_and_a_second_fork_on_it_is_refused(toy: Toy) -> None:
    side, lanes = toy.device.new_stream("side"), list[torch.Tensor]()

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        with fork(side, toy.workspace) as branch:
            with branch:
                lanes.append(toy.times(x, 2.0))
            y = toy.times(x, 10.0)
            with pytest.raises(WorkspaceError, match="lane 'side' is still in use"):
                with fork(side, toy.workspace) as second, second:
                    pass
            branch.join()
            torch.add(y, lanes[-1], out=y)
        return y

    toy.workspace.start()
    toy.x.fill_(1.0)
    assert toy.first(program()) == [24.0]
    assert torch.isnan(lanes[0]).all(), "poisoned when the block ended, not before its last reader"
    toy.workspace.start()
    assert toy.first(program()) == [24.0] and set(toy.workspace.report().lanes) == {"main", "side"}


@pytest.mark.invariant("W6", control=True)
def test_forks_one_after_another_share_the_lane_and_two_streams_do_not(toy: Toy) -> None:
    one, two = toy.device.new_stream("one"), toy.device.new_stream("two")
    out = toy.full(0.0)

    def beside(x: torch.Tensor, side: Stream) -> torch.Tensor:
        y = toy.workspace.take((SIZE,), torch.float32)
        with fork(side, toy.workspace) as branch:
            with branch:
                z = toy.times(x, 2.0)
            toy.plus(x, 1.0)
            branch.join()
            return torch.add(z, 1.0, out=y)

    def program() -> torch.Tensor:
        x = beside(beside(toy.plus(toy.x, 0.0), one), one)
        with fork(one, toy.workspace) as first, fork(two, toy.workspace) as second:
            with first:
                a = toy.plus(x, 1.0)
            with second:
                b = toy.plus(x, 2.0)
            first.join()
            second.join()
            torch.add(a, b, out=out)
        return out

    graph = toy.capture(program, FULL)
    for x in (0.0, 1.0):
        assert toy.replay(graph, x) == [2 * (4 * x + 3) + 3]
    assert set(toy.workspace.report().lanes) == {"main", "one", "two"}


# -- events (G9) -------------------------------------------------------------------------------------------


@pytest.mark.invariant("G9")
@pytest.mark.parametrize("crossing", ["into the break", "into the next segment", "into the next capture", "out"])
def test_an_event_does_not_cross_the_end_of_its_segment(toy: Toy, crossing: str) -> None:
    event = toy.device.new_event("inner")

    def program() -> torch.Tensor:
        x = toy.plus(toy.x, 1.0)
        if current_scope() is not None:
            toy.device.current_stream().record(event)
            if crossing == "into the break":
                with break_point(name="gap") as host:
                    host(lambda: toy.device.current_stream().wait(event))
        if crossing == "into the next segment":
            break_here()
            if current_scope() is not None:
                toy.device.current_stream().wait(event)
        return toy.plus(x, 1.0)

    toy.plan(program)
    if "capture" in crossing or crossing == "out":
        toy.capture(program, FULL)

        def wait_again() -> torch.Tensor:
            toy.device.current_stream().wait(event)
            return toy.plus(toy.x, 1.0)

        with pytest.raises(Exception):  # noqa: B017  (the driver's own error, on a GPU)
            toy.capture(wait_again, FULL) if "capture" in crossing else wait_again()
        return
    graph = toy.graph()
    with pytest.raises(Exception) as caught, toy.scope(graph):
        program()
    assert graph.outcome is Outcome.FAILED and graph.error is caught.value


@pytest.mark.invariant("G9", control=True)
def test_an_event_recorded_again_in_each_segment_is_fine(toy: Toy) -> None:
    event, side = toy.device.new_event("again"), toy.device.new_stream("side")
    out = [toy.full(0.0), toy.full(0.0)]

    def program() -> torch.Tensor:
        main = toy.device.current_stream()
        x = toy.plus(toy.x, 1.0)
        for target in out:
            main.record(event)
            side.wait(event)
            with side:
                torch.mul(x, 2.0, out=target)
                side.record(event)
            main.wait(event)
            break_here()
        return torch.add(out[0], out[1], out=x)

    graph = toy.capture(program)
    assert toy.replay(graph, 1.0) == [8.0] and toy.replay(graph, 2.0) == [12.0]
