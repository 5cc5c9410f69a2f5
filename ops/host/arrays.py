"""numpy views of tensors, made when a launch first runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class HostArrays:
    """Views of some tensors, asked for by calling it.

    Made late, because inside a capture ``.numpy()`` is refused as a host read; once, because it costs 0.6 us
    a tensor. They stay right as long as the tensors' addresses do, which is what a graph relies on anyway.
    """

    __slots__ = ("_arrays", "_tensors")

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._arrays: tuple[Array, ...] | None = None

    def __call__(self) -> tuple[Array, ...]:
        if self._arrays is None:
            self._arrays = tuple([tensor.detach().numpy() for tensor in self._tensors])
        return self._arrays


def plain_problem(name: str, weight: Any, x: torch.Tensor) -> str | None:
    """Why ``weight`` cannot be multiplied where it lies with rows like ``x``, as a route's reason; or None."""
    if weight.format != "plain" or weight.data.dtype is not x.dtype or x.dtype not in (torch.float32, torch.float64):
        found = f"{name} is {weight.format} {short(weight.data.dtype)} for x in {short(x.dtype)}"
        return f"{found}, it multiplies plain fp32 or fp64"
    return None


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
