"""Seeded arguments for the example calls of our ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halma.hal.testing.examples import Arguments, OpExample


class Draw:
    """Seeded tensors on the CPU, in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal values of the given scale."""
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def ids(self, *shape: int, below: int) -> torch.Tensor:
        """int64 in [0, below)."""
        return torch.randint(0, below, shape, generator=self._generator)

    def permutation(self, size: int) -> torch.Tensor:
        """int64 [size]: 0 .. size - 1 in some order."""
        return torch.randperm(size, generator=self._generator)

    def choices(self, rows: int, k: int, below: int) -> torch.Tensor:
        """int64 [rows, k] in [0, below), distinct within a row."""
        return torch.rand(rows, below, generator=self._generator).argsort(1)[:, :k].contiguous()


def example(op: str, name: str, build: Callable[[Draw, int], Arguments], **more: Any) -> OpExample:
    """An example whose arguments come from a :class:`Draw`."""
    return OpExample(op, name, lambda seed, rows: build(Draw(seed), rows), **more)
