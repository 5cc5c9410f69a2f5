"""What an ATen overload does, read from its schema: views, writes, makes results, or reads on the host."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Overload = Any  # torch._ops.OpOverload; torch does not export the class


class Kind(enum.Enum):
    """How a capture treats an overload."""

    NOW = "now"
    """Metadata only (views, queries): runs at once."""
    COMPOSITE = "composite"
    """Made of other ops, which are recorded instead. Seen under inference mode only."""
    REFUSED = "refused"
    CONSTANT = "constant"
    """Brings a host value: ``torch.tensor`` and the like."""
    EMPTY = "empty"
    """Makes memory without a value: taken from the workspace, nothing to replay."""
    COPY = "copy"
    """Makes a copy, maybe of another dtype; replayed as ``copy_`` into the workspace."""
    WRITE = "write"
    """Writes into arguments (in place, ``out=``), or works by side effect."""
    FRESH = "fresh"
    """Makes its results: they are taken from the workspace."""


_EMPTIES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_COPIES = frozenset({"clone", "_to_copy"})
_CONSTANTS = frozenset({"lift", "lift_fresh", "lift_fresh_copy"})
# Their schemas promise a new tensor; in truth it is a view that is not tracked as one.
_UNTRACKED_VIEWS = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"})
_MOVES_MEMORY = frozenset({"resize_", "resize_as_", "_resize_output_", "set_", "set_data", "resize_as_sparse_"})
# Tagged dynamic for the mask among their indices, which is looked for in each call.
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


@dataclass(frozen=True, eq=False)
class Rule:
    """What the recorder needs to know about an overload.

    Attributes:
        func: the overload.
        kind: see :class:`Kind`.
        why: for REFUSED: what it does, as a clause.
        returns: for each return the name of the argument that it is, or None for a fresh one.
        written: names of the arguments that it writes.
        outs: names of those that are ``out=`` destinations.
        names: argument names by position.
        label: ``aten.add.out``.
        out_variant: the overload that writes the results where it is told, or None.
        indexed: a bool or uint8 index means a mask, whose size only the data knows.
        factory: takes no tensor, so the device decides where its result is.
    """

    func: Overload
    kind: Kind
    why: str = ""
    returns: tuple[str | None, ...] = ()
    written: frozenset[str] = frozenset()
    outs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    label: str = ""
    out_variant: Overload | None = None
    indexed: bool = False
    factory: bool = False

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The arguments of a call by name."""
        yield from zip(self.names, args, strict=False)
        yield from kwargs.items()


_rules: dict[int, Rule] = {}
"""By identity, which costs a tenth of an overload's own hash; the rule keeps the overload alive."""


def rule_of(func: Overload) -> Rule:
    """The rule of an overload, made once."""
    rule = _rules.get(id(func))
    if rule is None:
        rule = _rules[id(func)] = _make(func)
    return rule


def base_name(func: Overload) -> str:
    """``add`` of ``aten.add.out``."""
    return func._schema.name.rpartition("::")[2]


def describe(func: Overload) -> str:
    """``aten.add.out``, for errors and nodes."""
    return rule_of(func).label


def _make(func: Overload) -> Rule:
    schema = func._schema
    kind, why = _kind(func)
    aliases = [(a.name, a.alias_info.before_set) for a in schema.arguments if a.alias_info is not None]
    returns: list[str | None] = []
    for result in schema.returns:
        mine = result.alias_info.before_set if result.alias_info is not None else set()
        returns.append(next((name for name, theirs in aliases if mine & theirs), None))
    return Rule(
        func,
        kind,
        why,
        tuple(returns),
        frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        tuple(a.name for a in schema.arguments if a.is_out),
        tuple(a.name for a in schema.arguments),
        f"{func.namespace}.{base_name(func)}.{func._overloadname}",
        find_out_variant(func) if kind is Kind.FRESH else None,
        func.namespace == "aten" and base_name(func) in _INDEXED,
        not any("Tensor" in str(a.type) for a in schema.arguments),
    )


def _kind(func: Overload) -> tuple[Kind, str]:
    name, aten = base_name(func), func.namespace == "aten"
    if aten and name in _MOVES_MEMORY:
        return Kind.REFUSED, "gives a tensor other memory, and a graph keeps the old address"
    if aten and name in _CONSTANTS:
        return Kind.CONSTANT, ""
    indexed = aten and name in _INDEXED
    if torch.Tag.data_dependent_output in func.tags:
        return Kind.REFUSED, "reads a device value on the host"
    fixed_size = func is torch.ops.aten.repeat_interleave.Tensor  # with output_size=, which each call must give
    if torch.Tag.dynamic_output_shape in func.tags and not indexed and not fixed_size and not _composite(func):
        return Kind.REFUSED, "has a result whose size depends on device values, so the host must read them"
    if _composite(func):
        return Kind.COMPOSITE, ""
    if func.is_view or torch.Tag.inplace_view in func.tags or (aten and name in _UNTRACKED_VIEWS):
        return Kind.NOW, ""
    return _kind_by_results(func, name, aten)


def _kind_by_results(func: Overload, name: str, aten: bool) -> tuple[Kind, str]:
    schema = func._schema
    if schema.is_mutable:
        return Kind.WRITE, ""
    if not any("Tensor" in str(result.type) for result in schema.returns):
        # An assertion on the device is work; a query (is_pinned) or a profiler mark is not.
        effect = not schema.returns and any("Tensor" in str(a.type) for a in schema.arguments)
        return (Kind.WRITE, "") if effect else (Kind.NOW, "")
    if aten and name in _EMPTIES:
        return Kind.EMPTY, ""
    if aten and name in _COPIES:
        return Kind.COPY, ""
    return Kind.FRESH, ""


def _composite(func: Overload) -> bool:
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def find_out_variant(func: Overload) -> Overload | None:
    """The overload of the same op with the same arguments and one ``out`` argument a result, or None."""
    wanted = _signature(func, ())
    packet = func._overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = [a.name for a in candidate._schema.arguments if a.is_out]
        if len(outs) != len(func._schema.returns) or not outs:
            continue
        given = _signature(candidate, outs)
        # What the destination says already (its dtype, its device) is not an argument of the out-variant.
        missing = [part for part in wanted if part not in given]
        if given == [part for part in wanted if part in given] and all(part[0] in _OPTIONS for part in missing):
            return candidate
    return None


def _signature(func: Overload, without: Sequence[str]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in without]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an argument: itself, or of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def masks_in(args: Sequence[Any]) -> bool:
    """Whether the indices of an indexing call (its second argument) hold a mask."""
    indices = args[1] if len(args) > 1 else ()
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))
