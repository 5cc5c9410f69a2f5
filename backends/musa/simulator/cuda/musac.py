"""``torch_musa._MUSAC`` over torch.cuda: the same names as the CPU engine's, on real streams and a real allocator."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Final

import torch

from halma.backends.musa.simulator.cuda.graph import SimGraph, release_pool
from halma.backends.musa.simulator.records import MemPool, MemPoolContext, MusaDeviceProperties

DEVICE_TYPE: Final = "cuda"
"""torch's type of the tensors here."""
VERSION: Final = 40300
"""Of the toolkit of torch_musa 2.7.1."""
_C: Any = torch._C
_StreamBase: Any = _C._CudaStreamBase
_EventBase: Any = _C._CudaEventBase
_pid = os.getpid()


class MusaStreamBase(_StreamBase):
    """``_MusaStreamBase``: a stream of torch.cuda that hides its own name for the handle."""

    @property
    def musa_stream(self) -> int:
        return _StreamBase.cuda_stream.__get__(self)

    @property
    def cuda_stream(self) -> int:
        raise AttributeError("a stream of torch_musa has no cuda_stream: its handle is musa_stream")


class MusaEventBase(_EventBase):
    """``_MusaEventBase``."""

    def record(self, stream: Any) -> None:
        _EventBase.record(self, _own(stream))

    def wait(self, stream: Any) -> None:
        _EventBase.wait(self, _own(stream))

    @property
    def musa_event(self) -> int:
        return _EventBase.cuda_event.__get__(self)

    @property
    def cuda_event(self) -> int:
        raise AttributeError("an event of torch_musa has no cuda_event: its handle is musa_event")


def _own(stream: Any) -> Any:
    if not isinstance(stream, MusaStreamBase):
        raise TypeError(f"expected a torch_musa stream, not {type(stream).__module__}.{type(stream).__name__}")
    return stream


def _properties(index: int) -> MusaDeviceProperties:
    found = torch.cuda.get_device_properties(index)
    return MusaDeviceProperties(
        f"MTT S5000 (simulated on {found.name})", 3, 1, int(found.is_multi_gpu_board), int(found.is_integrated),
        found.multi_processor_count, found.total_memory,
    )  # fmt: skip


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    _C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def _default_stream(index: int) -> Any:
    return _C._cuda_getDefaultStream(index)


def _can_access(device: int, peer: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, peer))


def _begin_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    _C._cuda_beginAllocateCurrentThreadToPool(device, mempool_id)


def _end_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    _C._cuda_endAllocateToPool(device, mempool_id)


def _snapshot() -> dict[str, Any]:
    return {"segments": torch.cuda.memory_snapshot(), "device_traces": [], "allocator_settings": {}}


def _memory_stats(index: int) -> dict[str, Any]:
    return dict(torch.cuda.memory_stats_as_nested_dict(index))


def _error_string(code: Any) -> str:
    cudart: Any = torch.cuda.cudart()
    return str(cudart.cudaGetErrorString(cudart.cudaError(int(code))))


def _memory_info(index: int) -> tuple[int, int]:
    return torch.cuda.mem_get_info(index)


def new_pool_id() -> tuple[int, int]:
    """A pool that torch's allocator knows of nobody else's."""
    return tuple(_C._graph_pool_handle())


class CudaMemPool(MemPool):
    """``_MemPool``: an id, of torch's own numbering. Its end gives nothing back."""

    def __init__(self, allocator: Any = None, is_user_created: bool = True) -> None:
        super().__init__(allocator, is_user_created)
        self._id = new_pool_id()


musart: Final = SimpleNamespace(
    musaError=SimpleNamespace(success=0), musaGetErrorString=_error_string, musaMemGetInfo=_memory_info
)

NAMES: Final[dict[str, Any]] = {
    "_device_type": DEVICE_TYPE,
    "_MusaStreamBase": MusaStreamBase,
    "_MusaEventBase": MusaEventBase,
    "_MUSAGraph": SimGraph,
    "_graph_pool_handle": new_pool_id,
    "_MusaDeviceProperties": MusaDeviceProperties,
    "_get_device_properties": _properties,
    "_musa_init": torch.cuda.init,
    "_musa_isInBadFork": lambda: os.getpid() != _pid and torch.cuda.is_initialized(),
    "_musa_getDevice": torch.cuda.current_device,
    "_musa_getDeviceCount": torch.cuda.device_count,
    "_musa_setDevice": torch.cuda.set_device,
    "_musa_exchangeDevice": lambda index: torch.cuda._exchange_device(index),
    "_musa_maybeExchangeDevice": lambda index: torch.cuda._maybe_exchange_device(index),
    "_musa_canDeviceAccessPeer": _can_access,
    "_musa_getArchFlags": lambda: "mp_31",
    "_musa_synchronize": torch.cuda.synchronize,
    "_musa_sleep": lambda cycles: _C._cuda_sleep(cycles),
    "_musa_getDefaultStream": _default_stream,
    "_musa_getCurrentStream": lambda index: _C._cuda_getCurrentStream(index),
    "_musa_getCurrentRawStream": lambda index: _C._cuda_getCurrentRawStream(index),
    "_musa_setStream": _set_stream,
    "_musa_isCurrentStreamCapturing": lambda: _C._cuda_isCurrentStreamCapturing(),
    "_musa_emptyCache": torch.cuda.empty_cache,
    "_musa_memoryStats": _memory_stats,
    "_musa_resetPeakMemoryStats": torch.cuda.reset_peak_memory_stats,
    "_musa_resetAccumulatedMemoryStats": torch.cuda.reset_accumulated_memory_stats,
    "_musa_memorySnapshot": _snapshot,
    "_musa_setMemoryFraction": torch.cuda.set_per_process_memory_fraction,
    "_musa_getAllocatorBackend": lambda: "native",
    "_musa_beginAllocateToPool": _begin_to_pool,
    "_musa_beginAllocateCurrentStreamToPool": _begin_to_pool,
    "_musa_endAllocateCurrentStreamToPool": _end_to_pool,
    "_musa_releasePool": release_pool,
    "_MemPool": CudaMemPool,
    "_MemPoolContext": MemPoolContext,
    "_musart": musart,
    "_mccl_version": lambda: (2, 11, 4),
}
"""Name in ``_MUSAC`` -> what stands there."""
