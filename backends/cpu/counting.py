"""Counting eager work, by the same rules that count a graph's."""

from __future__ import annotations

from typing import Any

from halma.backends.cpu.modes import DispatchMode
from halma.backends.cpu.op_rules import Kind, rule_of, tensors_in
from halma.hal.backend import GraphCounts
from halma.hal.graph.current import launches_so_far

_COPY = "aten::copy_"


class Counter(DispatchMode):
    """Counts what one thread does: kernels (opaque launches too, copies apart), copies, and results that were
    allocated. What a launch does through ATen is counted beside it."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels = 0
        self._launches = launches_so_far()
        self._copies = 0
        self._allocations = 0

    def counts(self) -> GraphCounts:
        """So far."""
        return GraphCounts(self._kernels + launches_so_far() - self._launches, self._copies, self._allocations)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = rule_of(func).kind
        if kind is Kind.COMPOSITE:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        storages = {_identity(t) for value in (*args, *(kwargs or {}).values()) for t in tensors_in(value)}
        result = func(*args, **(kwargs or {}))
        self._allocations += sum(_identity(tensor) not in storages for tensor in tensors_in(result))
        if kind is Kind.COPY or func._schema.name == _COPY:
            self._copies += 1
        elif kind in (Kind.WRITE, Kind.FRESH):
            self._kernels += 1
        return result


def _identity(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
