"""A step without a graph keeps the rules of a replay: a switch or a budget decides how it runs, not what is legal."""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError, StaleOutputError, WorkspaceError
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome
from halma.hal.graph.breaks import break_here
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.forks import fork
from halma.hal.graph.retire import lease
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.graph.session import CaptureSession
from halma.hal.settings import GraphSwitch
from halma.hal.testing.conformance.capturing import F32, numbers
from halma.hal.testing.conformance.toys import in_a_thread
from halma.hal.workspace import Workspace

DECODE, VERIFY = Descriptor("decode", 2), Descriptor("verify", 2)
WITHOUT_VERIFY = GraphSwitch(roles_off=frozenset({"verify"}))
OFF = GraphSwitch(on=False)
SWITCHES = pytest.mark.parametrize("switch", [GraphSwitch(), WITHOUT_VERIFY, OFF], ids=["on", "one role", "off"])


class Steps:
    """A session of two roles on one checked workspace: decode adds 1, verify multiplies by 100."""

    def __init__(self, backend: Backend, switch: GraphSwitch, *, checked: bool = True) -> None:
        self.backend = backend
        self.x = numbers(backend, 2, start=1.0)
        self.during: Any = None
        self.streams: list[str] = []
        workspace = Workspace(backend.device.torch_device, checked=checked)
        self.session = CaptureSession(backend, workspace, "persistent", switch=switch)
        self.session.capture_all([DECODE, VERIFY], lambda one: self.decode if one is DECODE else self.verify)
        self.streams.clear()

    def decode(self) -> torch.Tensor:
        return torch.add(self.x, 1.0, out=self.session.workspace.take((2,), F32))

    def verify(self) -> torch.Tensor:
        self.streams.append(self.backend.device.current_stream().name)
        node = self.session.workspace.enter("verify")
        if self.during is not None:
            self.during()
        self.session.workspace.leave(node)
        return torch.mul(self.x, 100.0, out=self.session.workspace.take((2,), F32))


@pytest.fixture
def able(capturing: Backend) -> Iterator[Backend]:
    with torch.no_grad():
        yield capturing


@pytest.mark.invariant("G14")
@SWITCHES
def test_a_step_ends_the_outputs_of_the_one_before_however_both_run(able: Backend, switch: GraphSwitch) -> None:
    session = Steps(able, switch).session
    for first, second in ((DECODE, VERIFY), (VERIFY, DECODE), (VERIFY, VERIFY)):
        stale = session.replay(first)
        session.replay(second)
        with pytest.raises(StaleOutputError, match="after a later"):
            stale.tolist()


@pytest.mark.invariant("G14", control=True)
@SWITCHES
def test_outputs_of_a_step_can_be_used_before_the_next(able: Backend, switch: GraphSwitch) -> None:
    session = Steps(able, switch).session
    for _ in range(2):
        assert session.replay(DECODE).tolist() == [2.0, 3.0]
        assert session.replay(VERIFY).tolist() == [100.0, 200.0]
    assert type(Steps(able, switch, checked=False).session.replay(VERIFY)) is torch.Tensor


@pytest.mark.invariant("G22")
def test_an_eager_step_is_a_user_of_the_workspace(able: Backend) -> None:
    steps, found = Steps(able, WITHOUT_VERIFY), list[Any]()
    steps.during = lambda: found.append(in_a_thread(lambda: steps.session.replay(DECODE)))
    assert steps.session.replay(VERIFY).tolist() == [100.0, 200.0], "the first step is unharmed"
    assert isinstance(found[0], CaptureError) and "one active user" in str(found[0])
    assert "an eager step of verify(2 tokens, 2 requests)" in str(found[0])
    steps.during = None
    assert steps.session.replay(DECODE).tolist() == [2.0, 3.0], "and gives it back"


@pytest.mark.invariant("G22")
def test_neither_an_eager_step_nor_a_warm_up_runs_beside_another_user(able: Backend) -> None:
    steps = Steps(able, WITHOUT_VERIFY)
    with lease(steps.session.workspace, "somebody"):
        with pytest.raises(CaptureError, match=r"one active user[\s\S]*somebody"):
            steps.session.replay(VERIFY)
        with pytest.raises(CaptureError, match=r"one active user[\s\S]*somebody"):
            steps.session.capture(Descriptor("draft", 1), steps.decode)


@pytest.mark.invariant("G2")
@SWITCHES
@pytest.mark.parametrize("enabled", [True, False], ids=["captured", "inert"])
def test_a_step_inside_a_capture_is_refused_whatever_the_switches(
    able: Backend, switch: GraphSwitch, enabled: bool
) -> None:
    steps, graph = Steps(able, switch), BreakableGraph(able)
    other = Workspace(able.device.torch_device)
    other.seal()
    with pytest.raises(CaptureError, match="inside a capture"):
        with GraphCaptureScope(graph, other, enabled=enabled):
            steps.session.replay(VERIFY)
    assert graph.outcome is Outcome.FAILED
    assert steps.session.replay(VERIFY).tolist() == [100.0, 200.0]


@pytest.mark.invariant("G22")
@SWITCHES
def test_a_step_runs_on_the_stream_it_was_given(able: Backend, switch: GraphSwitch) -> None:
    steps, side = Steps(able, switch), able.device.new_stream("side")
    steps.session.replay(VERIFY, side)
    assert steps.streams == ([] if switch == GraphSwitch() else ["side"])
    able.device.synchronize()


def test_an_eager_step_that_raises_leaves_a_workspace_for_the_next(able: Backend) -> None:
    steps = Steps(able, OFF)

    def broken() -> None:
        raise ValueError("no such row")

    steps.during = broken
    with pytest.raises(ValueError, match="no such row"):
        steps.session.replay(VERIFY)
    steps.during = None
    assert steps.session.replay(VERIFY).tolist() == [100.0, 200.0]


@SWITCHES
def test_a_descriptor_is_captured_once_whatever_the_switch(able: Backend, switch: GraphSwitch) -> None:
    steps = Steps(able, switch)
    with pytest.raises(CaptureError, match="was captured already"):
        steps.session.capture(VERIFY, steps.decode)
    assert steps.session.replay(VERIFY).tolist() == [100.0, 200.0]


@pytest.mark.invariant("G2")
@pytest.mark.parametrize("enabled", [True, False], ids=["captured", "inert"])
def test_a_break_on_a_side_stream_is_refused_whether_or_not_it_splits(able: Backend, enabled: bool) -> None:
    if not able.capabilities.graph_segments:
        pytest.skip(f"graph_segments is {able.capabilities.graph_segments}")
    workspace, graph, side = Workspace(able.device.torch_device), BreakableGraph(able), able.device.new_stream("side")
    with workspace.lane("side"):
        pass
    workspace.release_lane("side")
    workspace.seal()
    with pytest.raises(CaptureError, match="on a side stream"):
        with GraphCaptureScope(graph, workspace, enabled=enabled, mode=CaptureMode.PIECEWISE):
            with fork(side, workspace) as branch, branch:
                break_here("inside")


def test_a_program_of_a_closed_scratch_session_is_told_that_its_memory_is_gone(able: Backend) -> None:
    with CaptureSession(able, Workspace(able.device.torch_device), "scratch") as session:
        workspace = session.workspace
        session.capture_all([DECODE], lambda _: lambda: workspace.take((2,), F32).fill_(1.0))
    for use in (lambda: workspace.take((2,), F32), lambda: workspace.enter("a"), lambda: workspace.take_fallback(8)):
        with pytest.raises(WorkspaceError, match=r"the workspace was given back[\s\S]*make a new"):
            use()
