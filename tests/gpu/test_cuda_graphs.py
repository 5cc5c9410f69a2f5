"""Captures on CUDA: what stands in for the default stream, what is refused, what is counted, what stays usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError, HostReadError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.graph.session import CaptureSession
from halma.hal.testing.conformance.capturing import F32, captured, empty, numbers, planned
from halma.hal.workspace import Workspace

Program = Callable[[Workspace], Any]


def plain(x: torch.Tensor) -> Program:
    return lambda ws: torch.add(x, 1.0, out=ws.take(x.shape, x.dtype))


# -- the default stream ------------------------------------------------------------------------------------


def test_the_default_stream_is_recorded_through_one_that_stands_in_for_it(backend: Backend) -> None:
    x, seen = numbers(backend, 4), list[tuple[str, int]]()

    def program(ws: Workspace) -> torch.Tensor:
        seen.append((backend.device.current_stream().name, torch.cuda.current_stream().cuda_stream))
        return plain(x)(ws)

    graph = captured(backend, program)
    assert [name for name, _ in seen] == ["main", "main"] and all(handle for _, handle in seen)
    assert seen[0] == seen[1], "the dry run warms up the very stream of the capture"
    assert torch.cuda.current_stream().cuda_stream == 0 and backend.device.current_stream().name == "main"
    assert graph.replay().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_streams_are_equal_by_their_queue_and_keep_their_names(backend: Backend) -> None:
    device = backend.device
    one, two = device.new_stream("one"), device.new_stream("two")
    assert one != two and device.current_stream() == device.current_stream() != one
    with one:
        assert device.current_stream() == one and device.current_stream().name == "one"
        with two:
            assert torch.cuda.current_stream().cuda_stream == two.handle  # type: ignore[attr-defined]
    assert device.current_stream().name == "main" and hash(one) == hash(one)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert device.current_stream().name.startswith("stream 0x")


@pytest.mark.invariant("C4")
def test_no_two_live_streams_are_one_queue_and_none_is_torchs(backend: Backend) -> None:
    device = backend.device
    streams: list[Any] = [device.new_stream(f"{number}") for number in range(100)]
    handles = {stream.handle for stream in streams}
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(100)}
    assert len(handles) == 100 and not handles & theirs and len(theirs) < 100  # torch's repeat
    x = torch.zeros(100, device=device.torch_device)
    device.synchronize()
    for number, stream in enumerate(streams):
        with stream:
            assert device.current_stream() is stream
            x[number].add_(1.0)
    device.synchronize()
    assert x.tolist() == [1.0] * 100
    del streams, stream
    assert device.new_stream("again").handle in handles  # type: ignore[attr-defined]


# -- refusals ----------------------------------------------------------------------------------------------

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "masked write": lambda x: x.__setitem__(x > 1, 0.0),
    "repeat": lambda x: torch.repeat_interleave(x.long()),
    "unique": lambda x: x.unique(),
    "copy": lambda x: torch.empty(4).copy_(x),
}


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("read", READS)
def test_a_host_read_is_refused_by_name_and_the_stream_stays_usable(
    backend: Backend, read: str, swallowed: bool
) -> None:
    x, graph = numbers(backend, 4), BreakableGraph(backend)
    workspace = planned(backend, plain(x))

    def program(ws: Workspace) -> torch.Tensor:
        try:
            READS[read](x)
        except HostReadError:
            if not swallowed:
                raise
        return plain(x)(ws)

    with pytest.raises(HostReadError, match=r"inside a capture[\s\S]*test_cuda_graphs.py:\d+"):
        captured(backend, program, workspace, into=graph)
    assert graph.outcome is Outcome.FAILED
    assert captured(backend, plain(x), workspace, into=graph).replay().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.invariant("G10", control=True)
def test_gathers_and_masked_ops_without_a_read_are_captured(backend: Backend) -> None:
    x, index = numbers(backend, 4), torch.tensor([2, 0], device=backend.device.torch_device)

    def program(ws: Workspace) -> torch.Tensor:
        out = torch.index_select(x, 0, index, out=ws.take((2,), F32))
        out.masked_fill_(out > 1.0, -1.0)
        out[0] = 7.0
        return torch.repeat_interleave(out, torch.ones_like(index), output_size=2)

    assert captured(backend, program).replay().tolist() == [7.0, 0.0]


def test_pageable_memory_is_refused_and_pinned_memory_is_read_again_at_each_replay(backend: Backend) -> None:
    x, pageable = numbers(backend, 4), torch.ones(4)
    with pytest.raises(CaptureError, match="pageable host memory"):
        captured(backend, lambda _: x.copy_(pageable), empty(backend))
    pinned = backend.memory.pinned((4,), F32)
    pinned.fill_(5.0)
    graph = captured(backend, lambda _: x.copy_(pinned, non_blocking=True), empty(backend))
    assert graph.counts().copies == 1
    for value in (6.0, 7.0):
        pinned.fill_(value)
        assert graph.replay().tolist() == [value] * 4


def test_an_error_that_only_the_driver_saw_fails_the_capture_with_its_code(backend: Backend) -> None:
    x, graph = numbers(backend, 4), BreakableGraph(backend)
    workspace = planned(backend, plain(x))

    def program(ws: Workspace) -> torch.Tensor:
        try:
            torch.cuda.current_stream().synchronize()  # past the layer: nobody but the driver notices
        except RuntimeError:
            pass
        return plain(x)(ws)

    with pytest.raises(CaptureError) as caught:
        captured(backend, program, workspace, into=graph)
    assert "driver error 90" in str(caught.value) and graph.outcome is Outcome.FAILED
    torch.cuda.synchronize()
    assert captured(backend, plain(x), workspace, into=graph).replay().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_error_past_the_dispatcher_is_kept_and_the_stream_stays_usable(backend: Backend) -> None:
    x, graph = numbers(backend, 4), BreakableGraph(backend)
    workspace = planned(backend, plain(x))
    with pytest.raises(RuntimeError, match="stream is capturing") as caught:  # printing takes all modes off
        captured(backend, lambda _: str(x), workspace, into=graph)
    assert graph.outcome is Outcome.FAILED and graph.error is caught.value
    assert captured(backend, plain(x), workspace, into=graph).replay().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_after_a_capture_that_could_not_be_ended_memory_is_allocated_as_ever(backend: Backend) -> None:
    x, side = numbers(backend, 4), backend.device.new_stream("side")
    workspace = planned(backend, plain(x))

    def unjoined(ws: Workspace) -> torch.Tensor:
        start = backend.device.new_event("start")
        backend.device.current_stream().record(start)
        side.wait(start)
        with side:
            x.add_(0.0)
        return plain(x)(ws)

    for _ in range(3):
        with pytest.raises(CaptureError, match="not joined[\\s\\S]*driver error 904"):
            captured(backend, unjoined, workspace)
        fresh = torch.empty(1 << 20, device=x.device).fill_(1.0)
        pinned = torch.empty(1 << 16, pin_memory=True).fill_(1.0)
        assert float(fresh.sum()) == 1 << 20 and float(pinned.sum()) == 1 << 16
        graph = captured(backend, lambda ws: plain(x)(ws).sort().values, workspace)
        assert graph.replay().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("how", ["stream", "event", "query", "device"])
def test_waiting_on_the_host_inside_a_capture_is_refused_before_the_driver_sees_it(backend: Backend, how: str) -> None:
    device, x = backend.device, numbers(backend, 4)
    event = device.new_event("e")
    device.current_stream().record(event)
    wait = {
        "stream": lambda: device.current_stream().synchronize(),
        "event": event.synchronize,
        "query": event.query,
        "device": device.synchronize,
    }[how]

    def program(ws: Workspace) -> torch.Tensor:
        wait()
        return plain(x)(ws)

    with pytest.raises(CaptureError, match="inside a capture"):
        captured(backend, program, planned(backend, plain(x)))


# -- counts, pools, random numbers -------------------------------------------------------------------------


def test_counts_are_the_drivers_nodes_and_allocations_name_op_and_line(backend: Backend) -> None:
    x = numbers(backend, 4)

    def program(ws: Workspace) -> torch.Tensor:
        y = torch.mul(x, 2.0, out=ws.take((4,), F32))
        z = y + 1.0
        return ws.take((4,), F32).copy_(z)

    graph = captured(backend, program)
    counts = graph.counts()
    assert (counts.kernels, counts.copies, counts.allocations) == (2, 1, 1)
    (use,) = backend.graphs.pool_uses(graph.segments[0].template)
    assert use.op == "aten.add.Tensor" and use.nbytes >= 16 and "test_cuda_graphs.py:" in use.where
    assert [node.name for node in graph.nodes()] == ["aten.mul.out", "aten.add.Tensor", "aten.copy_.default"]
    assert graph.replay().tolist() == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled(7)"])
def test_a_session_whose_ops_allocate_does_not_grow_after_priming(backend: Backend, order: str) -> None:
    ladder = decode_ladder(8)
    x = torch.rand(8, 1 << 20, device=backend.device.torch_device)
    session = CaptureSession(backend, Workspace(backend.device.torch_device), "persistent")

    def program_of(descriptor: Any) -> Callable[[], torch.Tensor]:
        rows = descriptor.num_requests
        return lambda: torch.amax(x[:rows] * 2.0, 1, out=session.workspace.take((rows,), F32))

    session.capture_all(ladder, program_of, order)
    report = session.report()
    assert report.pool_growth == 0 and report.pool_bytes >= 32 << 20
    assert report.allocating == {"aten.mul.Tensor": len(ladder)}
    for descriptor in ladder:
        x.uniform_()
        assert torch.equal(session.replay(descriptor), (x[: descriptor.num_requests] * 2.0).amax(1))
    session.close()


def test_pinned_memory_taken_amid_a_capture_does_not_end_the_pools_life(backend: Backend) -> None:
    """Torch's allocator of pinned memory keeps such a pool, but counts only graphs as its users."""
    x, kept = numbers(backend, 4), list[torch.Tensor]()

    def program(ws: Workspace) -> torch.Tensor:
        kept.append(torch.empty(64, pin_memory=True))
        return plain(x)(ws)

    workspace = planned(backend, plain(x))
    for _ in range(3):
        graph = captured(backend, program, workspace)
        assert graph.replay().tolist() == [1.0, 2.0, 3.0, 4.0]
        graph.reset()
        del graph


def test_random_numbers_go_on_from_replay_to_replay(backend: Backend) -> None:
    x = torch.zeros(1000, device=backend.device.torch_device)
    graph = captured(backend, lambda _: x.uniform_(), empty(backend))
    torch.cuda.manual_seed(7)
    first, second = (graph.replay().clone() for _ in range(2))
    assert not torch.equal(first, second) and 0.4 < float(first.mean()) < 0.6
    torch.cuda.manual_seed(7)
    assert torch.equal(graph.replay(), first)


# -- executables -------------------------------------------------------------------------------------------


def test_a_template_outlives_its_executables_and_a_destroyed_one_is_refused(backend: Backend) -> None:
    x, graphs = numbers(backend, 4), backend.graphs
    graph = captured(backend, lambda _: x.add_(1.0), empty(backend))
    template, stream = graph.segments[0].template, backend.device.current_stream()
    for _ in range(3):
        executable = graphs.instantiate(template)
        graphs.replay(executable, stream)
        graphs.destroy(executable)
        graphs.destroy(executable)
        with pytest.raises(CaptureError, match="destroyed graph"):
            graphs.replay(executable, stream)
    assert x.tolist() == [3.0, 4.0, 5.0, 6.0]


def test_a_thread_that_never_touched_the_device_can_replay(backend: Backend) -> None:
    x = numbers(backend, 4)
    graph, found = captured(backend, lambda _: x.add_(1.0), empty(backend)), list[BaseException]()

    def run() -> None:
        try:
            with torch.no_grad():
                graph.replay()
                backend.device.synchronize()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not found and x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_another_thread_may_work_while_this_one_captures(backend: Backend) -> None:
    x, found = numbers(backend, 4), list[float]()

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(float(torch.full((1 << 22,), 2.0, device=x.device).sum()))

    workspace = planned(backend, plain(x))
    graph = BreakableGraph(backend)
    workspace.start()
    with GraphCaptureScope(graph, workspace):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        graph.set_outputs(plain(x)(workspace))
    assert found == [2.0 * (1 << 22)] and graph.replay().tolist() == [1.0, 2.0, 3.0, 4.0]
