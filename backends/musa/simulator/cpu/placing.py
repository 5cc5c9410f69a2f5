"""Tensors of the simulated device: making them, and the CPU's tensors over the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from halma.backends.cpu.op_rules import Rule
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu.blocks import Allocator, block_of
from halma.backends.musa.simulator.cpu.random import generator

DEVICE_TYPE: Final = "musa"
CPU: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""Sends a call on a tensor of the device to the CPU's kernel: right for views, which touch no memory."""
_aten = torch.ops.aten
as_strided = _aten.as_strided.default
set_storage = _aten.set_.source_Storage_storage_offset
allocators: list[Allocator] = []
"""By device."""


def is_ours(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a simulated device."""
    return tensor.device.type == DEVICE_TYPE


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int) -> torch.Tensor:
    """Memory of the device for this geometry, contents undefined."""
    span = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    stream = driver.current_stream(index)
    raw = allocators[index].empty(span * dtype.itemsize, stream)
    return shaped(raw, size, stride, dtype)


def shaped(raw: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``raw`` bytes as a tensor of this geometry."""
    typed = raw if dtype == torch.uint8 else raw.view(dtype)
    if len(size) == 1 and tuple(stride) == (1,):
        return typed
    return as_strided.redispatch(CPU, typed, size, stride)


def contiguous(size: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    stride, steps = 1, list[int]()
    for length in reversed(size):
        steps.append(stride)
        stride *= max(length, 1)
    return steps[::-1]


def index_of(device: torch.device | None) -> int:
    """A device's number; the current one's where it has none."""
    return driver.current_device() if device is None or device.index is None else device.index


def empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    """``aten::empty.memory_format``."""
    layout = options.get("memory_format")
    if layout in (torch.channels_last, torch.channels_last_3d):
        stride = torch.empty(tuple(size), memory_format=layout, device="meta").stride()
    else:
        stride = contiguous(size)
    return empty_strided(size, stride, **options)


def empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    """``aten::empty_strided``."""
    if options.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    return allocate(size, stride, options.get("dtype") or torch.get_default_dtype(), index_of(options.get("device")))


def host(value: Any) -> Any:
    """``value`` with CPU tensors over the same memory for those of the device."""
    if isinstance(value, torch.Tensor):
        return block_of(value).alias(value) if value.device.type == DEVICE_TYPE else value
    if isinstance(value, (list, tuple)):
        return type(value)([host(item) for item in value])
    return value


def host_arguments(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments for the CPU, the device's own generator where random numbers are drawn."""
    named = {name: host(value) for name, value in kwargs.items()}
    if "generator" in rule.names[len(args) :] and named.get("generator") is None:
        named["generator"] = generator
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    return [host(value) for value in args], named
