"""Streams and events: signatures of torch_musa/core/stream.py, 2.7.1."""

from __future__ import annotations

import ctypes
from typing import Any

from halma.backends.musa.simulator.chosen import musac
from halma.backends.musa.simulator.front.device import Device, index_of

_C = musac()


class Stream(_C._MusaStreamBase):
    """A queue of a device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if device is None or ("stream_id" in kwargs and "device_index" in kwargs):
            return super().__new__(cls, priority=priority, **kwargs)
        with Device(device):
            return super().__new__(cls, priority=priority, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        if not isinstance(event, Event):
            raise TypeError(
                f"wait_event() takes a torch_musa.Event, not {type(event).__module__}.{type(event).__name__}"
            )
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        made = Event() if event is None else event
        if not isinstance(made, Event):
            raise TypeError(
                f"record_event() takes a torch_musa.Event, not {type(made).__module__}.{type(made).__name__}"
            )
        made.record(self)
        return made

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return super().query()

    def synchronize(self) -> None:
        super().synchronize()

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.musa_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and bool(super().__eq__(other))

    def __hash__(self) -> int:
        return hash((self.musa_stream, self.device))

    def __repr__(self) -> str:
        return f"<simulated torch_musa.Stream device={self.device} musa_stream={self.musa_stream:#x}>"


class ExternalStream(Stream):
    """A stream that somebody else made."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Any:
        with Device(device):
            return super().__new__(cls, stream_ptr=stream_ptr, **kwargs)


class Event(_C._MusaEventBase):
    """A point in a stream's work."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        return super().from_ipc_handle(device, handle)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        return super().query()

    def elapsed_time(self, end_event: Any) -> float:
        return super().elapsed_time(end_event)

    def synchronize(self) -> None:
        super().synchronize()

    def ipc_handle(self) -> Any:
        return super().ipc_handle()

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.musa_event)


class StreamContext:
    """A stream is current inside; nothing for None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._own = current_stream(None)
            self._there = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if self.stream is not None:
            set_stream(self._there)
            set_stream(self._own)


def stream(stream: Any) -> StreamContext:
    return StreamContext(stream)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    _C._musa_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def set_stream(stream: Any) -> None:
    if stream is not None:
        _set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)


def _made(data: tuple[int, int, int]) -> Stream:
    return Stream(stream_id=data[0], device_index=data[1], device_type=data[2])


def current_stream(device: Any = None) -> Stream:
    return _made(_C._musa_getCurrentStream(index_of(device, optional=True)))


def default_stream(device: Any = None) -> Stream:
    return _made(_C._musa_getDefaultStream(index_of(device, optional=True)))
