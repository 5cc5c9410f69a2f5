"""Calls that the current stream captures: they go on the capture's tape, and results lie in the graph's pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from halma.backends.cpu.fast_calls import bind
from halma.backends.cpu.op_rules import Kind, Overload, Rule, rule_of, tensors_in
from halma.backends.cpu.results import infer
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu.numbers import bound, call_of, numbers_as_tensors
from halma.backends.musa.simulator.cpu.placing import CPU, allocate, host, host_arguments, set_storage

_aten = torch.ops.aten


def is_tensor(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, torch.Tensor)


def record(
    func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], index: int, stream: driver.SimStream
) -> Any:
    assert stream.capture is not None
    if rule.kind is Kind.REFUSED or (rule.indexed and _needs_host(args)):
        _refuse(stream)
    host_args, host_kwargs = host_arguments(rule, args, kwargs)
    if rule.kind is Kind.WRITE and all(name is not None for name in rule.returns):
        _grow_outs(func, rule, host_args, host_kwargs, kwargs, index)
        stream.capture.add(stream, bound(func, host_args, host_kwargs))
        given = dict(rule.bound(args, kwargs))
        results = tuple(given[name] for name in rule.returns if name is not None)
        return results[0] if len(results) == 1 else results or None
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        _refuse(stream)
    return _record_fresh(func, rule, args, kwargs, host_args, host_kwargs, index, stream)


def _refuse(stream: driver.SimStream) -> None:
    driver.refuse_unsafe(stream)


def _needs_host(args: Sequence[Any]) -> bool:
    """A mask's size is known to the host only, and indices of the host would have to be copied."""
    indices = list(tensors_in(args[1] if len(args) > 1 else ()))
    return any(i.dtype in (torch.bool, torch.uint8) or (i.device.type == "cpu" and i.dim()) for i in indices)


def _grow_outs(
    func: Overload, rule: Rule, host_args: list[Any], host_kwargs: dict[str, Any], kwargs: Mapping[str, Any], index: int
) -> None:
    """Empty destinations get memory of the result's shape from the pool."""
    empty = [name for name in rule.outs if is_tensor(kwargs.get(name)) and not kwargs[name].numel()]
    if not empty:
        return
    metas = infer(func, numbers_as_tensors(func, host_args), host_kwargs)
    for name, meta in zip(rule.outs, [metas] if is_tensor(metas) else metas, strict=False):
        if name in empty and meta.numel():
            made = allocate(meta.shape, meta.stride(), meta.dtype, index)
            ours = kwargs[name]
            set_storage.redispatch(CPU, ours, made.untyped_storage(), 0, made.shape, made.stride())
            host_kwargs[name] = host(ours)


def _record_fresh(
    func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any],
    host_args: list[Any], host_kwargs: dict[str, Any], index: int, stream: driver.SimStream,
) -> Any:  # fmt: skip
    assert stream.capture is not None
    metas = infer(func, numbers_as_tensors(func, host_args), host_kwargs)
    targets: list[torch.Tensor] = []

    def place(meta: Any) -> Any:
        if isinstance(meta, (list, tuple)):
            return type(meta)([place(item) for item in meta])
        if not isinstance(meta, torch.Tensor):
            return meta
        made = allocate(meta.shape, meta.stride(), meta.dtype, index)
        targets.append(host(made))
        return made

    given = dict(rule.bound(args, kwargs))
    many = len(rule.returns) > 1
    made = [
        place(meta) if name is None else given[name]
        for name, meta in zip(rule.returns, metas if many else (metas,), strict=True)
    ]
    fresh = [position for position, name in enumerate(rule.returns) if name is None]
    stream.capture.add(stream, _filling(func, rule, host_args, host_kwargs, targets, fresh if many else None))
    return tuple(made) if many else made[0]


def _filling(
    func: Overload, rule: Rule, args: list[Any], kwargs: dict[str, Any], targets: list[torch.Tensor],
    fresh: Sequence[int] | None,
) -> Callable[[], object]:  # fmt: skip
    if rule.kind in (Kind.COPY, Kind.CONSTANT):
        return bind(_aten.copy_.default, (targets[0], args[0]), {})
    out = rule.out_variant
    if out is not None and len(rule_of(out).outs) == len(targets) and fresh is None:
        its = rule_of(out)
        given = {name: value for name, value in kwargs.items() if name in its.names}
        return bound(out, args, {**given, **dict(zip(its.outs, targets, strict=True))})
    return partial(_run_and_copy, call_of(func, args, kwargs), targets, fresh)


def _run_and_copy(function: Callable[[], Any], targets: Sequence[torch.Tensor], fresh: Sequence[int] | None) -> None:
    results = function()
    found = tensors_in(results if fresh is None else [results[position] for position in fresh])
    for target, result in zip(targets, found, strict=True):
        target.copy_(result)
