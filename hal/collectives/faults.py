"""The sticky fault of a channel on this rank: looked for, told, forgotten (C7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from halma.hal.backend import Backend
from halma.hal.collectives.contract import ErrorRecord, FlightEntry
from halma.hal.collectives.operands import check_bound
from halma.hal.collectives.ranks import AnsweringRanks
from halma.hal.collectives.report import Answers, ChannelFault, channel_fault

ANSWER_SECONDS: Final = 5.0
"""How long a report waits for the others' flight recorders; they faulted at about the same time, or never will."""


class Driver(Protocol):
    """What is asked of a channel's driver, or an exchange's."""

    def error(self) -> ErrorRecord | None: ...
    def flight(self) -> Sequence[FlightEntry]: ...
    def set_bound(self, bound_ns: int) -> None: ...
    def rearm(self, epoch: int) -> None: ...
    def epoch(self) -> int: ...


class Faults:
    """What a communicator knows of its channel's faults.

    Args:
        driver: of the channel; None where there is none, and then there is never a fault.
        bound: seconds that a wait may take.
        known: digest -> the call as this rank describes it; the communicator keeps it up to date.
    """

    def __init__(
        self,
        channel: str,
        backend: Backend,
        ranks: AnsweringRanks,
        driver: Driver | None,
        bound: float,
        known: Mapping[int, str],
    ) -> None:
        self._channel, self._backend, self._ranks, self._known = channel, backend, ranks, known
        self._driver = driver
        self._bound = bound
        self._fault: ChannelFault | None = None
        self._arms = 0

    def poll(self) -> None:
        """Raise the sticky fault, if there is one.

        Raises:
            ChannelFault: with the record and every answering rank's last calls.
        """
        if self._fault is None and self._driver is not None:
            record = self._driver.error()
            if record is not None:
                seconds = min(ANSWER_SECONDS, 2 * self._bound + 1)
                stage = f"fault {self._arms} of channel {self._channel}"  # ranks may have faulted in different calls
                answers = Answers(self._ranks.size, self._ranks.answers(stage, self.flight(), seconds))
                self._fault = channel_fault(
                    self._channel, self._ranks.rank, self._ranks.names, record, answers, self._known
                )
        if self._fault is not None:
            raise self._fault

    def flight(self) -> list[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        return [] if self._driver is None else list(self._driver.flight())

    def set_bound(self, seconds: float) -> None:
        """See :meth:`halma.hal.collectives.communicator.Communicator.set_bound`."""
        self._bound = check_bound(seconds)
        if self._driver is not None:
            self._driver.set_bound(int(self._bound * 1e9))

    def rearm(self) -> None:
        """Forget the fault and go on, from the largest of the ranks' epochs; every rank comes."""
        if self._driver is None:
            return
        self._backend.device.synchronize()
        self.rearm_from(max(self._ranks.exchange(f"rearm of channel {self._channel}", self._driver.epoch())))

    def rearm_from(self, epoch: int) -> None:
        """As :meth:`rearm`, from an epoch that the caller says is every rank's."""
        assert self._driver is not None
        self._driver.rearm(epoch)
        self._backend.device.synchronize()
        self._ranks.exchange(f"channel {self._channel} is armed", None)
        self._fault = None
        self._arms += 1

    def close(self) -> None:
        """The driver is closed; a fault that was told stays told."""
        self._driver = None
