"""The pool of executables against a driver with a ceiling."""

from __future__ import annotations

import pytest

from halma.hal.errors import CaptureError
from halma.hal.graph.executables import ExecutablePool, PooledGraphs, process_pool
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.workspace import Workspace
from tests.cpu.graph.drivers import Driver, DriverLimit, backend_of

LADDER = decode_ladder(5, sizes=[1, 2, 3, 4])
FIVE = sorted(LADDER, reverse=True)


def session_on(driver: Driver, pool: ExecutablePool) -> CaptureSession:
    session = CaptureSession(backend_of(driver), Workspace(), "persistent", executables=pool)
    session.capture_all(LADDER, lambda descriptor: lambda: descriptor)
    return session


@pytest.mark.invariant("G21")
def test_the_driver_never_sees_more_than_it_allows() -> None:
    driver = Driver(ceiling=3)
    session = session_on(driver, ExecutablePool(limit=3, again=True))
    assert len(session) == 5 and driver.live == 3
    for descriptor in (*FIVE, *FIVE):
        assert session.replay(descriptor) == descriptor and driver.live == 3
    session.close()
    assert driver.live == 0


def test_without_the_pool_the_driver_fails() -> None:
    with pytest.raises(DriverLimit):
        session_on(Driver(ceiling=3), ExecutablePool(limit=None, again=True))


@pytest.mark.invariant("G21")
def test_the_least_recently_replayed_goes_first() -> None:
    driver = Driver(ceiling=2)
    graphs = PooledGraphs(driver, ExecutablePool(limit=2, again=True))
    templates = [driver.end("stream") for _ in range(3)]
    first, second = graphs.instantiate(templates[0]), graphs.instantiate(templates[1])
    graphs.replay(first, "stream")  # type: ignore[arg-type]
    third = graphs.instantiate(templates[2])
    assert second.live is None and first.live is not None and third.live is not None
    graphs.replay(second, "stream")  # type: ignore[arg-type]
    assert first.live is None and driver.replayed == [1, 2]


@pytest.mark.invariant("G21")
def test_templates_that_cannot_be_used_again_are_refused_before_the_driver_fails() -> None:
    driver = Driver(ceiling=3)
    session = session_on(driver, ExecutablePool(limit=3, again=False))
    assert len(session) == 3 == driver.live and driver.log.count("begin") == 3
    assert all("allows 3 live executables" in row.why_not for row in session.report().rows[3:])
    graphs = PooledGraphs(driver, ExecutablePool(limit=0, again=False))
    with pytest.raises(CaptureError, match="no more graph executables"):
        graphs.instantiate("template")


@pytest.mark.invariant("G21", control=True)
def test_up_to_the_limit_nothing_is_recycled() -> None:
    driver = Driver(ceiling=5)
    pool = ExecutablePool(limit=5, again=False)
    session = session_on(driver, pool)
    assert len(session) == 5 and pool.recycled == 0 and pool.instantiated == 5


def test_a_destroyed_executable_is_gone_and_counts_no_more() -> None:
    driver = Driver()
    pool = ExecutablePool(limit=2, again=True)
    graphs = PooledGraphs(driver, pool)
    one = graphs.instantiate(driver.end("stream"))
    graphs.destroy(one)
    assert len(pool) == 0 == driver.live
    with pytest.raises(CaptureError, match="destroyed graph"):
        graphs.replay(one, "stream")  # type: ignore[arg-type]


def test_a_graph_that_was_dropped_without_reset_counts_no_more() -> None:
    driver = Driver()
    pool = ExecutablePool(limit=2, again=True)

    def made_and_dropped() -> int:  # in a frame of its own: the runner may keep the locals of the test's
        handle = PooledGraphs(driver, pool).instantiate(driver.end("stream"))
        return len(pool) if handle is not None else -1

    assert made_and_dropped() == 1
    assert len(pool) == 0


def test_the_process_has_one_pool_a_driver_and_an_unknown_limit_is_none() -> None:
    first, second = backend_of(Driver()), backend_of(Driver())
    assert process_pool(first) is process_pool(second) and process_pool(first).limit is None
    limited = backend_of(Driver(), graph_executable_limit=7)
    limited.name = "limited driver"  # type: ignore[misc]
    assert process_pool(limited).limit == 7
