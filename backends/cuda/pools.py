"""The pool of a workspace's captures, over ``torch.cuda.MemPool``."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from halma.backends.torch_device.pools import bury


class CudaPool:
    """A pool of torch's caching allocator, private to captures."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.MemPool()
        self._holder: Any = None
        weakref.finalize(self, bury, self._pool).atexit = False

    @property
    def id(self) -> Any:
        """What ``CUDAGraph.capture_begin`` takes."""
        return self._pool.id

    def hold(self) -> None:
        """Called before each capture, on a stream that can be captured: the first time leaves an empty graph in the
        pool, which lives as long as it does.

        The allocator of pinned memory counts only graphs. Once a pool's last graph is gone (priming drops its own) and
        pinned memory was taken in it, the next capture there ends in torch's assertion ``use_count > 0``.
        """
        if self._holder is not None:
            return
        holder = torch.cuda.CUDAGraph(keep_graph=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            holder.capture_begin(pool=self.id, capture_error_mode="thread_local")
            holder.capture_end()
        self._holder = holder
        weakref.finalize(self, bury, holder).atexit = False

    def nbytes(self) -> int:
        """Bytes of device memory that the pool holds, used or not."""
        return sum(int(segment["total_size"]) for segment in self._pool.snapshot())
