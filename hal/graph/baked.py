"""Host values that were frozen into a graph, found by capturing twice (G11).

Capture a program with one set of host values (lengths, positions, flags), then with another, on the same
shapes. What differs between the two captures is baked in: a replay would go on using the captured value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from halma.hal.backend import GraphNode


@dataclass(frozen=True)
class BakedValue:
    """One node that differs between two captures.

    Attributes:
        position: index of the node.
        name: the node's name, that of the first capture.
        where: the line that made it.
        parameter: what differs: an argument's name, or ``node`` if other work was recorded at all.
        first, second: the two values; None where a capture has no such node.
    """

    position: int
    name: str
    where: str
    parameter: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.parameter} of {self.name} is {self.first} in one capture, {self.second} in another"


def baked_values(first: Sequence[GraphNode], second: Sequence[GraphNode]) -> list[BakedValue]:
    """Every difference between two captures of one program, in order; empty if nothing was baked in.

    If the program took another branch, the nodes after it have no counterpart: the list then ends with the
    first node that differs in name, and a capture that merely goes on longer ends it with its next node.
    """
    found: list[BakedValue] = []
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.name != b.name:
            found.append(BakedValue(position, a.name, a.where, "node", a.name, f"{b.name} at {b.where}"))
            return found
        found += _differences(position, a, b)
    shorter = min(len(first), len(second))
    if len(first) > shorter:
        node = first[shorter]
        found.append(BakedValue(shorter, node.name, node.where, "node", node.name, None))
    elif len(second) > shorter:
        node = second[shorter]
        found.append(BakedValue(shorter, node.name, node.where, "node", None, node.name))
    return found


def _differences(position: int, a: GraphNode, b: GraphNode) -> list[BakedValue]:
    if len(a.parameters) != len(b.parameters):
        return [BakedValue(position, a.name, a.where, "parameters", a.parameters, b.parameters)]
    found: list[BakedValue] = []
    for index, (x, y) in enumerate(zip(a.parameters, b.parameters, strict=True)):
        if not _same(x, y):
            (name, x), (_, y) = _named(index, x), _named(index, y)
            found.append(BakedValue(position, a.name, a.where, name, x, y))
    return found


def _named(index: int, parameter: Any) -> tuple[str, Any]:
    """A parameter as (name, value); backends may leave names out."""
    if isinstance(parameter, tuple):
        pair = cast("tuple[Any, ...]", parameter)
        if len(pair) == 2 and isinstance(pair[0], str):
            return pair[0], pair[1]
    return f"parameter {index}", cast("Any", parameter)


def _same(x: Any, y: Any) -> bool:
    """Equal in type and value, NaN to NaN; 1, 1.0 and True are three values."""
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        left, right = cast("Sequence[Any]", x), cast("Sequence[Any]", y)
        return len(left) == len(right) and all(_same(p, q) for p, q in zip(left, right, strict=True))
    return _equal(x, y)


def _equal(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y or (x != x and y != y))
