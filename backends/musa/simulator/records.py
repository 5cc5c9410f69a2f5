"""Small classes of ``torch_musa._MUSAC`` that hold no device of their own: both engines use them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


def refuse_mode(mode: str) -> None:
    """Refuse a capture mode that 2.7.1 does not know."""
    if mode not in ("global", "thread_local", "relaxed"):
        raise RuntimeError(f"the capture mode {mode!r} is none of global, thread_local and relaxed")


@dataclass(frozen=True)
class MusaDeviceProperties:
    """The seven fields that 2.7.1 gives to Python, and no other."""

    name: str
    major: int
    minor: int
    is_multi_gpu_board: int
    is_integrated: int
    multi_processor_count: int
    total_memory: int


_shared_ids, _own_ids = itertools.count(1), itertools.count(1)


def new_pool_id(*, of_a_graph: bool) -> tuple[int, int]:
    """A pool's id: the first number where a capture makes it for itself, the second for anybody else."""
    return (next(_own_ids), 0) if of_a_graph else (0, next(_shared_ids))


class MemPool:
    """``_MemPool``: an id. Its end gives nothing back, as in 2.7.1."""

    def __init__(self, allocator: Any = None, is_user_created: bool = True) -> None:
        self._id = new_pool_id(of_a_graph=not is_user_created)
        self._allocator = allocator

    @property
    def id(self) -> tuple[int, int]:
        return self._id

    @property
    def allocator(self) -> Any:
        return self._allocator


class MemPoolContext:
    """``_MemPoolContext``."""

    _active: list[Any] = []

    def __init__(self, pool: Any) -> None:
        self._before = list(MemPoolContext._active)
        MemPoolContext._active[:] = [pool]

    def __del__(self) -> None:
        MemPoolContext._active[:] = self._before

    @staticmethod
    def activate_pool() -> Any:
        return MemPoolContext._active[0] if MemPoolContext._active else None
