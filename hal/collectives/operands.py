"""What a call's tensors must be; said before anything of the call has happened."""

from __future__ import annotations

from enum import IntEnum
from itertools import combinations
from math import isfinite
from numbers import Real
from typing import Any, Final

import torch

from halma.hal.collectives.arithmetic import FP8_GROUP
from halma.hal.collectives.contract import FP8_NORM, Call, Kind, Operands
from halma.hal.errors import CollectiveError


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def call_of(kind: Kind, x: torch.Tensor, *, root: int = -1, detail: str = "", descriptor: str = "") -> Call:
    """The call that moves ``x``."""
    return Call(kind, x.numel() * x.element_size(), name_of(x.dtype), root, detail, descriptor)


LONGEST_BOUND: Final = 1e9
"""Seconds; nanoseconds of it fit 64 bits."""
PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Tensors with memory of their own; a tracer's stand-ins have none."""


def check_eps(kind: Kind, eps: Any) -> float:
    """``eps`` as the float that it is on every rank: 0 and 0.0 are one call.

    Raises:
        CollectiveError: no finite number from 0 on.
    """
    value = _number(eps)
    if value is None or value < 0 or not isfinite(value):
        raise CollectiveError(
            f"{kind.name.lower()} cannot take eps",
            found=repr(eps),
            do="eps=1e-6, say: a host number that is finite and not negative",
        )
    return value


def check_bound(seconds: Any) -> float:
    """``seconds`` of a wait.

    Raises:
        CollectiveError: no number of seconds above 0, as ``HALMA_COLLECTIVE_BOUND`` takes.
    """
    value = _number(seconds)
    if value is None or not 0 < value < LONGEST_BOUND:
        raise CollectiveError(
            f"a wait cannot be bounded by {seconds!r}",
            asked=f"set_bound({seconds!r})",
            do=f"a number of seconds above 0 and below {LONGEST_BOUND:g}",
        )
    return value


def check_root(root: Any, size: int) -> None:
    """Refuse what is no rank of a group of ``size``.

    Raises:
        CollectiveError: there is no such rank.
    """
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise CollectiveError(
            f"there is no rank {root!r} to broadcast from",
            found=f"the group has ranks 0..{size - 1}, whatever they are called outside of it",
        )


def _number(value: Any) -> float | None:
    """A host's real number as a float; no bool, and no tensor, which would be a host read."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def check_tensor(kind: IntEnum, name: str, value: Any, device: torch.device) -> None:
    """Refuse what is no plain contiguous tensor of the group's device, or what autograd would want a gradient of.

    Raises:
        CollectiveError: with what to do about it.
    """
    what = f"{kind.name.lower()} cannot take {name}"
    if not isinstance(value, torch.Tensor):
        raise CollectiveError(what, found=f"{type(value).__name__}", do="give it a tensor")
    if type(value) not in PLAIN:
        raise CollectiveError(
            what,
            found=f"{type(value).__name__}, which has no memory that peers could be sent",
            do="where somebody traces: torch.ops.halma.all_reduce",
        )
    if value.device != device:
        raise CollectiveError(what, found=f"it lies on {value.device}", do=f"the group's device is {device}")
    if value.layout is not torch.strided or not value.is_contiguous():
        raise CollectiveError(
            what,
            found=f"it is not contiguous: shape {list(value.shape)}, strides {list(value.stride())}",
            do=f"{name}.contiguous(), or make it so where it comes from: a copy here would be hidden work",
        )
    if value.is_neg() or value.is_conj():
        raise CollectiveError(
            what,
            found="its memory holds other numbers than it shows: a lazy negative or conjugate view",
            do=f"{name}.resolve_conj().resolve_neg()",
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(
            what,
            found="it requires a gradient, and a collective here has none",
            do="torch.no_grad() or torch.inference_mode() around the step, or a tensor that is detached",
        )


def check_like(kind: IntEnum, name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
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


def check_apart(kind: IntEnum, one: Named, two: Named, *, same: bool = False) -> None:
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


def norm_operands(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: Any,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> tuple[Operands, str]:
    """A fused norm's operands, and what of them ranks must have in common beside x's size and dtype.

    Raises:
        CollectiveError: x is no rows of floating numbers, another tensor does not fit it, or two share memory; rows
            that fp8's scales do not divide.
    """
    kind = Kind.ALL_REDUCE_NORM
    eps = check_eps(kind, eps)
    if not x.dim() or not x.shape[-1] or not x.is_floating_point():
        raise CollectiveError(
            "all_reduce_norm cannot take x",
            found=f"{name_of(x.dtype)}{list(x.shape)}",
            do="give it rows [..., H] of floating numbers",
        )
    check_like(kind, "residual", residual, tuple(x.shape), x.dtype)
    check_like(kind, "out", out, tuple(x.shape), x.dtype if scale is None else torch.float8_e4m3fn)
    wide = weight.dtype if weight.dtype == torch.float32 else x.dtype
    check_like(kind, "weight", weight, (x.shape[-1],), wide)
    named = [("x", x), ("residual", residual), ("weight", weight), ("out", out)]
    if scale is not None:
        check_groups(x)
        check_like(kind, "scale", scale, (*x.shape[:-1], x.shape[-1] // FP8_GROUP), torch.float32)
        named.append(("scale", scale))
    for one, two in combinations(named, 2):
        check_apart(kind, one, two)
    detail = f"rows of {x.shape[-1]}, eps {eps!r}, weight {name_of(weight.dtype)}"
    detail += "" if scale is None else f", {FP8_NORM}"
    return Operands(x, residual, residual, weight, out, scale, eps, x.shape[-1]), detail


def check_groups(x: torch.Tensor) -> None:
    """Refuse rows that are not whole groups of columns with a scale.

    Raises:
        CollectiveError: with their length.
    """
    if x.shape[-1] % FP8_GROUP or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CollectiveError(
            "all_reduce_norm cannot give fp8",
            found=f"rows of {x.shape[-1]} of {name_of(x.dtype)}",
            do=f"rows of a multiple of {FP8_GROUP} columns of bfloat16, float16 or float32, or no scale",
        )


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(storage, first byte, byte behind the last) of a contiguous tensor, without asking for its address."""
    if not tensor.numel():
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    storage: Any = tensor.untyped_storage()
    return storage._cdata, start, start + tensor.numel() * tensor.element_size()
