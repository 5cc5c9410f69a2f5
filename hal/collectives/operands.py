"""What a call's tensors must be; said before anything of the call has happened."""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.collectives.contract import Call, Kind
from halma.hal.errors import CollectiveError


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def call_of(kind: Kind, x: torch.Tensor, *, root: int = -1, detail: str = "", descriptor: str = "") -> Call:
    """The call that moves ``x``."""
    return Call(kind, x.numel() * x.element_size(), name_of(x.dtype), root, detail, descriptor)


def check_tensor(kind: Kind, name: str, value: Any, device: torch.device) -> None:
    """Refuse what is no contiguous tensor of the group's device.

    Raises:
        CollectiveError: with what to do about it.
    """
    what = f"{kind.name.lower()} cannot take {name}"
    if not isinstance(value, torch.Tensor):
        raise CollectiveError(what, found=f"{type(value).__name__}", do="give it a tensor")
    if value.device.type != device.type:
        raise CollectiveError(what, found=f"it lies on {value.device}", do=f"the group's device is {device}")
    if value.layout is not torch.strided or not value.is_contiguous():
        raise CollectiveError(
            what,
            found=f"it is not contiguous: shape {list(value.shape)}, strides {list(value.stride())}",
            do=f"{name}.contiguous(), or make it so where it comes from: a copy here would be hidden work",
        )


def check_like(kind: Kind, name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor of another shape or dtype.

    Raises:
        CollectiveError: with both.
    """
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise CollectiveError(
            f"{kind.name.lower()} cannot take {name}",
            asked=f"{name_of(dtype)}{list(shape)}",
            found=f"{name_of(value.dtype)}{list(value.shape)}",
            do=f"give {name} that shape and dtype",
        )


Named = tuple[str, torch.Tensor]


def check_apart(kind: Kind, one: Named, two: Named, *, same: bool = False) -> None:
    """Refuse tensors that share memory; ``same``: but for two that are the very same memory.

    Raises:
        CollectiveError: they overlap.
    """
    first, second = _span(one[1]), _span(two[1])
    if first is None or second is None or (same and first == second):
        return
    if first[0] == second[0] and first[1] < second[2] and second[1] < first[2]:
        raise CollectiveError(
            f"{kind.name.lower()} cannot take {one[0]} and {two[0]} that share memory",
            found=f"bytes {first[1]}..{first[2]} and {second[1]}..{second[2]} of one allocation",
            do="give each memory of its own" + (", or the same tensor twice" if same else ""),
        )


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(storage, first byte, byte behind the last) of a contiguous tensor, without asking for its address."""
    if not tensor.numel():
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    storage: Any = tensor.untyped_storage()
    return storage._cdata, start, start + tensor.numel() * tensor.element_size()
