"""Plain host memory, which on this backend is device memory too."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CpuMemory:
    """Uninitialised tensors on the CPU. Pinning means nothing here: nothing copies asynchronously."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of ``shape``, contents undefined; freed with its last reference."""
        return torch.empty(tuple(shape), dtype=dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`empty`."""
        return self.empty(shape, dtype)

    def on_device(self, pinned: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return pinned
