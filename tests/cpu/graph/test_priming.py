"""What ops allocate themselves takes its memory before the first capture of a session, not at the next larger one."""

from __future__ import annotations

from typing import Any

import pytest

from halma.hal.backend import PoolUse
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.executables import ExecutablePool
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.workspace import Workspace
from tests.cpu.graph.drivers import Driver, backend_of

LADDER = decode_ladder(8)


class PoolDriver(Driver):
    """A driver whose captures share a pool that grows to the most any of them needed. Without a pool: None."""

    def __init__(self, *, pool: bool = True) -> None:
        super().__init__()
        self.pool: int | None = 0 if pool else None

    def grow(self, nbytes: int) -> None:
        """What an op of the program does while it is captured."""
        if self.pool is not None and self.log[-1] == "begin":
            self.pool = max(self.pool, nbytes)

    def pool_bytes(self, workspace: Any) -> int | None:
        return self.pool

    def pool_uses(self, template: Any) -> list[PoolUse]:
        return [PoolUse("aten.sort.default", 8, "here:1")]


def session_on(driver: Driver) -> CaptureSession:
    executables = ExecutablePool(limit=None, again=True)
    return CaptureSession(backend_of(driver), Workspace(), "persistent", executables=executables)


def capture(driver: PoolDriver, order: str, *, one_by_one: bool = False) -> tuple[CaptureSession, list[int]]:
    """The session, and the pool's bytes after each descriptor."""
    session, seen = session_on(driver), list[int]()

    def program_of(descriptor: Descriptor) -> Any:
        return lambda: driver.grow(descriptor.num_requests * 100)

    if one_by_one:
        with session:
            for descriptor in LADDER:
                session.capture(descriptor, program_of(descriptor))
    else:
        session.capture_all(LADDER, program_of, order, progress=lambda _: seen.append(driver.pool or 0))
    return session, seen


@pytest.mark.invariant("G10")
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled(7)"])
def test_the_pool_does_not_grow_after_the_largest_was_primed(order: str) -> None:
    driver = PoolDriver()
    session, seen = capture(driver, order)
    assert seen == [800] * len(LADDER), "also after the smallest, where that came first"
    report = session.report()
    assert (report.pool_bytes, report.pool_growth) == (800, 0) and report.total_bytes >= 800
    assert report.allocating == {"aten.sort.default": len(LADDER)}
    assert driver.live == len(LADDER) == report.captured, "the primer's graph is gone"


@pytest.mark.invariant("G10")
def test_captures_asked_for_one_by_one_are_primed_by_the_largest_too() -> None:
    driver = PoolDriver()
    primed, _ = capture(driver, "", one_by_one=True)
    assert primed.report().pool_growth == 0 and driver.log.count("begin") == len(LADDER) + 1


@pytest.mark.invariant("G10")
def test_growth_that_priming_did_not_foresee_is_reported() -> None:
    driver = PoolDriver()
    session, _ = capture(driver, "descending")
    session.capture(Descriptor("decode", 16), lambda: driver.grow(1600))
    assert session.report().pool_growth == 800


@pytest.mark.invariant("G10", control=True)
def test_without_a_pool_nothing_is_captured_beforehand() -> None:
    driver = PoolDriver(pool=False)
    session, _ = capture(driver, "ascending")
    assert driver.log.count("begin") == len(LADDER) and session.report().pool_bytes == 0


def test_a_primer_that_fails_leaves_the_error_to_its_own_descriptor() -> None:
    driver = PoolDriver()
    session = session_on(driver)

    def program_of(descriptor: Descriptor) -> Any:
        def program() -> None:
            if descriptor.num_requests == 8 and driver.log[-1] == "begin":
                raise ValueError("too wide")

        return program

    with pytest.raises(ValueError, match="too wide"):
        session.capture_all(LADDER, program_of, "ascending")
    rows = {row.descriptor.num_requests: row.why_not for row in session.report().rows}
    assert rows == {1: "", 2: "", 4: "", 8: "it failed: ValueError: too wide"}
