"""A device, its streams and events.

No driver captures the legacy default stream, on which every program starts. A capture or dry run of it is
made on a stream of the device's own that *stands in* for it: while one is open on a thread, the default stream's
work goes there, and ``current_stream()`` still answers with the default stream.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch

from halma.backends.torch_device.family import Family
from halma.backends.torch_device.queues import Lending, pooled_queue
from halma.hal.backend import DevicePart, Event, MemoryInfo, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import note_failure, open_captures, refuse_other_thread


class OpenSegment(Protocol):
    """What streams and events need to know of an open capture."""

    streams: set[int]


class ThreadState(threading.local):
    """What is current on a thread.

    Attributes:
        segment: the open capture.
        home, stand_in: while set, work for the stream ``home`` goes to ``stand_in``.
        entered: streams entered as context managers, each with what was current before.
    """

    segment: OpenSegment | None = None
    home: DeviceStream | None = None
    stand_in: Any = None

    def __init__(self) -> None:
        self.entered: list[tuple[DeviceStream, tuple[int, int, int]]] = []


class DeviceEvent:
    """A point in a stream's work. One recorded in a capture means nothing outside it (G9)."""

    __slots__ = ("name", "recorded", "segment", "state", "torch")

    def __init__(self, state: ThreadState, event: Any, name: str = "") -> None:
        self.name = name
        self.state = state
        self.torch = event
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


class DeviceStream:
    """A queue of the device. Equal to every other object that stands for the same queue.

    Attributes:
        torch: the stream itself; work goes to :attr:`queue`.
    """

    __slots__ = ("__weakref__", "_device", "_handle", "_name", "raw", "state", "torch")

    def __init__(self, state: ThreadState, name: str, device: TorchDevice, stream: Any) -> None:
        self.state = state
        self.torch = stream
        self.raw = device.family.raw
        self._handle: int = self.raw(stream)
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
    def queue(self) -> Any:
        """Where its work goes now: itself, or what stands in for it on this thread."""
        state = self.state
        if state.stand_in is not None and state.home == self:
            return state.stand_in
        return self.torch

    @property
    def handle(self) -> int:
        """The driver's handle of :attr:`queue`."""
        return self._handle if self.state.stand_in is None else self.raw(self.queue)  # every launch asks

    @property
    def is_default(self) -> bool:
        """Whether it is the legacy default stream, which the driver cannot capture."""
        return self._handle == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStream) and self.torch == other.torch

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    def __enter__(self) -> DeviceStream:
        index, family = self._device.index, self._device.family
        family.ensure_context(index)
        self.state.entered.append((self, family.get_current(index)))
        self._device.set_current(self.queue)
        return self

    def __exit__(self, *exc: object) -> None:
        entered = self.state.entered
        # From the inside out, so that an exception which skipped an exit leaves nothing behind.
        for position in range(len(entered) - 1, -1, -1):
            if entered[position][0] is self:
                self._device.restore_current(*entered[position][1])
                del entered[position:]
                return

    def record(self, event: Event) -> None:
        """Put ``event`` behind the work issued so far."""
        event, segment, queue = self._device.own_event(event), self.state.segment, self.queue
        event.segment = segment if segment is not None and self._takes_part(segment, queue) else None
        event.recorded = True
        event.torch.record(queue)

    def wait(self, event: Event) -> None:
        """Let later work start only after ``event``; in a capture this is how a stream joins.

        Raises:
            CaptureError: the event and this wait do not belong to the same capture (G9).
        """
        event, segment, queue = self._device.own_event(event), self.state.segment, self.queue
        if event.segment is not None and event.segment is not segment:
            self._refuse_event(event, "it was recorded in another capture, and events do not cross a capture's end")
        if segment is not None and event.segment is None and self._takes_part(segment, queue):
            why = "on a stream that takes no part in this capture, or before it began" if event.recorded else "never"
            self._refuse_event(event, f"it was recorded {why}" if event.recorded else "it was never recorded")
        queue.wait_event(event.torch)
        if segment is not None and event.segment is segment:
            segment.streams.add(self.raw(queue))

    def _takes_part(self, segment: OpenSegment, queue: Any) -> bool:
        handle = self.raw(queue)
        return handle in segment.streams or (handle != 0 and self._device.family.is_capturing(handle))  # forked unseen

    def _refuse_event(self, event: DeviceEvent, found: str) -> NoReturn:
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


class TorchDevice(ABC):
    """Memory information, streams and events of one device; a family adds :meth:`properties`.

    Args:
        family: names and calls.
        state: what is current on each thread, shared with the graph part.
        index: torch's number of the device.
    """

    stream_class: type[DeviceStream] = DeviceStream
    event_class: type[DeviceEvent] = DeviceEvent

    def __init__(self, family: Family, state: ThreadState, index: int) -> None:
        family.ensure_context(index)
        self.family = family
        self.index = index
        self._state = state
        module = family.module
        self._main = self.stream_class(state, "main", self, module.default_stream(index))
        self._queues: Lending[Any] = Lending(lambda: family.new_queue(index))
        # Live streams by torch's number of their queue.
        self._streams: weakref.WeakValueDictionary[int, DeviceStream] = weakref.WeakValueDictionary()
        # From the pool of high priority, which new_stream() never takes from: it must be nobody else's stream.
        self._stand_in = module.Stream(index, priority=-1)

    @property
    def torch_device(self) -> torch.device:
        """Torch's device of this number."""
        return self.family.torch_device(self.index)

    @abstractmethod
    def properties(self) -> Mapping[str, str]:
        """Name, architecture, sizes and versions, for reports."""
        ...

    def memory_info(self) -> MemoryInfo:
        """What the driver says, for the whole device: other processes count too."""
        free, total = self.family.module.mem_get_info(self.index)
        return MemoryInfo(free, total)

    def current_stream(self) -> DeviceStream:
        """The stream of this thread that torch's work goes to; the default stream is ``main``."""
        state = self._state
        number, index, kind = self.family.get_current(self.index)
        if state.stand_in is not None and state.stand_in.stream_id == number:
            assert state.home is not None
            return state.home
        if number == self._main.torch.stream_id:
            return self._main
        if state.entered and state.entered[-1][0].torch.stream_id == number:
            return state.entered[-1][0]
        known = self._streams.get(number)
        if known is None:
            made = self.family.module.Stream(stream_id=number, device_index=index, device_type=kind)
            name = f"stream {self.family.raw(made):#x}"
            known = self._streams[number] = self.stream_class(self._state, name, self, made)
        return known

    def new_stream(self, name: str) -> DeviceStream:
        """A stream whose queue is no other live stream's, be it ours or torch's; without a driver to call, no other
        of ours.

        Raises:
            CapabilityError: there is no driver to call, and all of torch's streams are in use.
        """
        family = self.family
        family.ensure_context(self.index)
        own = family.why_no_driver() is None
        current = family.get_current(self.index)[0]
        made = (
            self._queues.take()
            if own
            else pooled_queue(family, self.index, lambda number: number == current or number in self._streams)
        )
        stream = self.stream_class(self._state, name, self, made)
        if own:
            self._queues.lend(stream, made)
        self._streams[made.stream_id] = stream
        return stream

    def new_event(self, name: str = "") -> DeviceEvent:
        """An event without timing, which counts as done until it is recorded."""
        return self.event_class(self._state, self.family.module.Event(), name)

    def synchronize(self) -> None:
        """Wait for all work of the device.

        Raises:
            CaptureError: a capture is open: on this thread there is nothing to wait for, and from another one the
                wait would break it.
        """
        if open_captures:
            refuse_other_thread("synchronize() of the device")
        refuse_on_host(self._state, "synchronize() of the device")
        self.family.module.synchronize(self.index)

    @contextmanager
    def standing_in(self, stream: DeviceStream) -> Generator[Any]:
        """``stream`` is current until the block ends, through a stream that the driver can capture; gives that one."""
        state, before = self._state, self.family.get_current(self.index)
        if stream.is_default:
            state.home, state.stand_in = stream, self._stand_in
        try:
            self.set_current(stream.queue)
            yield stream.queue
        finally:
            state.home = state.stand_in = None
            self.restore_current(*before)

    @property
    def upload_stream(self) -> Any:
        """For work of the driver's own, such as uploading executables."""
        return self._stand_in

    def set_current(self, stream: Any) -> None:
        """Make torch's ``stream`` the current one of this thread."""
        self.restore_current(stream.stream_id, stream.device_index, stream.device_type)

    def restore_current(self, number: int, index: int, kind: int) -> None:
        """Make the stream of these numbers the current one, as ``family.get_current`` gave them."""
        self.family.set_current(stream_id=number, device_index=index, device_type=kind)

    def own_stream(self, stream: Stream) -> DeviceStream:
        """``stream`` as one of ours.

        Raises:
            CaptureError: another backend made it.
        """
        if not isinstance(stream, self.stream_class):
            raise CaptureError(
                f"not a stream of the {self.family.name} backend",
                found=f"{stream!r}",
                do="use backend.device's streams",
            )
        return stream

    def own_event(self, event: Event) -> DeviceEvent:
        """``event`` as one of ours.

        Raises:
            CaptureError: another backend, or torch itself, made it.
        """
        if not isinstance(event, self.event_class):
            raise CaptureError(
                f"not an event of the {self.family.name} backend",
                found=f"{event!r}",
                do="use backend.device.new_event()",
            )
        return event


def refuse_on_host(state: ThreadState, how: str) -> None:
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
