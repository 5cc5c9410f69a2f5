"""Page-locked host memory for torch: its own way asks the device's allocator, which only C++ can offer.

So the few functions that take ``pin_memory`` are replaced in this process, and ``is_pinned`` has a kernel of ours.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_ranges: dict[int, int] = {}
"""Where page-locked memory starts -> its bytes."""
_library: torch.library.Library | None = None


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether a host tensor lies in page-locked memory."""
    storage = tensor.untyped_storage()
    return holds(storage.data_ptr(), storage.nbytes())


def holds(address: int, nbytes: int) -> bool:
    """Whether these bytes are page-locked."""
    return any(start <= address and address + nbytes <= start + size for start, size in _ranges.items())


def lock(address: int, nbytes: int) -> None:
    """Lock a range that somebody else owns."""
    _ranges[address] = nbytes


def unlock(address: int) -> bool:
    """Undo :func:`lock`; False where it was not locked."""
    return _ranges.pop(address, None) is not None


def locked_bytes(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of page-locked memory."""
    memory = (ctypes.c_uint8 * max(nbytes, 1))()
    address = ctypes.addressof(memory)
    _ranges[address] = max(nbytes, 1)
    weakref.finalize(memory, _ranges.pop, address, None).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A page-locked copy, contiguous."""
    flat = tensor.contiguous()
    made = locked_bytes(flat.nbytes).view(flat.dtype).view(flat.shape)
    return made.copy_(flat)


def install() -> None:
    """Once a process."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("is_pinned", is_pinned, "CPU")
    for name in ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "empty_like", "empty_strided", "arange"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self if self.is_pinned() else copied(self)


def _pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return function(*args, **kwargs)
        found = function(*args, **{**kwargs, "pin_memory": False})
        if found.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return copied(found)

    return made
