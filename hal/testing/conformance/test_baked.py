"""What a graph froze: host values are found by capturing twice (G11), arithmetic outside of ops is reported (W5)."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halma.hal.backend import Backend, GraphNode
from halma.hal.dispatch import OpTable, bind, like
from halma.hal.graph.baked import BakedValue, baked_values
from halma.hal.testing.conformance.capturing import F32, captured, empty, numbers, planned
from halma.hal.workspace import Workspace


class Keys:
    """Programs over a small cache whose length is known on the host, or on the device."""

    def __init__(self, backend: Backend) -> None:
        self.keys = numbers(backend, 16, 8)
        self.rows = torch.arange(16, device=self.keys.device)
        self.length = torch.zeros((), dtype=torch.int64, device=self.keys.device)
        self.out = torch.zeros(8, device=self.keys.device)

    def number(self, length: int) -> None:
        torch.mul(self.keys[0], float(length), out=self.out)

    def view(self, length: int) -> None:
        torch.add(self.keys[length], 0.0, out=self.out)

    def written(self, length: int) -> None:
        self.out.fill_(float(length))

    def branch(self, length: int) -> None:
        if length > 4:
            torch.mul(self.keys[0], self.keys[1], out=self.out)
        else:
            torch.add(self.keys[0], self.keys[1], out=self.out)

    def loop(self, length: int) -> None:
        for _ in range(length):
            self.out.add_(self.keys[1])

    def on_the_device(self, length: int) -> None:
        """Sees no host value: the length is a tensor."""
        torch.mul(self.keys[0], self.length, out=self.out)


def both(backend: Backend, program: Callable[[int], None], keys: Keys) -> list[BakedValue]:
    """What differs between captures with the lengths 3 and 5."""
    nodes: list[list[GraphNode]] = []
    for length in (3, 5):
        keys.length.fill_(length)
        nodes.append(captured(backend, lambda _, n=length: program(n), empty(backend)).nodes())
    return baked_values(*nodes)


@pytest.mark.invariant("G11")
@pytest.mark.parametrize("name", ["number", "view", "written", "branch", "loop"])
def test_a_baked_value_is_found(listing: Backend, name: str) -> None:
    keys = Keys(listing)
    found = both(listing, getattr(keys, name), keys)
    assert found
    code = getattr(Keys, name).__code__
    last = max(line for _, _, line in code.co_lines() if line is not None)
    lines = [f"test_baked.py:{line}" for line in range(code.co_firstlineno, last + 1)]
    assert not found[0].where or any(line in str(found[0]) for line in lines), "where a line is told, it is the line"


@pytest.mark.invariant("G11", control=True)
def test_values_on_the_device_bake_nothing(listing: Backend) -> None:
    keys = Keys(listing)
    assert both(listing, keys.on_the_device, keys) == []


def node(*parameters: object, name: str = "n") -> GraphNode:
    return GraphNode(name, parameters, "here:1")


@pytest.mark.invariant("G11", control=True)
def test_equal_parameters_are_no_difference() -> None:
    assert baked_values([], []) == []
    assert baked_values([node(float("nan"), (1, [2.0, None]))], [node(float("nan"), (1, [2.0, None]))]) == []


@pytest.mark.invariant("G11")
def test_the_comparison_itself() -> None:
    assert [d.parameter for d in baked_values([node(1, 1, 0)], [node(1.0, True, -0)])] == ["parameter 0", "parameter 1"]
    assert [d.parameter for d in baked_values([node(("dim", 1))], [node(("dim", 2))])] == ["dim"]
    assert [d.parameter for d in baked_values([node(1)], [node(1, 2)])] == ["parameters"]
    found = baked_values([node(1), node(name="a"), node(5)], [node(2), node(name="b"), node(6)])
    assert [d.parameter for d in found] == ["parameter 0", "node"], "nothing after the branch is compared"


# -- W5 -------------------------------------------------------------------------------------------------

TABLE = OpTable()


@TABLE.define("add_one", out=like)
def add_one(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    torch.add(x, 1.0, out=out)


def program_of_ops(backend: Backend, *, raw: bool) -> tuple[int, list[GraphNode]]:
    """Nodes of a program of two op calls, and those made outside of them; ``raw`` puts arithmetic in between."""
    x = numbers(backend, 4)

    def program(workspace: Workspace) -> torch.Tensor:
        ops = bind(workspace, ops=TABLE)
        y = ops.add_one(x)
        if raw:
            torch.mul(y, 2.0, out=y)
        return ops.add_one(y)

    graph = captured(backend, program, planned(backend, program, checked=True))
    return len(graph.nodes()), graph.raw_arithmetic()


@pytest.mark.invariant("W5")
def test_arithmetic_of_the_programs_own_is_reported(listing: Backend) -> None:
    nodes, raw = program_of_ops(listing, raw=True)
    assert 1 <= len(raw) < nodes
    assert not raw[0].where or "test_baked.py:" in raw[0].where


@pytest.mark.invariant("W5", control=True)
def test_a_program_of_ops_has_none(listing: Backend) -> None:
    nodes, raw = program_of_ops(listing, raw=False)
    assert nodes >= 2 and raw == []


def test_places_in_the_workspace_are_compared(listing: Backend) -> None:
    x, nodes = numbers(listing, 4), []
    for skip in (False, True):

        def program(workspace: Workspace, skip: bool = skip) -> torch.Tensor:
            first, second = (workspace.take((4,), F32) for _ in range(2))
            return torch.add(x, x, out=second if skip else first)

        nodes.append(captured(listing, program).nodes())
    assert len(baked_values(*nodes)) == 1
