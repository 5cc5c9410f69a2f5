"""As much of torch.cuda as the simulator over it calls, without a GPU: bookkeeping only, nothing runs.

Streams are (id, device, type); a graph holds a use of its pool from ``capture_begin`` to ``reset``, as torch's does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

current: list[tuple[int, int, int]] = [(0, 0, 1)]
pool_uses: Counter[tuple[int, int]] = Counter()
instantiated: list[int] = [0]
ids = itertools.count(1)


class StreamBase:
    """``torch._C._CudaStreamBase``."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0,
                stream_ptr: int = 0) -> Any:  # fmt: skip
        made = super().__new__(cls)
        made.stream_id = stream_id if device_type else stream_ptr or next(ids)
        made.device_index, made.device_type, made.priority = device_index, 1, priority
        return made

    stream_id: int
    device_index: int
    device_type: int
    priority: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return 16 * self.stream_id

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamBase) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class EventBase:
    """``torch._C._CudaEventBase``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls)

    cuda_event = 0

    def record(self, stream: Any) -> None:
        assert isinstance(stream, StreamBase)

    def wait(self, stream: Any) -> None:
        assert isinstance(stream, StreamBase)

    def query(self) -> bool:
        return True


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._pool = pool
        pool_uses[pool] += 1

    def capture_end(self) -> None:
        pass

    def instantiate(self) -> None:
        instantiated[0] += 1

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        if self._pool is not None:
            pool_uses[self._pool] -= 1
            self._pool = None

    def __del__(self) -> None:
        self.reset()


class Event(EventBase):
    """``torch.cuda.Event``."""


class Stream(StreamBase):
    """``torch.cuda.Stream``."""


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``."""


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    current[0] = (stream_id, device_index, device_type)


def install() -> None:
    """Into torch, before the simulator is imported."""
    for name, value in {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_getCurrentStream": lambda index: current[0],
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": _set_stream,
        "_graph_pool_handle": lambda: (0, next(ids)),
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():
        setattr(torch._C, name, value)
    for name, value in {
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "init": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda index: (3, 4),
        "memory_snapshot": lambda: [{"total_size": 5, "segment_pool_id": (0, 1)}],
        "memory_stats_as_nested_dict": lambda index: {"reserved_bytes": {"all": {"current": 7, "peak": 8}}},
        "get_device_properties": lambda index: _Properties(),
    }.items():
        setattr(torch.cuda, name, value)


class _Properties:
    name, is_multi_gpu_board, is_integrated, multi_processor_count, total_memory = "a GPU", 0, 0, 132, 1 << 30
    uuid = warp_size = shared_memory_per_block_optin = "not of the seven"
