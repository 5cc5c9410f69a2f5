"""A wait for a sum on its way back sees data, not a flag: whatever stands there says nothing about a peer's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halma.backends.cpu.channel_memory import POLLS_A_LOOK, ChannelMemory, Faulted
from halma.backends.cpu.exchange import CpuExchange
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.exchange_contract import NOT_HERE, ExchangeCall, Stage, Step

NEAR_THE_WRAP = 0xFFFFFFF0
CALL = ExchangeCall(Step.COMBINE, 7)


class Waiting(ChannelMemory):
    """Only what a wait looks at."""

    def __init__(self) -> None:
        self.bound: Any = np.array([10**12], np.uint64)

    def header_of(self, peer: int, epoch: int) -> tuple[int, int]:
        return CALL.digest, epoch


def after(polls: int) -> Callable[[], bool]:
    left = iter(range(polls))
    return lambda: next(left, None) is None


def exchange() -> CpuExchange:
    made = CpuExchange.__new__(CpuExchange)
    made._memory = Waiting()
    return made


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("epoch", [5, 0x80000001, NEAR_THE_WRAP])
def test_a_slow_sum_is_no_overrun(epoch: int) -> None:
    polls = after(3 * POLLS_A_LOOK)
    exchange()._wait(CALL, epoch, 1, Stage.BACK, polls, lambda: NOT_HERE)
    assert polls()


@pytest.mark.invariant("C2", control=True)
def test_a_flag_of_a_later_call_is() -> None:
    with pytest.raises(Faulted) as caught:
        exchange()._wait(CALL, NEAR_THE_WRAP, 1, Stage.ROWS, after(3 * POLLS_A_LOOK), lambda: NEAR_THE_WRAP + 2)
    assert caught.value.fault is Fault.OVERRUN
