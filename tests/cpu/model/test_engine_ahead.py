"""The host ahead of the device: by how many steps, what it decides on meanwhile, and that it waits for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import halma
from halma.backends.cpu.streams import CpuEvent, StreamState
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.runner import V4Runner
from tests.cpu.model.drafting import drafting_runner
from tests.cpu.model.small import alone


@dataclass
class Device:
    """One that is done with a step only once ``lag`` newer ones were issued, or when somebody waits for it."""

    lag: int
    now: int = 0

    def event(self, name: str = "") -> CpuEvent:
        return LateEvent(self)


class LateEvent(CpuEvent):
    def __init__(self, device: Device) -> None:
        self._device, self._at = device, -1000
        super().__init__(StreamState())

    @property
    def recorded(self) -> bool:
        return self._at >= 0

    @recorded.setter
    def recorded(self, value: bool) -> None:
        self._at = self._device.now if value else -1000

    def query(self) -> bool:
        return self._device.now - self._at >= self._device.lag

    def synchronize(self) -> None:
        self._at = -1000


def late_runner(monkeypatch: pytest.MonkeyPatch, lag: int) -> V4Runner:
    device = Device(lag)
    monkeypatch.setattr(halma.backend("cpu").device, "new_event", device.event)
    runner = drafting_runner()
    plain = runner.step

    def step(descriptor):
        device.now += 1
        return plain(descriptor)

    runner.step = step
    return runner


def steady(runner: V4Runner, ahead: int) -> tuple[int, int, list[list[int]]]:
    """Waits and back pressure of ten steps in the middle of three requests' lives; and all tokens."""
    engine = Engine(runner, ahead=ahead, drafts=4)
    requests = [Request((5, 9, 2), 24), Request((7,), 24), Request((1, 2), 24)]
    generations = [engine.submit(request) for request in requests]
    for _ in range(6):
        engine.step()
    waits, pressure = engine.host_waits, engine.counters.back_pressure
    for _ in range(10):
        engine.step()
    found = (engine.host_waits - waits, engine.counters.back_pressure - pressure)
    engine.run()
    assert [one.tokens for one in generations] == [alone("exact", request) for request in requests]
    return *found, [one.tokens for one in generations]


@pytest.mark.invariant("M8")
def test_four_steps_ahead_of_a_device_four_steps_late_the_host_never_waits(monkeypatch):
    waits, pressure, _ = steady(late_runner(monkeypatch, lag=4), ahead=4)
    assert (waits, pressure) == (0, 0)


@pytest.mark.invariant("M8", control=True)
def test_a_later_device_holds_the_host_back_at_its_limit_and_nowhere_else(monkeypatch):
    waits, pressure, _ = steady(late_runner(monkeypatch, lag=5), ahead=4)
    assert (waits, pressure) == (0, 10), "one step a step, and counted apart"


@pytest.mark.invariant("G27")
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_the_host_has_read_all_steps_but_the_newest_ones_and_none_of_those(ahead):
    runner = drafting_runner(max_requests=2)
    engine = Engine(runner, ahead=ahead, drafts=4)
    first = engine.submit(Request((5, 9, 2), 16))
    issued: list[int] = []
    while engine.busy:
        engine.step()
        if len(issued) == 5:
            engine.submit(Request(tuple(range(20)), 4))  # joins while the first is under way
        issued.append(engine.counters.decode_steps)
        if not first.done and first.issued < 16:
            assert len(engine._flight.steps) == min(ahead, issued[-1] + engine.counters.prefill_steps)
            numbers = [step.number for step in engine._flight.steps]
            assert numbers == sorted(numbers) and numbers[-1] == runner.steps - 1
    assert first.tokens == alone("exact", Request((5, 9, 2), 16))


@pytest.mark.invariant("G27", control=True)
def test_at_the_end_the_host_has_read_everything():
    engine = Engine(drafting_runner(max_requests=2), ahead=4, drafts=4)
    found = engine.run([Request((5, 9, 2), n) for n in (1, 7)])
    assert [(one.issued, len(one.tokens)) for one in found] == [(1, 1), (7, 7)] and not engine._flight.steps
