"""Sessions over programs with breaks: full by default, split where the session is piecewise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import CaptureMode
from halma.hal.graph.breaks import Cell, break_point
from halma.hal.graph.ladder import ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.settings import GraphSwitch
from halma.hal.testing.conformance.recording import RecordedBackend
from halma.hal.testing.conformance.toys import needs_capture
from halma.hal.workspace import Workspace

LADDER = ladder(decode=[1, 2, 4])
SWITCH = GraphSwitch()


@pytest.fixture
def able(halma_backend: Backend) -> Iterator[Backend]:
    """The backend, where it captures in segments."""
    needs_capture(halma_backend, segments=True)
    with torch.no_grad():
        yield halma_backend


class Broken:
    """Programs x + 1, then a break that adds 10 on the host's turn, then * 2; ``calls`` counts the break."""

    def __init__(self, backend: Backend) -> None:
        self.x = torch.full((4,), 5.0, device=backend.device.torch_device)
        self.calls = 0

    def host_work(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h + 10

    def program_of(self, session: CaptureSession, rows: int) -> Any:
        x, cell = self.x[:rows], Cell(name="between")

        def program() -> torch.Tensor:
            h = torch.add(x, 1.0, out=session.workspace.take(x.shape, x.dtype))
            with break_point(out=cell) as host:
                host(self.host_work, h)
            return torch.mul(cell.value, 2.0, out=session.workspace.take(x.shape, x.dtype))

        return program


def session_on(backend: Any, **options: Any) -> CaptureSession:
    return CaptureSession(backend, Workspace(backend.device.torch_device), "scratch", switch=SWITCH, **options)


@pytest.mark.invariant("G5")
def test_a_full_session_refuses_a_break_and_says_how_to_allow_it(able: Backend) -> None:
    toy = Broken(able)
    with session_on(able) as session:
        with pytest.raises(CaptureError, match=r"mode=CaptureMode\.PIECEWISE"):
            session.capture_all(LADDER, lambda d: toy.program_of(session, d.num_requests))
        assert len(session) == 0


@pytest.mark.invariant("G5", control=True)
def test_a_piecewise_session_splits_at_each_break(able: Backend) -> None:
    toy = Broken(able)
    with session_on(able, mode=CaptureMode.PIECEWISE) as session:
        session.capture_all(LADDER, lambda d: toy.program_of(session, d.num_requests))
        assert [row.segments for row in session.report().rows] == [2, 2, 2]
        for one in LADDER:
            before = toy.calls
            toy.x.fill_(float(one.num_requests))
            assert session.replay(one).tolist() == [2.0 * (one.num_requests + 11)] * one.num_requests
            assert toy.calls == before + 1
        assert not session.eager_steps


@pytest.mark.invariant("G4")
def test_without_segments_a_piecewise_session_stays_eager_with_the_reason(able: Backend) -> None:
    toy, backend = Broken(able), RecordedBackend(able)
    backend.capabilities = replace(backend.capabilities, graph_segments=False)
    with session_on(backend, mode=CaptureMode.PIECEWISE) as session:
        session.capture_all(LADDER, lambda d: toy.program_of(session, d.num_requests))
        assert all("graph_segments" in row.why_not for row in session.report().rows) and len(session) == 0
        before = toy.calls
        assert session.replay(LADDER[0]).tolist() == [32.0]
        assert toy.calls == before + 1, "an eager step runs its program once"


@pytest.mark.invariant("G4", control=True)
def test_a_full_session_needs_no_segments(able: Backend) -> None:
    backend = RecordedBackend(able)
    backend.capabilities = replace(backend.capabilities, graph_segments=False)
    x = torch.full((4,), 5.0, device=able.device.torch_device)
    with session_on(backend) as session:
        workspace = session.workspace
        session.capture_all(LADDER, lambda d: lambda: torch.add(x, 1.0, out=workspace.take(x.shape, x.dtype)))
        assert len(session) == 3
