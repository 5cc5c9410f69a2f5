"""Streams, events and captures of the CPU simulator.

Work outside a capture is done when it is called, so an event has passed as soon as it is recorded. In a capture it is
put on a tape instead. Which streams take part, and what each has seen of the others, is counted by vector clocks: a
stream joins by waiting for an event of the capture, and the capture cannot end before its own stream has seen all.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from halma.backends.musa.simulator import faults
from halma.backends.musa.simulator.faults import SimulatedError

_ids = itertools.count(1)
_HANDLES: Final = 0x5EED0000


class SimStream:
    """A queue. ``number`` is torch's id of it, 0 the default stream; ``handle`` the ``musaStream_t``."""

    def __init__(self, index: int, number: int) -> None:
        self.index = index
        self.number = number
        self.handle = _HANDLES + 16 * number if number else 0
        self.capture: Capture | None = None


class Streams(threading.local):
    """The current stream of this thread, by device, and the current device."""

    device = 0

    def __init__(self) -> None:
        self.current: dict[int, SimStream] = {}


_lock = threading.Lock()
_state = Streams()
_known: dict[tuple[int, int], SimStream] = {}
_handles: dict[int, SimStream] = {}


def stream_of(index: int, number: int) -> SimStream:
    """The stream of this id, made at first sight."""
    with _lock:
        found = _known.get((index, number))
        if found is None:
            found = _known[index, number] = SimStream(index, number)
            if number:
                _handles[found.handle] = found
        return found


def new_stream(index: int) -> SimStream:
    """A stream that nobody has."""
    return stream_of(index, next(_ids))


def stream_at(handle: int, index: int) -> SimStream:
    """The stream of a ``musaStream_t``.

    Raises:
        SimulatedError: there is none.
    """
    if not handle:
        return stream_of(index, 0)
    found = _handles.get(handle)
    if found is None:
        raise SimulatedError(faults.INVALID_HANDLE)
    return found


def current_device() -> int:
    """The current device of this thread."""
    return _state.device


def set_device(index: int) -> int:
    """Make a device current; returns what was."""
    before, _state.device = _state.device, index
    return before


def current_stream(index: int | None = None) -> SimStream:
    """The current stream of this thread on a device."""
    device = _state.device if index is None else index
    return _state.current.get(device) or stream_of(device, 0)


def set_stream(stream: SimStream) -> None:
    """Make it current, and its device too."""
    _state.device = stream.index
    _state.current[stream.index] = stream


class Capture:
    """An open capture: the tape, and the clocks of the streams that take part."""

    def __init__(self, origin: SimStream, mode: str) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.tape: list[Callable[[], object]] = []
        self.failed = False
        self._counts: dict[SimStream, int] = {origin: 0}
        self._seen: dict[SimStream, Mapping[SimStream, int]] = {origin: {}}

    def add(self, stream: SimStream, call: Callable[[], object]) -> None:
        """One piece of work.

        Raises:
            SimulatedError: the capture is invalid.
        """
        if self.failed:
            raise SimulatedError(faults.INVALIDATED)
        self._counts[stream] += 1
        self.tape.append(call)

    def now(self, stream: SimStream) -> Mapping[SimStream, int]:
        """What an event recorded on ``stream`` stands for."""
        return {**self._seen[stream], stream: self._counts[stream]}

    def join(self, stream: SimStream, snapshot: Mapping[SimStream, int]) -> None:
        """``stream`` waits for ``snapshot``, and takes part from now on."""
        stream.capture = self
        self._counts.setdefault(stream, 0)
        seen = dict(self._seen.get(stream, {}))
        for other, count in snapshot.items():
            if other is not stream:
                seen[other] = max(seen.get(other, 0), count)
        self._seen[stream] = seen

    def unjoined(self) -> bool:
        """Whether there is work that the captured stream has not waited for."""
        seen = self._seen[self.origin]
        return any(s is not self.origin and seen.get(s, 0) < n for s, n in self._counts.items())

    def close(self) -> None:
        """No stream takes part any more."""
        for stream in self._counts:
            stream.capture = None
        if self in open_captures:
            open_captures.remove(self)


open_captures: list[Capture] = []


def begin(stream: SimStream, mode: str) -> Capture:
    """``musaStreamBeginCapture``."""
    if stream.capture is not None:
        raise SimulatedError(faults.UNSUPPORTED)
    capture = Capture(stream, mode)
    stream.capture = capture
    open_captures.append(capture)
    return capture


def end(stream: SimStream) -> Capture:
    """``musaStreamEndCapture``.

    Raises:
        SimulatedError: no capture was begun on this stream, or by another thread, or it is invalid, or has unjoined
            work. It is over in the latter two cases.
    """
    capture = stream.capture
    if capture is None or capture.origin is not stream:
        raise SimulatedError(faults.INVALID_VALUE if capture is None else faults.UNSUPPORTED)
    if capture.mode != "relaxed" and capture.thread != threading.get_ident():
        raise SimulatedError(faults.WRONG_THREAD)
    unjoined = capture.unjoined()
    capture.close()
    if capture.failed:
        raise SimulatedError(faults.INVALIDATED)
    if unjoined:
        raise SimulatedError(faults.UNJOINED)
    return capture


def refuse_unsafe(stream: SimStream | None = None) -> None:
    """A call that a capture forbids: waits, queries, allocations beside the pool.

    Args:
        stream: what it waits for; None: something that concerns the whole device.

    Raises:
        SimulatedError: a capture in mode "global" is open anywhere, one in mode "thread_local" on this thread, or
            ``stream`` itself is captured. The capture is invalid from then on.
    """
    mine = threading.get_ident()
    for capture in open_captures:
        concerned = stream is not None and stream.capture is capture
        if concerned or capture.mode == "global" or (capture.mode == "thread_local" and capture.thread == mine):
            capture.failed = True
            raise SimulatedError(faults.UNSUPPORTED)


class SimEvent:
    """A point in a stream's work."""

    def __init__(self) -> None:
        self.time: float | None = None
        self.capture: Capture | None = None
        self.snapshot: Mapping[SimStream, int] = {}
        self.handle = 0

    def record(self, stream: SimStream) -> None:
        """``musaEventRecord``."""
        self.handle = self.handle or _HANDLES + 8 + 16 * next(_ids)
        self.time = time.perf_counter()
        self.capture = stream.capture
        self.snapshot = {} if stream.capture is None else stream.capture.now(stream)

    def wait(self, stream: SimStream) -> None:
        """``musaStreamWaitEvent``; nothing for an event that was never recorded.

        Raises:
            SimulatedError: it would let captured work depend on work outside, or the other way round.
        """
        if self.time is None:
            return
        mine, its = stream.capture, self.capture
        if its is None:
            if mine is not None:
                mine.failed = True
                raise SimulatedError(faults.ISOLATION)
        elif its not in open_captures:
            raise SimulatedError(faults.CAPTURED_EVENT)
        elif mine is not None and mine is not its:
            mine.failed = its.failed = True
            raise SimulatedError(faults.MERGE)
        else:
            its.join(stream, self.snapshot)

    def query(self) -> bool:
        """``musaEventQuery``: everything was done when it was called.

        Raises:
            SimulatedError: a capture forbids it, or the event belongs to one.
        """
        if self.time is None:
            return True
        refuse_unsafe()
        if self.capture is not None:
            raise SimulatedError(faults.CAPTURED_EVENT)
        return True
