"""Watches what code does with memory: which calls return memory that nobody gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halma.hal.dispatch import tensors_of


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors inside nested tuples, lists, mappings and records."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in cast("Sequence[Any]", value) for tensor in flat_tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in cast("Mapping[Any, Any]", value).values() for tensor in flat_tensors(part)]
    return tensors_of(value)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]


class AllocationWatch(TorchDispatchMode):
    """Lists the ATen calls inside the block that returned fresh memory or made an argument's memory grow.

    Temporaries inside one kernel are not seen; they are freed before it returns.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.fresh: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        given = dict(_storage(tensor) for tensor in flat_tensors((args, named)))
        result = func(*args, **named)
        for tensor in flat_tensors(result):
            key, size = _storage(tensor)
            if given.get(key) != size:
                self.fresh.append(f"{func} made {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        return result
