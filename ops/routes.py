"""Our own routes, registered like anybody else's; nothing heavy is imported until one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halma.hal.hookspecs import hookimpl
from halma.hal.routes import Call, RouteSpec


def _expert_rows() -> Callable[..., Any]:
    from halma.ops.expert_rows import expert_rows

    return expert_rows


def _expert_rows_need(call: Call) -> str | None:
    from halma.ops.expert_rows import plain_in_accumulator

    return plain_in_accumulator(call)


@hookimpl(specname="halma_register_routes")
def register_routes(register: Callable[[RouteSpec], None]) -> None:
    """Answer to the hook ``halma_register_routes``: offer every route that ships with us."""
    register(
        RouteSpec(
            "expert_ffn",
            "rows",
            _expert_rows,
            backends=("cpu",),
            needs=(_expert_rows_need,),
            priority=10,
            opaque=True,
        )
    )
