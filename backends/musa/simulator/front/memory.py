"""Memory: signatures of torch_musa/core/memory.py, 2.7.1."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from halma.backends.musa.simulator.chosen import musac
from halma.backends.musa.simulator.front.device import index_of

_C = musac()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    _C._musa_setMemoryFraction(fraction, index_of(device, optional=True))


def empty_cache() -> None:
    _C._musa_emptyCache()


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    return _C._musa_memoryStats(index_of(device, optional=True))


def memory_stats(device: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                flatten(f"{prefix}.{name}" if prefix else name, inner)
        else:
            found[prefix] = value

    flatten("", memory_stats_as_nested_dict(device))
    return dict(sorted(found.items()))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    _C._musa_resetAccumulatedMemoryStats(index_of(device, optional=True))


def reset_peak_memory_stats(device: Any = None) -> None:
    _C._musa_resetPeakMemoryStats(index_of(device, optional=True))


def memory_snapshot() -> Any:
    return _C._musa_memorySnapshot()["segments"]


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _C._musart.musaMemGetInfo(index_of(device, optional=True))


def get_allocator_backend() -> str:
    return _C._musa_getAllocatorBackend()


class MemPool(_C._MemPool):
    """A pool's id; 2.7.1 has neither ``use_count`` nor ``snapshot`` here."""

    def __init__(self, allocator: Any = None) -> None:
        super().__init__(allocator, True)

    @property
    def id(self) -> tuple[int, int]:
        return super().id

    @property
    def allocator(self) -> Any:
        return super().allocator


class MemPoolContext(_C._MemPoolContext):
    """A pool is the active one while this lives."""

    def __init__(self, pool: MemPool) -> None:
        super().__init__(pool)

    @staticmethod
    def active_pool() -> Any:
        return _C._MemPoolContext.activate_pool()


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Generator[None]:
    """Allocations inside go to the pool."""
    context = MemPoolContext(pool)
    index = index_of(device, optional=True)
    _C._musa_beginAllocateToPool(index, pool.id)
    try:
        yield
    finally:
        _C._musa_endAllocateCurrentStreamToPool(index, pool.id)
        del context
