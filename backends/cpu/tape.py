"""What a capture leaves behind: nodes, the template made of them, and the executable that runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from halma.backends.cpu.op_rules import Overload, rule_of, tensors_in
from halma.backends.cpu.races import Access
from halma.backends.cpu.results import FallbackUse
from halma.backends.cpu.streams import CpuStream, Stamp
from halma.hal.backend import GraphCounts, GraphNode
from halma.hal.workspace import Workspace


class Work(enum.Enum):
    """What a node counts as."""

    KERNEL = "kernel"
    COPY = "copy"
    POISON = "poison"
    """Only in checked mode; not counted, an eager step has none of it."""


@dataclass(eq=False)
class Node:
    """One piece of recorded work. Its tensors are strong references: weights, state and inputs stay alive.

    Attributes:
        func, args, kwargs: the call; None and the declared tensors for an opaque node.
        call: runs it.
        allocations: results that each run allocates, because the op has no out-variant.
        raw: recorded outside every op.
        baked: host values that an opaque node was made with.
    """

    name: str
    call: Callable[[], object]
    work: Work
    where: str
    stamp: Stamp
    func: Overload | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reads: Sequence[torch.Tensor] = ()
    writes: Sequence[torch.Tensor] = ()
    allocations: int = 0
    raw: bool = False
    baked: Sequence[tuple[str, Any]] = ()

    def accesses(self, position: int) -> Iterator[Access]:
        """The tensors it reads and writes."""
        for _, tensor, written in self.tensors():
            yield Access.of(position, self.stamp, tensor, written)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(argument name, tensor, written) of every tensor."""
        if self.func is not None:
            rule = rule_of(self.func)
            for name, value in rule.bound(self.args, self.kwargs):
                for tensor in tensors_in(value):
                    yield name, tensor, name in rule.written
        for tensor in self.reads:
            yield "reads", tensor, False
        for tensor in self.writes:
            yield "writes", tensor, True

    def described(self, place: Callable[[torch.Tensor], tuple[Any, ...]]) -> GraphNode:
        """With every host value in it; ``place`` says where a tensor lies."""

        def value_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return place(value)
            if isinstance(value, (list, tuple)):
                return tuple(value_of(item) for item in value)
            return "a generator" if isinstance(value, torch.Generator) else value

        parameters = [
            (name, value_of(value))
            for name, value in (rule_of(self.func).bound(self.args, self.kwargs) if self.func is not None else ())
        ]
        parameters += self.baked
        parameters += [("reads", place(tensor)) for tensor in self.reads]
        parameters += [("writes", place(tensor)) for tensor in self.writes]
        return GraphNode(self.name, tuple(parameters), self.where, self.raw)


@dataclass(frozen=True)
class Held:
    """Memory that a template keeps alive, by owner. A graph has none of its own: there is no fourth kind.

    Attributes:
        workspace: bytes of the workspace.
        external: bytes of weights, state and inputs.
        external_addresses: where each of those storages starts.
    """

    workspace: int
    external: int
    external_addresses: tuple[int, ...]


@dataclass(eq=False)
class Template:
    """A finished capture: a tape that can be instantiated."""

    nodes: list[Node]
    workspace: Workspace
    grad_mode: tuple[bool, bool]
    fallbacks: list[FallbackUse]

    def counts(self) -> GraphCounts:
        """Work of one replay. An opaque node counts as one kernel."""
        works = [node.work for node in self.nodes]
        return GraphCounts(
            kernels=works.count(Work.KERNEL),
            copies=works.count(Work.COPY),
            allocations=sum(node.allocations for node in self.nodes),
            fallback_bytes=sum(use.nbytes for use in self.fallbacks),
        )

    def described(self) -> list[GraphNode]:
        """The nodes with their baked values. Memory is named by where it lies in the workspace, or by the order
        in which the program first touched it, so that two captures compare equal."""
        order: dict[int, int] = {}

        def place(tensor: torch.Tensor) -> tuple[Any, ...]:
            geometry = (str(tensor.dtype), tuple(tensor.shape), tensor.stride())
            offset = self.workspace.offset_of(tensor)
            if offset is not None:
                return ("workspace", offset, *geometry)
            storage = tensor.untyped_storage().data_ptr()
            return ("external", order.setdefault(storage, len(order)), tensor.storage_offset(), *geometry)

        return [node.described(place) for node in self.nodes]

    def edges(self) -> list[tuple[int, int]]:
        """(earlier, later) positions of nodes: the one before on the same stream, and the last of each other stream
        that had been waited for."""
        found: list[tuple[int, int]] = []
        made: dict[CpuStream, list[tuple[int, int]]] = {}  # stream -> (count, position), rising
        for position, node in enumerate(self.nodes):
            stamp = node.stamp
            for stream, count in {**stamp.seen, stamp.stream: stamp.count - 1}.items():
                earlier = [other for number, other in made.get(stream, ()) if number <= count]
                found += [(earlier[-1], position)] if earlier else []
            made.setdefault(stamp.stream, []).append((stamp.count, position))
        return found

    def held(self) -> Held:
        """What it keeps alive."""
        storages: dict[int, int] = {}
        for node in self.nodes:
            for _, tensor, _ in node.tensors():
                if not self.workspace.holds(tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return Held(self.workspace.report().total, sum(storages.values()), tuple(storages))


class Executable:
    """A template, ready to run: a flat list of calls."""

    def __init__(self, template: Template) -> None:
        self.template: Template | None = template
        self.calls = [node.call for node in template.nodes]
        self.grad_mode = template.grad_mode
        self.proven = False
        """Whether a run has shown that no op resizes its destination."""
