"""Staging of persistent inputs on a device that is slower than its host, which no CPU is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halma.hal.graph.inputs import STAGES, PersistentInput


class LateEvent:
    """Done only once somebody waited for it."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class LateStream:
    """Logs; an event recorded on it is not done yet."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, event: LateEvent) -> None:
        event.done = False
        self.log.append("record")

    def wait(self, event: LateEvent) -> None:
        self.log.append("wait")


def late_input(stream: LateStream) -> tuple[PersistentInput, list[torch.Tensor]]:
    pinned: list[torch.Tensor] = []

    def pin(shape, dtype) -> torch.Tensor:
        pinned.append(torch.zeros(*shape, dtype=dtype))
        return pinned[-1]

    backend = SimpleNamespace(
        memory=SimpleNamespace(pinned=pin),
        device=SimpleNamespace(new_event=lambda name: LateEvent(), current_stream=lambda: stream),
        graphs=SimpleNamespace(is_capturing=lambda: False),
    )
    return PersistentInput("x", torch.zeros(4), pad=0, backend=backend), pinned


def test_all_staging_is_there_at_full_capacity_before_the_first_refresh():
    x, pinned = late_input(LateStream())
    assert [memory.shape for memory in pinned] == [(4,)] * STAGES
    for value in range(5):
        x.refresh(torch.full((3,), float(value)))
    assert len(pinned) == STAGES and {float(memory[0]) for memory in pinned} == {3.0, 4.0}


def test_a_staging_buffer_that_may_still_be_read_is_waited_for_and_counted():
    x, _ = late_input(LateStream())
    for _ in range(STAGES):
        x.refresh(torch.ones(4))
    assert x.counters.waits == 0
    x.refresh(torch.ones(4))
    assert x.counters.waits == 1


@pytest.mark.invariant("M8")
def test_rows_that_are_kept_never_make_the_host_wait_however_far_it_is_ahead():
    x, _ = late_input(LateStream())
    x.refresh(torch.ones(2))
    x.tensor.fill_(7.0)
    for _ in range(10):
        x.keep()
    assert x.counters.waits == 0 and x.counters.keeps == 10
    assert x.tensor.tolist() == [7.0, 7.0, 0.0, 0.0]  # and the padding was rewritten


def test_a_replay_elsewhere_waits_for_the_last_write_and_one_on_the_same_stream_does_not():
    here, elsewhere = LateStream(), LateStream()
    x, _ = late_input(here)
    x.refresh(torch.ones(4))
    x.consume(here)
    x.keep()
    x.consume(elsewhere)
    assert (here.log, elsewhere.log) == (["record", "record"], ["wait"])
    x.refresh(torch.ones(4))  # must not overwrite what that replay may still read
    assert (here.log, elsewhere.log) == (["record", "record", "wait", "record"], ["wait", "record"])
