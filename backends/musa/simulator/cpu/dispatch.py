"""What an ATen call on the device ``musa`` does in the CPU simulator: the CPU's own kernel, on the same memory.

One boxed fallback takes every overload that torch has no device-independent kernel for. Views run on the tensors
themselves; anything else runs on CPU tensors over their memory, at once, or later where the current stream is captured:
then it goes on the capture's tape, and results lie in the graph's pool. What a device refuses is refused here: host
tensors among its own, host reads and pageable copies inside a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from halma.backends.cpu.fast_calls import bind
from halma.backends.cpu.op_rules import Kind, Overload, Rule, rule_of, tensors_in
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu.blocks import Allocator, block_of
from halma.backends.musa.simulator.cpu.numbers import call_of
from halma.backends.musa.simulator.cpu.pinned import is_pinned
from halma.backends.musa.simulator.cpu.placing import (
    CPU,
    DEVICE_TYPE,
    allocate,
    allocators,
    as_strided,
    contiguous,
    empty,
    empty_strided,
    host,
    host_arguments,
    index_of,
    is_ours,
    set_storage,
)
from halma.backends.musa.simulator.cpu.taping import is_tensor, record

_aten = torch.ops.aten
_library: torch.library.Library | None = None


def install(devices: int) -> None:
    """Make ``devices`` devices and take every call on them; once a process."""
    global _library
    allocators.extend(Allocator(index) for index in range(devices))
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_call, "PrivateUse1")


# -- the fallback ------------------------------------------------------------------------------------------


def _call(func: Overload, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        rule = rule_of(func)
        if rule.kind is Kind.NOW and (
            func.is_view or "view" in func._schema.name or torch.Tag.inplace_view in func.tags
        ):
            return func.redispatch(CPU, *args, **kwargs)
        index = _check(rule, args, kwargs)
        stream = driver.current_stream(index)
        if stream.capture is None:
            return _run(func, rule, args, kwargs, index)
        return record(func, rule, args, kwargs, index, stream)


def _check(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Refuse what is not on one device; its index.

    Raises:
        RuntimeError: tensors of the host, or of another device, beside one of this.
    """
    ours: torch.device | None = None
    other: torch.Tensor | None = None
    for name, value in rule.bound(args, kwargs):
        for tensor in tensors_in(value):
            device = tensor.device
            if device.type != DEVICE_TYPE:
                number = device.type == "cpu" and tensor.dim() == 0 and name not in rule.written
                if not number and not (rule.indexed and name == "indices" and device.type == "cpu"):
                    other = tensor
            elif ours is None:
                ours = device
            elif device != ours:
                other = tensor
    if other is not None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{ours if ours is not None else DEVICE_TYPE} and {other.device}! ({rule.label})"
        )
    return index_of(ours if ours is not None else kwargs.get("device"))


# -- at once -----------------------------------------------------------------------------------------------


def _run(func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], index: int) -> Any:
    host_args, host_kwargs = host_arguments(rule, args, kwargs)
    for name in rule.outs:  # an empty destination may grow, and ours cannot
        out = host_kwargs.get(name)
        if isinstance(out, torch.Tensor) and not out.numel():
            host_kwargs[name] = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
    before = [
        (name, v, v.shape) for name, v in rule.bound(host_args, host_kwargs) if name in rule.written and is_tensor(v)
    ]
    results = call_of(func, host_args, host_kwargs)()
    given = dict(rule.bound(args, kwargs))
    for name, alias, shape in before:
        if alias.shape != shape:
            _resized(given[name], alias, index)
    return _returned(rule, results, given, host_args, args, index)


def _resized(ours: torch.Tensor, alias: torch.Tensor, index: int) -> None:
    """An op gave its destination another shape: ours takes it over, with memory of its own where it must."""
    block_of(ours).forget(ours)
    made = _adopted(alias, index)
    set_storage.redispatch(CPU, ours, made.untyped_storage(), int(made.storage_offset()), made.shape, made.stride())


def _returned(
    rule: Rule, results: Any, given: Mapping[str, Any], host_args: Sequence[Any], args: Sequence[Any], index: int
) -> Any:
    if not rule.returns or results is None:
        return results
    many = len(rule.returns) > 1
    found = [
        given[name] if name is not None and name in given else _wrapped(result, host_args, args, index)
        for name, result in zip(rule.returns, results if many else (results,), strict=True)
    ]
    return tuple(found) if many else found[0]


def _wrapped(result: Any, host_args: Sequence[Any], args: Sequence[Any], index: int) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(item, host_args, args, index) for item in result])
    if not isinstance(result, torch.Tensor):
        return result
    storage = result.untyped_storage()._cdata
    for alias, ours in zip(tensors_in(host_args), tensors_in(args), strict=True):
        if alias.untyped_storage()._cdata == storage and is_ours(ours):  # a view that its schema does not tell of
            return as_strided.redispatch(CPU, ours, result.shape, result.stride(), int(result.storage_offset()))
    return _adopted(result, index)


def _adopted(result: torch.Tensor, index: int) -> torch.Tensor:
    if result.is_conj() or result.is_neg():
        result = result.resolve_conj().resolve_neg()
    storage = result.untyped_storage()
    raw = allocators[index].adopt(storage.data_ptr(), storage.nbytes(), result)
    typed = (
        raw
        if result.dtype == torch.uint8
        else raw[: raw.numel() // result.itemsize * result.itemsize].view(result.dtype)
    )
    return as_strided.redispatch(CPU, typed, result.shape, result.stride(), int(result.storage_offset()))


# -- calls with rules of their own -------------------------------------------------------------------------


def _copy_from(source: torch.Tensor, into: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    ours = source if is_ours(source) else into
    outside = source if not is_ours(source) else into if not is_ours(into) else None
    stream = driver.current_stream(index_of(ours.device))
    call = bind(_aten.copy_.default, (host(into), host(source)), {})
    if stream.capture is None:
        if outside is not None and not non_blocking:
            driver.refuse_unsafe(stream)
        call()
        return into
    if outside is not None and outside.numel() and not (is_pinned(outside) and non_blocking):
        driver.refuse_unsafe(stream)
    stream.capture.add(stream, call)
    return into


def _copy_and_resize(source: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    if into.shape != source.shape:
        _resize(into, source.shape)
    return _copy_from(source, into)


def _item(tensor: torch.Tensor) -> Any:
    driver.refuse_unsafe(driver.current_stream(tensor.device.index))
    return _aten._local_scalar_dense.default(host(tensor))


def _resize(ours: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
    stride = contiguous(size)
    span = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    offset = int(ours.storage_offset())
    storage = ours.untyped_storage()
    if (offset + span) * ours.itemsize > storage.nbytes():
        made = allocate((offset + span,), (1,), ours.dtype, index_of(ours.device))
        kept = min(storage.nbytes(), made.untyped_storage().nbytes())
        into, old = block_of(made).bytes, block_of(ours).bytes
        into[:kept].copy_(old[:kept])
        storage = made.untyped_storage()
    return set_storage.redispatch(CPU, ours, storage, offset, tuple(size), tuple(stride))


def _set_storage(
    ours: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    if storage.device.type != DEVICE_TYPE:
        raise RuntimeError(
            f"Attempted to set the storage of a tensor on device {ours.device} to one on {storage.device}"
        )
    return set_storage.redispatch(CPU, ours, storage, offset, tuple(size), tuple(stride) or tuple(contiguous(size)))


def _set_tensor(ours: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _set_storage(ours, source.untyped_storage(), int(source.storage_offset()), source.shape, source.stride())


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_SPECIAL: dict[Overload, Callable[..., Any]] = {
    _aten.empty.memory_format: empty,
    _aten.empty_strided.default: empty_strided,
    _aten._copy_from.default: _copy_from,
    _aten._copy_from_and_resize.default: _copy_and_resize,
    _aten._local_scalar_dense.default: _item,
    _aten.resize_.default: _resize,
    _aten.set_.source_Storage_storage_offset: _set_storage,
    _aten.set_.source_Tensor: _set_tensor,
    _aten.record_stream.default: _nothing,
}
