"""A backend in front of a backend: writes the calls of its graphs and streams into one log, and fails on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from halma.hal.backend import Backend, DevicePart, Event, GraphCounts, GraphNode, PoolUse, Stream
from halma.hal.capabilities import Capabilities
from halma.hal.workspace import Workspace


class Injected(RuntimeError):
    """What a call raises that a test made fail; its text is the call's name."""


class RecordedStream:
    """A stream that logs what is recorded and waited for."""

    def __init__(self, device: RecordedDevice, inner: Stream) -> None:
        self._device = device
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def device(self) -> DevicePart:
        return self._device

    def __enter__(self) -> RecordedStream:
        self.inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedStream) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def record(self, event: Event) -> None:
        self._device.log.append(f"Record {self.name}")
        self.inner.record(event)

    def wait(self, event: Event) -> None:
        self._device.log.append(f"Wait {self.name}")
        self.inner.wait(event)

    def synchronize(self) -> None:
        self.inner.synchronize()


class RecordedDevice:
    """The device of a :class:`RecordedBackend`."""

    def __init__(self, inner: DevicePart, log: list[str]) -> None:
        self._inner = inner
        self.log = log
        self.torch_device = inner.torch_device
        self.properties = inner.properties
        self.memory_info = inner.memory_info
        self.new_event = inner.new_event
        self.synchronize = inner.synchronize

    def current_stream(self) -> RecordedStream:
        return RecordedStream(self, self._inner.current_stream())

    def new_stream(self, name: str) -> RecordedStream:
        return RecordedStream(self, self._inner.new_stream(name))


def _inner(stream: Stream) -> Stream:
    assert isinstance(stream, RecordedStream)
    return stream.inner


class RecordedGraphs:
    """Logs Begin, End, Abandon, Instantiate, Replay and Destroy; ``fail`` maps a name to which call of it raises,
    counted from 1."""

    def __init__(self, backend: Backend, log: list[str]) -> None:
        self._inner = backend.graphs
        self.log = log
        self.fail: dict[str, int] = {}
        self.live = 0
        self.unsupported = self._inner.unsupported
        self.is_capturing = self._inner.is_capturing
        self.dry_run = self._inner.dry_run

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name in self.fail:
            self.fail[name] -= 1
            if self.fail[name] == 0:
                raise Injected(name)

    def begin(self, stream: Stream, workspace: Workspace) -> None:
        self._call("Begin")
        self._inner.begin(_inner(stream), workspace)

    def end(self, stream: Stream) -> Any:
        self._call("End")
        return self._inner.end(_inner(stream))

    def abandon(self, stream: Stream) -> None:
        self.log.append("Abandon")
        self._inner.abandon(_inner(stream))

    def instantiate(self, template: Any) -> Any:
        self._call("Instantiate")
        executable = self._inner.instantiate(template)
        self.live += 1
        return executable

    def replay(self, executable: Any, stream: Stream) -> None:
        self._call("Replay")
        self._inner.replay(executable, _inner(stream))

    def destroy(self, executable: Any) -> None:
        self.log.append("Destroy")
        self._inner.destroy(executable)
        self.live -= 1

    def nodes(self, template: Any) -> Sequence[GraphNode]:
        return self._inner.nodes(template)

    def counts(self, template: Any) -> GraphCounts:
        return self._inner.counts(template)

    def pool_bytes(self, workspace: Workspace) -> int | None:
        return self._inner.pool_bytes(workspace)

    def pool_uses(self, template: Any) -> Sequence[PoolUse]:
        return self._inner.pool_uses(template)

    def counting(self) -> AbstractContextManager[Callable[[], GraphCounts]]:
        return self._inner.counting()


class RecordedBackend:
    """``backend`` with a log of its graphs and streams, in one order."""

    def __init__(self, backend: Backend) -> None:
        self.log: list[str] = []
        self.name, self.evidence = backend.name, backend.evidence
        self.capabilities: Capabilities = backend.capabilities
        self.device = RecordedDevice(backend.device, self.log)
        self.memory = backend.memory
        self.graphs = RecordedGraphs(backend, self.log)
        self.kernels = backend.kernels
        self.collectives = backend.collectives

    def since(self, *ignored: str) -> list[str]:
        """The log so far, emptied; without the calls named."""
        found = [call for call in self.log if call not in ignored]
        self.log.clear()
        return found
