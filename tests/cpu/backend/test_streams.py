"""Streams, events and their clocks: what is ordered passes, what is not is refused with both lines."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from halma.hal.dispatch import OpTable, bind, like
from halma.hal.errors import CaptureError
from halma.hal.workspace import Workspace
from tests.cpu.backend.captured import capture, planned


class Forked:
    """Work on ``main`` and on ``side``, with fork and join or without."""

    def __init__(self, backend, *, fork: bool = True, join: bool = True, columns: bool = False) -> None:
        self.device = backend.device
        self.fork, self.join, self.columns = fork, join, columns
        self.x, self.a, self.b = torch.ones(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
        self.side = backend.device.new_stream("side")

    def __call__(self) -> torch.Tensor:
        main, forked, joined = self.device.current_stream(), *(self.device.new_event(n) for n in ("fork", "join"))
        torch.mul(self.x, 2.0, out=self.a)
        if self.fork:
            main.record(forked)
            self.side.wait(forked)
        with self.side:
            target = self.b[:, :4] if self.columns else self.b
            torch.add(self.a[:, : target.shape[1]], 1.0, out=target)
            self.side.record(joined)
        if self.columns:
            torch.add(self.a[:, 4:], 2.0, out=self.b[:, 4:])
        if self.join:
            main.wait(joined)
        return torch.add(self.b, self.b, out=self.x)


@pytest.mark.invariant("G8", control=True)
@pytest.mark.parametrize("columns", [False, True])
def test_a_joined_fork_is_captured_and_replays(backend, columns):
    program = Forked(backend, columns=columns)
    graph = capture(backend, program)
    assert not program.b.any()
    graph.replay()
    assert program.x[0].tolist() == ([6.0] * 8 if not columns else [6.0] * 4 + [8.0] * 4)


@pytest.mark.invariant("G8")
def test_a_fork_nobody_declared_is_refused_at_its_line(backend):
    program = Forked(backend, fork=False)
    with pytest.raises(CaptureError, match=r"stream 'side', which never joined the capture[\s\S]*test_streams.py:"):
        backend.graphs.dry_run(program, Workspace())


@pytest.mark.invariant("G8")
def test_work_left_on_a_side_stream_is_refused_at_the_end(backend):
    program = Forked(backend, join=False)
    with pytest.raises(CaptureError, match=r"unjoined work on stream 'side'[\s\S]*aten.add.out at .*test_streams.py:"):
        backend.graphs.dry_run(program, Workspace())


@pytest.mark.invariant("G8")
def test_a_join_that_comes_too_late_is_a_race_with_both_lines(backend):
    program = Forked(backend, join=False)

    def late() -> None:
        program()
        event = backend.device.new_event("late")
        program.side.record(event)
        backend.device.current_stream().wait(event)

    with pytest.raises(CaptureError, match="two streams touch the same memory in no order") as caught:
        backend.graphs.dry_run(late, Workspace())
    text = str(caught.value)
    assert "aten.add.out writes it on stream 'side'" in text and "reads it on stream 'main'" in text
    assert text.count("test_streams.py:") == 2 and "128 bytes lie in both" in text


@pytest.mark.invariant("G8")
def test_the_race_check_does_not_depend_on_who_records_first(backend):
    device, side = backend.device, backend.device.new_stream("side")
    x, y = torch.ones(8), torch.zeros(8)

    def program(ordered: bool) -> None:
        main, go, done = device.current_stream(), device.new_event("go"), device.new_event("done")
        main.record(go)
        side.wait(go)
        if not ordered:
            torch.mul(x, 2.0, out=y)  # after the fork, so nothing orders it before the side's read
        with side:
            torch.add(x, y, out=x)
            side.record(done)
        main.wait(done)
        if ordered:
            torch.mul(x, 2.0, out=y)

    with pytest.raises(CaptureError, match="in no order"):
        backend.graphs.dry_run(lambda: program(False), Workspace())
    backend.graphs.dry_run(lambda: program(True), Workspace())


def test_reads_of_one_memory_on_two_streams_are_fine_and_joins_pass_through_a_third(backend):
    device = backend.device
    one, two = device.new_stream("one"), device.new_stream("two")
    x, a, b = torch.ones(8), torch.zeros(8), torch.zeros(8)

    def program() -> torch.Tensor:
        main = device.current_stream()
        events = [device.new_event(str(i)) for i in range(3)]
        main.record(events[0])
        one.wait(events[0])
        with one:
            torch.add(x, 1.0, out=a)
            one.record(events[1])
        two.wait(events[1])
        with two:
            torch.add(x, a, out=b)
            two.record(events[2])
        torch.add(x, 5.0, out=torch.empty(8))
        main.wait(events[2])
        return torch.add(a, b, out=x)

    graph = capture(backend, program)
    assert graph.replay().tolist() == [5.0] * 8


@pytest.mark.invariant("W6")
def test_recycling_a_lane_before_its_join_is_a_race_in_checked_mode(backend):
    device, side = backend.device, backend.device.new_stream("side")
    x, out = torch.ones(8), torch.zeros(8)
    workspace = Workspace(checked=True)

    def program(release_early: bool) -> None:
        main, go, done = device.current_stream(), device.new_event("go"), device.new_event("done")
        main.record(go)
        side.wait(go)
        with workspace.lane("side"), side:
            torch.add(torch.mul(x, 2.0, out=workspace.take((8,), torch.float32)), 1.0, out=out)
            side.record(done)
        if release_early:
            workspace.release_lane("side")
        main.wait(done)
        if not release_early:
            workspace.release_lane("side")

    with pytest.raises(CaptureError, match=r"in no order[\s\S]*aten.fill_.Scalar"):
        backend.graphs.dry_run(lambda: program(True), workspace)
    backend.graphs.dry_run(lambda: program(False), workspace)


# -- events (G9) --------------------------------------------------------------------------------------------


def _waits_for(event, device) -> Callable[[], None]:
    return lambda: device.current_stream().wait(event)


@pytest.mark.invariant("G9")
def test_an_event_from_before_the_capture_cannot_be_waited_for_inside(backend):
    device = backend.device
    event = device.new_event("early")
    with pytest.raises(CaptureError, match="never recorded"):
        backend.graphs.dry_run(_waits_for(event, device), Workspace())
    device.current_stream().record(event)
    with pytest.raises(CaptureError, match="before the capture began"):
        backend.graphs.dry_run(_waits_for(event, device), Workspace())
    _waits_for(event, device)()  # the control: outside it is fine
    assert event.query()


@pytest.mark.invariant("G9")
def test_an_event_of_a_capture_means_nothing_outside_or_in_the_next(backend):
    device = backend.device
    event = device.new_event("inner")
    backend.graphs.dry_run(lambda: device.current_stream().record(event), Workspace())
    with pytest.raises(CaptureError, match="do not cross a capture's end"):
        _waits_for(event, device)()
    with pytest.raises(CaptureError, match="in another capture"):
        backend.graphs.dry_run(_waits_for(event, device), Workspace())
    for ask in (event.query, event.synchronize):
        with pytest.raises(CaptureError, match="belongs to a capture"):
            ask()


@pytest.mark.invariant("G9", control=True)
def test_an_event_recorded_again_outside_is_free(backend):
    device = backend.device
    event = device.new_event("inner")
    backend.graphs.dry_run(lambda: device.current_stream().record(event), Workspace())
    device.current_stream().record(event)
    _waits_for(event, device)()
    event.synchronize()
    assert event.query()


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("what", ["event.query", "event.synchronize", "stream", "device"])
def test_a_host_wait_inside_a_capture_is_refused_even_when_swallowed(backend, what):
    device = backend.device
    event, stream = device.new_event("e"), device.current_stream()
    waits = {
        "event.query": event.query,
        "event.synchronize": event.synchronize,
        "stream": stream.synchronize,
        "device": device.synchronize,
    }

    def program() -> None:
        try:
            waits[what]()
        except CaptureError:
            pass

    with pytest.raises(CaptureError, match=r"inside a capture[\s\S]*test_streams.py:"):
        backend.graphs.dry_run(program, Workspace())
    waits[what]()


def test_the_captured_stream_is_current_until_the_end(backend):
    stream = backend.device.new_stream("own")
    workspace = Workspace()
    workspace.seal()
    backend.graphs.begin(stream, workspace)
    assert backend.device.current_stream() is stream
    backend.graphs.end(stream)
    assert backend.device.current_stream().name == "main"


# -- other threads ------------------------------------------------------------------------------------------


TABLE = OpTable()


@TABLE.define("plus_one", out=like)
def plus_one(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    torch.add(x, 1.0, out=out)


def _in_a_thread(work: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize(
    "what", ["op", "record", "wait", "enter", "query", "synchronize", "begin", "dry_run", "replay", "end"]
)
def test_another_threads_work_is_refused_while_a_capture_is_open_and_only_then(backend, what):
    device, graphs = backend.device, backend.graphs
    x, ops, event, other = (
        torch.ones(3),
        bind(Workspace(), ops=TABLE),
        device.new_event("e"),
        device.new_stream("other"),
    )
    graph = capture(backend, lambda: x + 1)
    done = graph.segments[0].executable
    sealed, stream = Workspace(), device.current_stream()
    sealed.seal()

    def begin() -> None:
        graphs.begin(other, sealed)
        graphs.abandon(other)

    work: dict[str, Callable[[], object]] = {
        "op": lambda: ops.plus_one(x),
        "record": lambda: other.record(event),
        "wait": lambda: other.wait(event),
        "enter": lambda: other.__enter__(),
        "query": event.query,
        "synchronize": other.synchronize,
        "begin": begin,
        "dry_run": lambda: graphs.dry_run(lambda: x + 1, Workspace()),
        "replay": lambda: graphs.replay(done, stream),
    }
    workspace = planned(backend, lambda: x + 1)
    graphs.begin(stream, workspace)
    try:
        error = _in_a_thread(work.get(what, lambda: graphs.end(stream)))
        assert isinstance(error, CaptureError)
        assert ("no capture of stream" if what == "end" else "another thread captures") in str(error).replace(
            "open already", "another thread captures"
        )
        x + 1  # the capture goes on
    finally:
        template = graphs.end(stream)
    assert graphs.counts(template).kernels == 1
    if what != "end":
        assert _in_a_thread(work[what]) is None
