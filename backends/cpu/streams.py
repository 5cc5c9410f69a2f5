"""Streams and events without hardware behind them, with clocks that know what is ordered.

Outside a capture work runs when it is called, so every event is done as soon as it is recorded. While a
capture is open each stream counts its work, and recording and waiting move counts from one stream to
another (vector clocks): two pieces of work are ordered exactly if the later one's stream has seen the
earlier one's count. That makes a missing fork or join an error here, instead of a race on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from halma.backends.cpu.lines import program_line
from halma.hal.backend import DevicePart, Event, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import note_failure, open_captures, refuse_other_thread


@dataclass(frozen=True)
class Stamp:
    """When a piece of work was recorded: the ``count``-th on ``stream``, which had seen ``seen`` of the others."""

    stream: CpuStream
    count: int
    seen: Mapping[CpuStream, int]

    def before(self, other: Stamp) -> bool:
        """Whether this work is over when ``other`` starts, whatever the timing."""
        if self.stream is other.stream:
            return self.count <= other.count
        return other.seen.get(self.stream, 0) >= self.count


class CaptureClock:
    """The clocks of one capture: which streams take part and what each has seen.

    Args:
        stream: what is captured; other streams join by waiting for an event recorded on one that takes part.
    """

    def __init__(self, stream: CpuStream) -> None:
        self.origin = stream
        self._counts: dict[CpuStream, int] = {stream: 0}
        # Replaced on every wait, never changed: stamps and events share them.
        self._seen: dict[CpuStream, Mapping[CpuStream, int]] = {stream: {}}
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Make the capture invalid, whether or not the program catches ``error``."""
        if self.failure is None:
            self.failure = error
        note_failure(error)

    def refuse(self, what: str, *, found: str, do: str) -> NoReturn:
        """Fail and raise."""
        error = CaptureError(what, found=(found, f"at {program_line()}"), do=do)
        self.fail(error)
        raise error

    def takes_part(self, stream: CpuStream) -> bool:
        """Whether work on ``stream`` belongs to the capture."""
        return stream in self._counts

    def has_seen(self, stream: CpuStream, other: CpuStream) -> bool:
        """Whether all work of ``other`` so far comes before what ``stream`` is given next."""
        return stream is other or self._seen[stream].get(other, 0) >= self._counts.get(other, 0)

    def stamp(self, stream: CpuStream) -> Stamp:
        """Count one piece of work.

        Raises:
            CaptureError: the stream does not take part.
        """
        if stream not in self._counts:
            self.refuse(
                f"work on stream {stream.name!r}, which never joined the capture of {self.origin.name!r}",
                found="nobody declared this fork: the stream did not wait for an event of the captured one",
                do="record an event on the captured stream and let this stream wait for it first",
            )
        count = self._counts[stream] = self._counts[stream] + 1
        return Stamp(stream, count, self._seen[stream])

    def now(self, stream: CpuStream) -> Mapping[CpuStream, int]:
        """What an event recorded on ``stream`` would stand for."""
        return {**self._seen[stream], stream: self._counts[stream]}

    def merge(self, stream: CpuStream, snapshot: Mapping[CpuStream, int]) -> None:
        """Let ``stream`` see everything in ``snapshot``; it takes part from now on."""
        self._counts.setdefault(stream, 0)
        seen = dict(self._seen.get(stream, {}))
        for other, count in snapshot.items():
            if other is not stream:
                seen[other] = max(seen.get(other, 0), count)
        self._seen[stream] = seen

    def unjoined(self) -> list[CpuStream]:
        """Streams with work that the captured stream has not waited for."""
        seen = self._seen[self.origin]
        return [s for s, count in self._counts.items() if s is not self.origin and seen.get(s, 0) < count]


class StreamState(threading.local):
    """What is current on a thread: the entered streams, innermost last, and the open capture's clock."""

    def __init__(self) -> None:
        self.entered: list[CpuStream] = []
        self.clock: CaptureClock | None = None


class CpuEvent:
    """A point in a stream's work. One recorded in a capture means nothing outside it (G9)."""

    def __init__(self, state: StreamState, name: str = "") -> None:
        self.name = name
        self._state = state
        self.recorded = False
        self.clock: CaptureClock | None = None
        self.snapshot: Mapping[CpuStream, int] = {}

    def query(self) -> bool:
        """True: what was recorded is done, and a new event counts as done.

        Raises:
            CaptureError: a capture is open, or the event was recorded in one.
        """
        self._refuse_capture("query()")
        return True

    def synchronize(self) -> None:
        """Nothing to wait for.

        Raises:
            CaptureError: a capture is open, or the event was recorded in one.
        """
        self._refuse_capture("synchronize()")

    def _refuse_capture(self, how: str) -> None:
        refuse_on_host(self._state, f"{how} of the event {self.name!r}")
        if self.clock is not None:
            raise CaptureError(
                f"the event {self.name!r} belongs to a capture",
                asked=how,
                found="it was recorded while a graph was captured, so the host can never see it pass",
                do="record it again outside the capture",
            )


class CpuStream:
    """An ordered queue of work, done at once; see the module for what it checks during a capture."""

    def __init__(self, state: StreamState, name: str, device: DevicePart) -> None:
        self._name = name
        self._state = state
        self._device = device

    @property
    def device(self) -> DevicePart:
        """The device that made it."""
        return self._device

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def __enter__(self) -> CpuStream:
        _refuse_thread(f"stream {self._name!r}")
        self._state.entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        entered = self._state.entered
        # From the inside out, so that an exception which skipped an exit leaves nothing behind.
        for position in range(len(entered) - 1, -1, -1):
            if entered[position] is self:
                del entered[position:]
                return

    def record(self, event: Event) -> None:
        """Put ``event`` behind the work issued so far."""
        _refuse_thread(f"record() on stream {self._name!r}")
        event = _own(event)
        clock = self._state.clock
        inside = clock is not None and clock.takes_part(self)
        event.recorded = True
        event.clock = clock if inside else None
        event.snapshot = clock.now(self) if clock is not None and inside else {}

    def wait(self, event: Event) -> None:
        """Let later work start only after ``event``; in a capture this is how a stream joins.

        Raises:
            CaptureError: the event and this wait do not belong to the same capture (G9).
        """
        _refuse_thread(f"wait() on stream {self._name!r}")
        event = _own(event)
        clock = self._state.clock
        if event.clock is not clock or (clock is not None and not event.recorded):
            self._refuse_event(event, clock)
        if clock is not None:
            clock.merge(self, event.snapshot)

    def _refuse_event(self, event: CpuEvent, clock: CaptureClock | None) -> NoReturn:
        what = f"stream {self._name!r} cannot wait for the event {event.name!r}"
        if clock is None:
            raise CaptureError(
                what,
                found="it was recorded in a capture, and events do not cross a capture's end",
                do="record it again outside, after the replay",
            )
        if not event.recorded:
            found = "it was never recorded"
        elif event.clock is None:
            found = "it was recorded on a stream that takes no part in this capture, or before the capture began"
        else:
            found = "it was recorded in another capture, and events do not cross a capture's end"
        clock.refuse(what, found=found, do="record it inside the capture, on a stream that takes part")

    def synchronize(self) -> None:
        """Nothing to wait for.

        Raises:
            CaptureError: a capture is open.
        """
        refuse_on_host(self._state, f"synchronize() of stream {self._name!r}")

    def __repr__(self) -> str:
        return f"CpuStream({self._name!r})"


def refuse_on_host(state: StreamState, how: str) -> None:
    """Refuse a host wait while a capture is open on this thread, and any while another thread captures."""
    _refuse_thread(how)
    if state.clock is not None:
        state.clock.refuse(
            f"{how} inside a capture",
            found="captured work has not run, so there is nothing to wait for",
            do="wait after the replay",
        )


def _refuse_thread(how: str) -> None:
    if open_captures:
        refuse_other_thread(how)


def own_stream(stream: Stream) -> CpuStream:
    """``stream`` as one of ours.

    Raises:
        CaptureError: another backend made it.
    """
    if not isinstance(stream, CpuStream):
        raise CaptureError("not a stream of the cpu backend", found=f"{stream!r}", do="use backend.device's streams")
    return stream


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise CaptureError("not an event of the cpu backend", found=f"{event!r}", do="use backend.device.new_event()")
    return event
