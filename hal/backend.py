"""The contract between the layer and a backend.

A backend is a frozen :class:`BackendSpec`, offered through the hook ``halma_register_backends``, and behind
it a :class:`Backend` made of parts. Each part is one Protocol, small enough for one file. What a device
cannot do is a field of its capabilities, not an exception path.

This module imports no torch at run time: listing backends must stay cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from halma.hal.capabilities import Capabilities

if TYPE_CHECKING:
    import torch

    from halma.hal.collectives.contract import ChannelDriver, ChannelSite
    from halma.hal.workspace import Workspace

API_VERSION = 1
"""Version of the contract on this page. N and N-1 are accepted (B6)."""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can be used here, and why (not). ``detail`` is for ``halma doctor``."""

    ok: bool
    reason: str
    detail: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class BackendSpec:
    """What a plugin registers.

    Args:
        name: the name used by ``--backend`` and ``HALMA_BACKEND``.
        api_version: the contract it was written for.
        probe: says whether the backend can be used. Imports no torch, creates no context, never raises (B1).
        factory: builds the backend; called once, when it is selected.
        accelerator: ``auto`` looks at accelerators only.
        simulated: stands in for hardware; never chosen by ``auto``, marks what it produces (B10).
        evidence: how results of this backend were obtained: cpu, contract, simulated, cuda or musa.
    """

    name: str
    api_version: int
    probe: Callable[[], Probe]
    factory: Callable[[], Backend]
    accelerator: bool = True
    simulated: bool = False
    evidence: str = "unknown"


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of device memory: what can still be taken, and what there is."""

    free: int
    total: int


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it is done; raises while captured."""
        ...

    def synchronize(self) -> None:
        """Wait for it on the host; raises during capture."""
        ...


class Stream(Protocol):
    """An ordered queue of work. As a context manager it becomes the current stream of this thread.

    Two objects that stand for one queue compare and hash equal.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> DevicePart:
        """The device it belongs to: whoever is given a stream can ask for events and for the current stream."""
        ...

    def __enter__(self) -> Stream: ...
    def __exit__(self, *exc: object) -> None: ...
    def record(self, event: Event) -> None:
        """Put ``event`` behind the work issued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let later work of this stream start only after ``event``."""
        ...

    def synchronize(self) -> None:
        """Wait for this stream on the host; raises during capture."""
        ...


class DevicePart(Protocol):
    """Properties, streams, events, memory information of one device."""

    @property
    def torch_device(self) -> torch.device: ...
    def properties(self) -> Mapping[str, str]: ...
    def memory_info(self) -> MemoryInfo: ...
    def current_stream(self) -> Stream: ...
    def new_stream(self, name: str) -> Stream: ...
    def new_event(self, name: str = "") -> Event: ...
    def synchronize(self) -> None: ...


class SharedMemory(Protocol):
    """Device memory at a fixed address that other processes of this machine can map.

    Its owner made it with :meth:`MemoryPart.exportable`, a peer mapped it with :meth:`MemoryPart.open`. It lives
    until :meth:`close`, which a peer calls before the owner does (A9): tensors and addresses die with it.
    """

    @property
    def address(self) -> int:
        """Where it starts for this process's device code."""
        ...

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as uint8 [nbytes]; owns nothing."""
        ...

    def close(self) -> None:
        """Unmap, and free where this process owns it; twice is once."""
        ...


class MemoryPart(Protocol):
    """Plain device memory, pinned host memory, memory that peers can map."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can read and write asynchronously, at the tensor's own address."""
        ...

    def on_device(self, pinned: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor of the device, for its kernels to write what the host reads; keeps it alive."""
        ...

    def not_exportable(self) -> str | None:
        """Why device memory of this process cannot be given to peers, or None (A8). Asked before a plan is kept."""
        ...

    def exportable(self, nbytes: int) -> tuple[SharedMemory, bytes]:
        """Zero-filled memory that peers can map, and the handle that they map it with.

        Raises:
            MemoryError: there is not enough.
        """
        ...

    def open(self, handle: bytes) -> SharedMemory:
        """Map a peer's memory. A handle made by this very process gives a view of the same memory.

        Raises:
            CollectiveError: the handle does not fit this backend, or its owner is gone.
        """
        ...


@dataclass(frozen=True)
class GraphNode:
    """One node of a captured segment, with every host value that was baked into it.

    ``parameters`` hold what must not change between two captures of the same program: scalars, shapes,
    strides, storage offsets. ``where`` is the line of the program that made it; ``raw`` that it was the
    program's own arithmetic, made outside every op (W5).
    """

    name: str
    parameters: tuple[Any, ...]
    where: str = ""
    raw: bool = False


@dataclass(frozen=True)
class GraphCounts:
    """Work of a segment or step, counted (G4, G10)."""

    kernels: int = 0
    copies: int = 0
    allocations: int = 0
    fallback_bytes: int = 0
    """Bytes taken from the workspace on behalf of ops without an out-variant."""


@dataclass(frozen=True)
class PoolUse:
    """A result that an op made in the pool that captures share, because no place was given for it (G10)."""

    op: str
    nbytes: int
    where: str


class GraphPart(Protocol):
    """Begin, end, instantiate, replay, destroy: and nothing that decides anything.

    Only :mod:`halma.hal.graph` calls it. Handles are opaque. One thread captures at a time; ``begin`` and
    ``end`` happen on one stream.
    """

    def unsupported(self) -> str | None:
        """Why this device cannot capture, or None."""
        ...

    def is_capturing(self) -> bool:
        """Whether this thread is capturing; a query that fails raises (G25)."""
        ...

    def dry_run(self, program: Callable[[], Any], workspace: Workspace) -> None:
        """Run ``program`` so that ``workspace`` sees every take; may or may not execute it."""
        ...

    def begin(self, stream: Stream, workspace: Workspace) -> None:
        """Start recording ``stream``, the current one until ``end``. Functional ops take their results from
        ``workspace``. May be called again after ``end`` where the capability ``graph_segments`` holds."""
        ...

    def end(self, stream: Stream) -> Any:
        """Stop recording and return the template (opaque). Raises what made the capture invalid."""
        ...

    def abandon(self, stream: Stream) -> None:
        """Stop recording and forget it; never raises; the stream is usable afterwards."""
        ...

    def instantiate(self, template: Any) -> Any:
        """An executable (opaque) of a template."""
        ...

    def replay(self, executable: Any, stream: Stream) -> None:
        """Queue the executable's work on ``stream``."""
        ...

    def destroy(self, executable: Any) -> None:
        """Give back an executable; never called while any capture is open."""
        ...

    def nodes(self, template: Any) -> Sequence[GraphNode]:
        """The nodes with their baked parameters, where the capability ``graph_parameters`` holds."""
        ...

    def counts(self, template: Any) -> GraphCounts:
        """What the template does, counted."""
        ...

    def pool_bytes(self, workspace: Workspace) -> int | None:
        """Bytes of the pool that captures on ``workspace`` share for what ops allocate themselves; None: there is
        none, because every result is placed in the workspace."""
        ...

    def pool_uses(self, template: Any) -> Sequence[PoolUse]:
        """The results in that pool, in the program's order."""
        ...

    def counting(self) -> AbstractContextManager[Callable[[], GraphCounts]]:
        """Count eager work of this thread: ``with graphs.counting() as counts: ...; counts()``."""
        ...


@dataclass(frozen=True)
class KernelSource:
    """A translation unit of the portable dialect (``backends/simt``).

    Args:
        name: for messages and the cache's file name.
        text: the source; entry points are ``extern "C"``.
        headers: name as it is included -> text.
        defines: macro -> value; part of the cache's key like all the rest.
        carveout: entry -> percent of a multiprocessor's memory that it asks to have shared, for the driver to follow or
            not; no part of the key.
    """

    name: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    defines: Mapping[str, str] = field(default_factory=dict[str, str])
    carveout: Mapping[str, int] = field(default_factory=dict[str, int])


class KernelPart(Protocol):
    """Compile a source of the portable dialect, load it, launch its kernels."""

    @property
    def dialect(self) -> str:
        """Spelling of the dialect's primitives that the compiler reads (``backends/simt``)."""
        ...

    @property
    def clock_khz(self) -> int | None:
        """Rate of the device's clock; None where it counts nanoseconds itself."""
        ...

    def unsupported(self) -> str | None: ...
    def load(self, source: KernelSource, entries: Sequence[str]) -> Mapping[str, Any]:
        """Compile (or find in the cache on disk) and load: entry point -> kernel, ready to launch (C18).

        Raises:
            KernelError: it does not compile; with the compiler's log. Never retried silently (K6).
        """
        ...

    def launch(
        self,
        kernel: Any,
        grid: int,
        block: int,
        args: Sequence[Any],
        *,
        stream: Stream,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Queue a launch. ``args`` are ints (8 bytes), ``ctypes`` scalars or ``numpy`` scalars of the parameter's size.

        ``dependent``: the kernel may start before the one before it has ended, and waits for it itself
        (capability ``dependent_launch``).
        """
        ...


class CollectivePart(Protocol):
    """Bootstrap through torch.distributed, and drivers of channels over an arena."""

    def unsupported(self) -> str | None: ...
    @property
    def torch_backend(self) -> str: ...
    def channel(self, site: ChannelSite) -> ChannelDriver:
        """The driver of one channel of an arena on this rank (:mod:`halma.hal.collectives.contract`)."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A device family, ready to use. It may have ``headroom`` too: see :class:`halma.hal.policy.Headroom`."""

    @property
    def name(self) -> str: ...
    @property
    def evidence(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def device(self) -> DevicePart: ...
    @property
    def memory(self) -> MemoryPart: ...
    @property
    def graphs(self) -> GraphPart: ...
    @property
    def kernels(self) -> KernelPart: ...
    @property
    def collectives(self) -> CollectivePart: ...
