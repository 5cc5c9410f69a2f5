"""``torch_musa._MUSAC`` of the CPU simulator: the names that torch_musa 2.7.1's Python calls in C++.

Names and arguments: torch_musa/csrc/core/Module.cpp, Graph.cpp, Stream.cpp and Event.cpp of that tag.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, Final

import torch

from halma.backends.musa.simulator import faults
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu import placing
from halma.backends.musa.simulator.cpu.graph import SimGraph
from halma.backends.musa.simulator.faults import TEXTS, SimulatedError
from halma.backends.musa.simulator.records import MemPool, MemPoolContext, MusaDeviceProperties, new_pool_id

_PRIVATE_USE_1: Final = 20
"""torch's number of the device type."""
_pid = os.getpid()


# -- streams and events ------------------------------------------------------------------------------------


class MusaStreamBase:
    """``_MusaStreamBase``."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int = 0,
        device_index: int = 0,
        device_type: int = 0,
        stream_ptr: int = 0,
    ) -> Any:
        made = super().__new__(cls)
        if device_type:
            made._sim = driver.stream_of(device_index, stream_id)
        elif stream_ptr:
            made._sim = driver.stream_at(stream_ptr, driver.current_device())
        else:
            made._sim = driver.new_stream(driver.current_device())
        made.priority = priority
        return made

    _sim: driver.SimStream
    priority: int

    @property
    def stream_id(self) -> int:
        return self._sim.number

    @property
    def device_index(self) -> int:
        return self._sim.index

    @property
    def device_type(self) -> int:
        return _PRIVATE_USE_1

    @property
    def device(self) -> torch.device:
        return torch.device(placing.DEVICE_TYPE, self._sim.index)

    @property
    def musa_stream(self) -> int:
        return self._sim.handle

    def query(self) -> bool:
        driver.refuse_unsafe(self._sim)
        return True

    def synchronize(self) -> None:
        driver.refuse_unsafe(self._sim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MusaStreamBase) and other._sim is self._sim

    def __hash__(self) -> int:
        return hash(self._sim)


class MusaEventBase:
    """``_MusaEventBase``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        made = super().__new__(cls)
        made._sim = driver.SimEvent()
        made._timed = enable_timing
        made._shared = interprocess
        return made

    _sim: driver.SimEvent
    _timed: bool
    _shared: bool

    @property
    def device(self) -> torch.device:
        return torch.device(placing.DEVICE_TYPE, driver.current_device())

    @property
    def musa_event(self) -> int:
        return self._sim.handle

    def record(self, stream: Any) -> None:
        self._sim.record(_own(stream))

    def wait(self, stream: Any) -> None:
        self._sim.wait(_own(stream))

    def query(self) -> bool:
        return self._sim.query()

    def synchronize(self) -> None:
        self._sim.query()

    def elapsed_time(self, end: Any) -> float:
        if not (self._timed and isinstance(end, MusaEventBase) and end._timed):
            raise SimulatedError(faults.INVALID_HANDLE)
        if self._sim.time is None or end._sim.time is None:
            raise SimulatedError(faults.INVALID_HANDLE)
        return 1000.0 * (end._sim.time - self._sim.time)

    def ipc_handle(self) -> bytes:
        raise SimulatedError(faults.NOT_SUPPORTED)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
        raise SimulatedError(faults.NOT_SUPPORTED)


def _own(stream: Any) -> driver.SimStream:
    if not isinstance(stream, MusaStreamBase):
        raise TypeError(f"expected a torch_musa stream, not {type(stream).__name__}")
    return stream._sim


# -- devices -----------------------------------------------------------------------------------------------


def _properties(index: int) -> MusaDeviceProperties:
    total = placing.allocators[index].total
    return MusaDeviceProperties("MTT S5000 (simulated on the CPU)", 3, 1, 0, 0, 56, total)


def _exchange(index: int) -> int:
    return driver.set_device(index) if index >= 0 else -1


def _set_device(index: int) -> None:
    if not 0 <= index < len(placing.allocators):
        raise RuntimeError("MUSA error: invalid device ordinal")
    driver.set_device(index)


def _can_access(device: int, peer: int) -> bool:
    return device != peer


def _stream_data(stream: driver.SimStream) -> tuple[int, int, int]:
    return stream.number, stream.index, _PRIVATE_USE_1


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    driver.set_stream(driver.stream_of(device_index, stream_id))


def _synchronize() -> None:
    driver.refuse_unsafe()


# -- memory ------------------------------------------------------------------------------------------------


def _memory_stats(index: int) -> dict[str, Any]:
    a = placing.allocators[index]

    def stat(now: int, peak: int) -> dict[str, Any]:
        return {"all": {"current": now, "peak": peak, "allocated": now, "freed": 0}}

    return {
        "allocated_bytes": stat(a.allocated, a.peak_allocated),
        "reserved_bytes": stat(a.reserved, a.peak_reserved),
        "num_ooms": 0,
    }


def _reset_peak(index: int) -> None:
    a = placing.allocators[index]
    a.peak_allocated, a.peak_reserved = a.allocated, a.reserved


def _snapshot() -> dict[str, Any]:
    segments = [segment for allocator in placing.allocators for segment in allocator.segments()]
    return {"segments": segments, "device_traces": [[] for _ in placing.allocators], "allocator_settings": {}}


def _empty_cache() -> None:
    for allocator in placing.allocators:
        allocator.empty_cache()


def _set_fraction(fraction: float, index: int) -> None:
    placing.allocators[index].fraction = fraction


def _begin_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    placing.allocators[device].begin(mempool_id, lambda _: True)


def _begin_stream_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    stream = driver.current_stream(device)
    placing.allocators[device].begin(mempool_id, lambda target: target is stream)


def _end_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    placing.allocators[device].end(mempool_id)


def _release_pool(device: int, mempool_id: tuple[int, int]) -> None:
    placing.allocators[device].release(mempool_id)


# -- libmusart as torch_musa gives it ----------------------------------------------------------------------


def _error_string(code: Any) -> str:
    return TEXTS.get(int(code), ("", "unrecognized error code"))[1]


def _memory_info(index: int) -> tuple[int, int]:
    allocator = placing.allocators[index]
    return allocator.free, allocator.total


def _sleep(cycles: int) -> None:
    time.sleep(cycles / 1e9)


musart: Final = SimpleNamespace(
    musaError=SimpleNamespace(success=0), musaGetErrorString=_error_string, musaMemGetInfo=_memory_info
)

NAMES: Final[dict[str, Any]] = {
    "_MusaStreamBase": MusaStreamBase,
    "_MusaEventBase": MusaEventBase,
    "_MUSAGraph": SimGraph,
    "_graph_pool_handle": lambda: new_pool_id(of_a_graph=False),
    "_MusaDeviceProperties": MusaDeviceProperties,
    "_get_device_properties": _properties,
    "_musa_init": lambda: None,
    "_musa_isInBadFork": lambda: os.getpid() != _pid and False,
    "_musa_getDevice": driver.current_device,
    "_musa_getDeviceCount": lambda: len(placing.allocators),
    "_musa_setDevice": _set_device,
    "_musa_exchangeDevice": _exchange,
    "_musa_maybeExchangeDevice": _exchange,
    "_musa_canDeviceAccessPeer": _can_access,
    "_musa_getArchFlags": lambda: "mp_31",
    "_musa_synchronize": _synchronize,
    "_musa_sleep": _sleep,
    "_musa_getDefaultStream": lambda index: _stream_data(driver.stream_of(index, 0)),
    "_musa_getCurrentStream": lambda index: _stream_data(driver.current_stream(index)),
    "_musa_getCurrentRawStream": lambda index: driver.current_stream(index).handle,
    "_musa_setStream": _set_stream,
    "_musa_isCurrentStreamCapturing": lambda: driver.current_stream().capture is not None,
    "_musa_emptyCache": _empty_cache,
    "_musa_memoryStats": _memory_stats,
    "_musa_resetPeakMemoryStats": _reset_peak,
    "_musa_resetAccumulatedMemoryStats": lambda index: None,
    "_musa_memorySnapshot": _snapshot,
    "_musa_setMemoryFraction": _set_fraction,
    "_musa_getAllocatorBackend": lambda: "native",
    "_musa_beginAllocateToPool": _begin_to_pool,
    "_musa_beginAllocateCurrentStreamToPool": _begin_stream_to_pool,
    "_musa_endAllocateCurrentStreamToPool": _end_to_pool,
    "_musa_releasePool": _release_pool,
    "_MemPool": MemPool,
    "_MemPoolContext": MemPoolContext,
    "_musart": musart,
    "_mccl_version": lambda: (2, 11, 4),
}
"""Name in ``_MUSAC`` -> what stands there."""
