"""Budget and reserve against a driver whose memory falls."""

from __future__ import annotations

from typing import Any

import pytest

from halma.hal.backend import MemoryInfo
from halma.hal.errors import CaptureError
from halma.hal.graph.budget import FIRST_GUESS, MemoryBudget, Meter
from halma.hal.graph.executables import ExecutablePool
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.workspace import Workspace
from tests.cpu.graph.drivers import Driver, backend_of

MIB = 1 << 20
LADDER = decode_ladder(8)


def session_on(driver: Driver, *, exact: bool = True, **options: Any) -> CaptureSession:
    pool = ExecutablePool(limit=None, again=True)
    backend = backend_of(driver, memory_info_exact=exact)
    return CaptureSession(backend, Workspace(), "persistent", executables=pool, **options)


def captured(session: CaptureSession) -> list[int]:
    session.capture_all(LADDER, lambda descriptor: lambda: "out")
    return [row.descriptor.num_requests for row in session.report().rows if not row.why_not]


@pytest.mark.invariant("G20")
def test_the_reserve_is_left_alone() -> None:
    driver = Driver(free=100 * MIB, cost=lambda _: 10 * MIB)
    session = session_on(driver, reserve=75 * MIB)
    assert captured(session) == [8, 4] and driver.free == 80 * MIB
    late = session.report().rows[2]
    assert "78,643,200 bytes are reserved; 83,886,080 are free" in late.why_not
    assert driver.log.count("begin") == 2  # refused before the driver was asked


@pytest.mark.invariant("G20")
def test_the_budget_holds_workspace_and_graphs() -> None:
    driver = Driver(cost=lambda _: 10 * MIB)
    session = session_on(driver, budget=25 * MIB)
    assert captured(session) == [8, 4]
    report = session.report()
    assert report.total_bytes == 20 * MIB <= 25 * MIB and report.measured
    assert [row.held for row in report.rows] == [10 * MIB, 20 * MIB, 20 * MIB, 20 * MIB]
    assert all("the budget is 26,214,400 bytes" in row.why_not for row in report.rows[2:])


@pytest.mark.invariant("G20", control=True)
def test_with_room_everything_is_captured() -> None:
    driver = Driver(cost=lambda _: 10 * MIB)
    session = session_on(driver, budget=40 * MIB, reserve=1)
    assert captured(session) == [8, 4, 2, 1]
    session.close()
    assert driver.live == 0 and driver.free == 1 << 30


@pytest.mark.invariant("G20")
def test_a_graph_that_took_more_than_there_was_goes_again() -> None:
    driver = Driver(free=100 * MIB, cost=lambda number: (1, 1, 60, 1)[number] * MIB)
    session = session_on(driver, reserve=50 * MIB)
    assert captured(session) == [8, 4]
    rows = session.report().rows
    assert rows[2].why_not.startswith("it took 62,914,560 bytes: 52,428,800 bytes are reserved")
    # Its cost is remembered: the next one is not even tried.
    assert rows[3].why_not.startswith("52,428,800 bytes are reserved") and driver.log.count("begin") == 3
    assert driver.live == 2 and driver.free == 98 * MIB


@pytest.mark.invariant("G20")
def test_what_stayed_eager_is_tried_again_only_when_told() -> None:
    driver = Driver(free=20 * MIB, cost=lambda _: 8 * MIB)
    session = session_on(driver)
    assert captured(session) == [8, 4]
    driver.free = 1 << 30
    assert session.capture(LADDER[0], lambda: "out") is None
    session.forget(LADDER[0])
    assert session.capture(LADDER[0], lambda: "out") is not None
    assert session.capture(LADDER[1], lambda: "out") is None


def test_memory_that_is_not_this_process_s_alone_is_charged_to_no_graph() -> None:
    driver = Driver(cost=lambda _: 10 * MIB)
    session = session_on(driver, exact=False, budget=25 * MIB)
    assert captured(session) == [8, 4, 2, 1]
    report = session.report()
    assert report.graph_bytes == 0 and not report.measured


def test_the_first_graph_is_guessed_and_the_others_by_the_dearest() -> None:
    meter = Meter(exact=True)
    assert meter.predicted() == FIRST_GUESS
    assert meter.charge(MemoryInfo(100, 0), MemoryInfo(70, 0)) == 30 and meter.predicted() == 30
    assert meter.charge(MemoryInfo(70, 0), MemoryInfo(80, 0)) == 0 and meter.predicted() == 30
    assert Meter(exact=False).predicted() == 0


@pytest.mark.parametrize(("limit", "reserve"), [(0, 0), (-5, 0), (None, -1)])
def test_a_budget_of_nothing_is_refused(limit: int | None, reserve: int) -> None:
    with pytest.raises(CaptureError, match="holds nothing|negative"):
        MemoryBudget(limit, reserve)
