"""A CUDA device, its streams and events.

The driver cannot capture the legacy default stream, on which every program starts. A capture or dry run of it is
made on a stream of the device's own that *stands in* for it: while one is open on a thread, the default stream's
work goes there, and ``current_stream()`` still answers with the default stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch

from halma.backends.cuda import driver
from halma.backends.cuda.driver import ensure_context, is_capturing
from halma.backends.cuda.queues import Lending, new_queue, pooled_queue
from halma.hal.backend import DevicePart, Event, MemoryInfo, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import note_failure, open_captures, refuse_other_thread


class OpenSegment(Protocol):
    """What streams and events need to know of an open capture."""

    streams: set[int]


class CudaState(threading.local):
    """What is current on a thread.

    Attributes:
        segment: the open capture.
        home, stand_in: while set, work for the stream ``home`` goes to ``stand_in``.
        entered: streams entered as context managers, each with what was current before.
    """

    segment: OpenSegment | None = None
    home: CudaStream | None = None
    stand_in: torch.cuda.Stream | None = None

    def __init__(self) -> None:
        self.entered: list[tuple[CudaStream, tuple[int, int, int]]] = []


class CudaEvent:
    """A point in a stream's work. One recorded in a capture means nothing outside it (G9)."""

    __slots__ = ("name", "recorded", "segment", "state", "torch")

    def __init__(self, state: CudaState, name: str = "") -> None:
        self.name = name
        self.state = state
        self.torch = torch.cuda.Event()
        self.recorded = False
        self.segment: OpenSegment | None = None

    def query(self) -> bool:
        """Whether the work before it is done; a new event counts as done.

        Raises:
            CaptureError: a capture is open on this thread, or the event was recorded in one.
        """
        self._refuse_capture("query()")
        return self.torch.query()

    def synchronize(self) -> None:
        """Wait for it on the host.

        Raises:
            CaptureError: a capture is open on this thread, or the event was recorded in one.
        """
        self._refuse_capture("synchronize()")
        self.torch.synchronize()

    def _refuse_capture(self, how: str) -> None:
        refuse_on_host(self.state, f"{how} of the event {self.name!r}")
        if self.segment is not None:
            raise CaptureError(
                f"the event {self.name!r} belongs to a capture",
                asked=how,
                found="it was recorded while a graph was captured, so the host can never see it pass",
                do="record it again outside the capture",
            )


class CudaStream:
    """A queue of the device. Equal to every other object that stands for the same queue.

    Attributes:
        torch: the stream itself; work goes to :attr:`queue`.
    """

    __slots__ = ("__weakref__", "_device", "_handle", "_name", "state", "torch")

    def __init__(self, state: CudaState, name: str, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self.state = state
        self.torch = stream
        self._handle: int = stream.cuda_stream
        self._name = name
        self._device = device

    @property
    def name(self) -> str:
        """As given to ``new_stream``; ``main`` for the default stream."""
        return self._name

    @property
    def device(self) -> DevicePart:
        """The device that it belongs to."""
        return self._device

    @property
    def queue(self) -> torch.cuda.Stream:
        """Where its work goes now: itself, or what stands in for it on this thread."""
        state = self.state
        if state.stand_in is not None and state.home == self:
            return state.stand_in
        return self.torch

    @property
    def handle(self) -> int:
        """The ``cudaStream_t`` of :attr:`queue`."""
        return self._handle if self.state.stand_in is None else self.queue.cuda_stream  # every launch asks

    @property
    def is_default(self) -> bool:
        """Whether it is the legacy default stream, which the driver cannot capture."""
        return self._handle == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.torch == other.torch

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        return f"CudaStream({self._name!r})"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __enter__(self) -> CudaStream:
        index = self._device.index
        ensure_context(index)
        self.state.entered.append((self, torch._C._cuda_getCurrentStream(index)))
        set_current(self.queue)
        return self

    def __exit__(self, *exc: object) -> None:
        entered = self.state.entered
        # From the inside out, so that an exception which skipped an exit leaves nothing behind.
        for position in range(len(entered) - 1, -1, -1):
            if entered[position][0] is self:
                _set_current(*entered[position][1])
                del entered[position:]
                return

    def record(self, event: Event) -> None:
        """Put ``event`` behind the work issued so far."""
        event, segment, queue = _own(event), self.state.segment, self.queue
        event.segment = segment if segment is not None and _takes_part(segment, queue) else None
        event.recorded = True
        event.torch.record(queue)

    def wait(self, event: Event) -> None:
        """Let later work start only after ``event``; in a capture this is how a stream joins.

        Raises:
            CaptureError: the event and this wait do not belong to the same capture (G9).
        """
        event, segment, queue = _own(event), self.state.segment, self.queue
        if event.segment is not None and event.segment is not segment:
            self._refuse_event(event, "it was recorded in another capture, and events do not cross a capture's end")
        if segment is not None and event.segment is None and _takes_part(segment, queue):
            why = "on a stream that takes no part in this capture, or before it began" if event.recorded else "never"
            self._refuse_event(event, f"it was recorded {why}" if event.recorded else "it was never recorded")
        queue.wait_event(event.torch)
        if segment is not None and event.segment is segment:
            segment.streams.add(queue.cuda_stream)

    def _refuse_event(self, event: CudaEvent, found: str) -> NoReturn:
        error = CaptureError(
            f"stream {self._name!r} cannot wait for the event {event.name!r}",
            found=found,
            do="record it again where it is waited for, on a stream that takes part",
        )
        note_failure(error)
        raise error

    def synchronize(self) -> None:
        """Wait for this stream on the host.

        Raises:
            CaptureError: a capture is open on this thread.
        """
        refuse_on_host(self.state, f"synchronize() of stream {self._name!r}")
        self.torch.synchronize()


class CudaDevice:
    """Properties, memory, streams and events of one device.

    Args:
        state: what is current on each thread, shared with the graph part.
        index: torch's number of the device.
    """

    def __init__(self, state: CudaState, index: int) -> None:
        ensure_context(index)
        self.index = index
        self._state = state
        self._main = CudaStream(state, "main", self, torch.cuda.default_stream(index))
        self._queues: Lending[torch.cuda.Stream] = Lending(lambda: new_queue(index))
        # Live streams by torch's number of their queue.
        self._streams: weakref.WeakValueDictionary[int, CudaStream] = weakref.WeakValueDictionary()
        # From the pool of high priority, which new_stream() never takes from: it must be nobody else's stream.
        self._stand_in = torch.cuda.Stream(index, priority=-1)

    @property
    def torch_device(self) -> torch.device:
        """``cuda:<index>``."""
        return torch.device("cuda", self.index)

    def properties(self) -> Mapping[str, str]:
        """Name, architecture, sizes and versions, for reports."""
        found = torch.cuda.get_device_properties(self.index)
        return {
            "name": found.name,
            "arch": f"sm_{found.major}{found.minor}",
            "multiprocessors": str(found.multi_processor_count),
            "memory": f"{found.total_memory:,} bytes",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    def memory_info(self) -> MemoryInfo:
        """What the driver says, for the whole device: other processes count too."""
        free, total = torch.cuda.mem_get_info(self.index)
        return MemoryInfo(free, total)

    def current_stream(self) -> CudaStream:
        """The stream of this thread that torch's work goes to; the default stream is ``main``."""
        state = self._state
        number, index, kind = torch._C._cuda_getCurrentStream(self.index)
        if state.stand_in is not None and state.stand_in.stream_id == number:
            assert state.home is not None
            return state.home
        if number == self._main.torch.stream_id:
            return self._main
        if state.entered and state.entered[-1][0].torch.stream_id == number:
            return state.entered[-1][0]
        known = self._streams.get(number)
        if known is None:
            made = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
            known = self._streams[number] = CudaStream(self._state, f"stream {made.cuda_stream:#x}", self, made)
        return known

    def new_stream(self, name: str) -> CudaStream:
        """A stream whose queue is no other live stream's, be it ours or torch's; without bindings, no other of ours.

        Raises:
            CapabilityError: there are no bindings, and all of torch's streams are in use.
        """
        ensure_context(self.index)
        own = driver.why_missing() is None
        current = torch._C._cuda_getCurrentStream(self.index)[0]
        made = (
            self._queues.take()
            if own
            else pooled_queue(self.index, lambda number: number == current or number in self._streams)
        )
        stream = CudaStream(self._state, name, self, made)
        if own:
            self._queues.lend(stream, made)
        self._streams[made.stream_id] = stream
        return stream

    def new_event(self, name: str = "") -> CudaEvent:
        """An event without timing, which counts as done until it is recorded."""
        return CudaEvent(self._state, name)

    def synchronize(self) -> None:
        """Wait for all work of the device.

        Raises:
            CaptureError: a capture is open: on this thread there is nothing to wait for, and from another one the
                wait would break it.
        """
        if open_captures:
            refuse_other_thread("synchronize() of the device")
        refuse_on_host(self._state, "synchronize() of the device")
        torch.cuda.synchronize(self.index)

    @contextmanager
    def standing_in(self, stream: CudaStream) -> Generator[torch.cuda.Stream]:
        """``stream`` is current until the block ends, through a stream that the driver can capture; gives that one."""
        state, before = self._state, torch._C._cuda_getCurrentStream(self.index)
        if stream.is_default:
            state.home, state.stand_in = stream, self._stand_in
        try:
            set_current(stream.queue)
            yield stream.queue
        finally:
            state.home = state.stand_in = None
            _set_current(*before)

    @property
    def upload_stream(self) -> torch.cuda.Stream:
        """For work of the driver's own, such as uploading executables."""
        return self._stand_in


def set_current(stream: torch.cuda.Stream) -> None:
    """Make ``stream`` torch's current stream of this thread."""
    _set_current(stream.stream_id, stream.device_index, stream.device_type)


def _set_current(number: int, index: int, kind: int) -> None:
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


def _takes_part(segment: OpenSegment, queue: torch.cuda.Stream) -> bool:
    handle = queue.cuda_stream
    return handle in segment.streams or (handle != 0 and is_capturing(handle))  # forked behind our back


def refuse_on_host(state: CudaState, how: str) -> None:
    """Refuse a host wait while this thread captures: it would make the capture invalid.

    Raises:
        CaptureError: a capture is open on this thread.
    """
    if state.segment is None:
        return
    error = CaptureError(
        f"{how} inside a capture",
        found="captured work has not run, so there is nothing to wait for",
        do="wait after the replay",
    )
    note_failure(error)
    raise error


def own_stream(stream: Stream) -> CudaStream:
    """``stream`` as one of ours.

    Raises:
        CaptureError: another backend made it.
    """
    if not isinstance(stream, CudaStream):
        raise CaptureError("not a stream of the cuda backend", found=f"{stream!r}", do="use backend.device's streams")
    return stream


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise CaptureError("not an event of the cuda backend", found=f"{event!r}", do="use backend.device.new_event()")
    return event
