"""Device memory of the CPU simulator: host memory behind storages of the device ``musa``, counted as an allocator does.

A *block* is what one storage stands on. The default pool keeps nothing: freed is freed. Private pools, which captures
allocate from, follow torch_musa 2.7.1 (torch_musa/csrc/core/MUSACachingAllocator.cpp): a pool is used once for every
begin, only ``_musa_releasePool`` takes uses off again, and what a pool without uses has cached goes with the next
``empty_cache()``. Nothing else ever gives its memory back, a graph's ``reset()`` least of all.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from halma.backends.musa.simulator.cpu.dlpack import tensor_over

ROUND: Final = 512
"""Sizes and addresses are multiples of this, as torch's caching allocators have it."""
TOTAL: Final = 16 << 30
"""Bytes that the simulated device has, unless the host has less."""
PoolId = tuple[int, int]
Geometry = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
_KEPT_ALIASES: Final = 256


class Block:
    """Host memory that one storage of the device stands on.

    Attributes:
        bytes: all of it as uint8 on the CPU; its storage cannot be resized, so the memory stays where it is.
    """

    __slots__ = ("__weakref__", "_aliases", "bytes")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._aliases: dict[Geometry, torch.Tensor] = {}
        if nbytes:
            window: Any = (ctypes.c_uint8 * nbytes).from_address(address)
            window.owner = owner  # tapes keep aliases, and with them the memory, longer than the storage lives
            self.bytes = torch.frombuffer(window, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(0, dtype=torch.uint8)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements on the CPU."""
        key = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        found = self._aliases.get(key)
        if found is None:
            if len(self._aliases) >= _KEPT_ALIASES:
                self._aliases.clear()
            with _normal():
                found = torch.empty(0, dtype=key[0]).set_(self.bytes.untyped_storage(), *key[1:])
            self._aliases[key] = found
        return found

    def forget(self, tensor: torch.Tensor) -> None:
        """An alias of this geometry was resized by an op."""
        self._aliases.pop((tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()), None)


def block_of(tensor: torch.Tensor) -> Block:
    """The block of a tensor of the device: it hangs on the storage's Python object, and dies with the storage."""
    storage: Any = tensor.untyped_storage()
    return storage.halma_block


@dataclass
class Pool:
    """A private pool. ``free`` holds what died in it: (bytes, memory)."""

    uses: int = 1
    reserved: int = 0
    live: int = 0
    free: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])

    def take(self, nbytes: int) -> Any:
        """Cached memory of at least ``nbytes``, the smallest; None: there is none."""
        fitting = [position for position, (size, _) in enumerate(self.free) if size >= nbytes]
        if not fitting:
            return None
        return self.free.pop(min(fitting, key=lambda position: self.free[position][0]))


class Allocator:
    """Memory of one simulated device."""

    def __init__(self, index: int, total: int = TOTAL) -> None:
        self.index = index
        self.total = total
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.pools: dict[PoolId, Pool] = {}
        self.routed: list[tuple[PoolId, Callable[[Any], bool]]] = []
        """Pools that allocations go to now, with the streams that they take them from."""
        self.fraction = 1.0

    # -- taking -------------------------------------------------------------------------------------

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        """uint8 [nbytes] of the device, contents undefined.

        Raises:
            torch.OutOfMemoryError: the simulated device has no more.
        """
        size = -(-nbytes // ROUND) * ROUND
        name = next((name for name, takes in reversed(self.routed) if takes(stream)), None)
        if name is None or not size:
            memory = self._fresh(size)
            return self._tensor(memory, nbytes, partial(self._freed, size))
        pool = self.pools[name]
        cached = pool.take(size)
        if cached is None:
            cached = (size, self._fresh(size))
            pool.reserved += size
        else:
            self._count(cached[0], 0)
        pool.live += 1
        return self._tensor(cached[1], nbytes, partial(self._returned, pool, cached))

    def adopt(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """uint8 [nbytes] of the device over memory that a CPU op made."""
        self._count(nbytes, nbytes)
        return self.over(address, nbytes, owner, partial(self._freed, nbytes))

    def over(self, address: int, nbytes: int, owner: object, freed: Callable[[], None] | None = None) -> torch.Tensor:
        """uint8 [nbytes] of the device over memory that ``owner`` keeps; not counted."""
        with _normal():
            block = Block(address, nbytes, owner)
        if freed is not None:
            weakref.finalize(block, freed).atexit = False
        tensor = tensor_over(address, nbytes, self.index)
        storage: Any = tensor.untyped_storage()
        storage.halma_block = block
        return tensor

    def _fresh(self, size: int) -> Any:
        if self.reserved + size > self.total * self.fraction:
            raise torch.OutOfMemoryError(
                f"MUSA out of memory. Tried to allocate {size:,} bytes. {self.free:,} of {self.total:,} are free."
            )
        self._count(size, size)
        return bytearray(0) if not size else _aligned(size)

    def _tensor(self, memory: Any, nbytes: int, freed: Callable[[], None]) -> torch.Tensor:
        address = memory.data_ptr() if isinstance(memory, torch.Tensor) and nbytes else 0
        return self.over(address, nbytes, memory, freed)

    # -- giving back --------------------------------------------------------------------------------

    def _freed(self, size: int) -> None:
        self._count(-size, -size)

    def _returned(self, pool: Pool, cached: tuple[int, Any]) -> None:
        self._count(-cached[0], 0)
        pool.live -= 1
        pool.free.append(cached)

    def empty_cache(self) -> None:
        """Give back what pools without uses have cached."""
        for name, pool in list(self.pools.items()):
            if pool.uses:
                continue
            freed = sum(size for size, _ in pool.free)
            pool.free.clear()
            pool.reserved -= freed
            self.reserved -= freed
            if not pool.live:
                del self.pools[name]

    def _count(self, allocated: int, reserved: int) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return max(0, self.total - self.reserved)

    # -- private pools ------------------------------------------------------------------------------

    def begin(self, name: PoolId, takes: Callable[[Any], bool]) -> None:
        """Allocations of the streams that ``takes`` names go to the pool from now on; one more use of it."""
        if any(routed == name for routed, _ in self.routed):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        pool = self.pools.get(name)
        if pool is None:
            self.pools[name] = Pool()
        else:
            pool.uses += 1
        self.routed.append((name, takes))

    def end(self, name: PoolId) -> None:
        """No more allocations go to the pool; its uses stay."""
        for position, (routed, _) in enumerate(self.routed):
            if routed == name:
                del self.routed[position]
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(self, name: PoolId) -> None:
        """One use less."""
        pool = self.pools.get((name[0], name[1]))  # a list will do
        if pool is None or pool.uses < 1:
            raise RuntimeError(f"releasePool: the pool {name} has no uses")
        pool.uses -= 1

    def segments(self) -> list[dict[str, Any]]:
        """A snapshot: what private pools hold, and the rest as one segment."""
        found = [
            {"device": self.index, "total_size": p.reserved, "segment_pool_id": name, "segment_type": "large"}
            for name, p in self.pools.items()
        ]
        rest = self.reserved - sum(pool.reserved for pool in self.pools.values())
        return [*found, {"device": self.index, "total_size": rest, "segment_pool_id": (0, 0), "segment_type": "large"}]


_plain: Any = contextlib.nullcontext()


def _normal() -> Any:
    """Tensors made inside are no inference tensors: they serve later calls, and replays, in any mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _plain


def _aligned(size: int) -> torch.Tensor:
    with _normal():
        raw = torch.empty(size + ROUND, dtype=torch.uint8)
        start = -raw.data_ptr() % ROUND
        return raw[start : start + size]
