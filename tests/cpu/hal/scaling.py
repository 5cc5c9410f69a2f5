"""A table of three small ops and routes that can be told apart, for tests of dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halma.hal.dispatch import Ops, OpTable, RouteSpec, Spec, like
from halma.hal.workspace import Workspace


def table_with(*routes: RouteSpec) -> OpTable:
    table = OpTable()

    @table.define("scale", out=lambda x, factor=2.0: like(x))
    def scale(x: torch.Tensor, factor: float = 2.0, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.mul(x, factor, out=out)

    @table.define("split", out=lambda x: (like(x), Spec((1,), torch.int64)))
    def split(x: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor], ws: Workspace) -> None:
        out[0].copy_(x)
        out[1].fill_(len(x))

    @table.define("bump", out=None)
    def bump(x: torch.Tensor, *, ws: Workspace) -> None:
        x.add_(1)

    for route in routes:
        table.add_route(route)
    return table


def adding(amount: float) -> Callable[[], Callable[..., Any]]:
    """A factory of a route that can be told apart by its result."""

    def implementation(x: torch.Tensor, factor: float = 2.0, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.add(x, amount, out=out)

    return lambda: implementation


def route(name: str, amount: float = 10.0, **more: Any) -> RouteSpec:
    return RouteSpec("scale", name, adding(amount), **more)


def result(table: OpTable, **options: Any) -> float:
    ops = Ops(Workspace(), ops=table, **options)
    return float(ops.scale(torch.ones(3))[0])


@dataclass(frozen=True, eq=False)
class Record:
    data: torch.Tensor
    plan_key: str = "plain"
