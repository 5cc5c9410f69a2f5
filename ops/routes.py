"""Our own routes, registered like anybody else's; nothing heavy is imported until one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from halma.hal.hookspecs import hookimpl
from halma.hal.routes import Call, RouteSpec

_HOST = (
    # op, route, module of halma.ops.host, function, requirement
    ("linear", "host", "linear", "linear", "plain_products"),
    ("grouped_linear", "host", "linear", "grouped_linear", "plain_products"),
    ("rms_norm", "host", "norm", "rms_norm", "weight_in_accumulator"),
    ("hc_pre", "host", "hyper_connection", "hc_pre", "four_streams"),
    ("hc_post", "host", "hyper_connection", "hc_post", None),
    ("attend", "host", "attention", "attend", "plain_keys"),
    ("route_scores", "host", "routing", "route_scores", "plain_gate"),
    ("select_experts", "host", "routing", "select_experts", None),
    ("window_insert", "host", "cache", "window_insert", "plain_store"),
    ("block_insert", "host", "cache", "block_insert", "plain_store"),
    ("compressor_insert", "host", "compressor", "compressor_insert", "plain_values"),
    ("compressor_pool", "host", "compressor", "compressor_pool", None),
    ("swiglu", "host", "experts", "swiglu", "fp32_or_fp64"),
    ("swiglu_fp8", "host", "experts", "swiglu_fp8", "fp32_or_fp64"),
    ("expert_layout", "host", "grouped", "expert_layout", None),
    ("grouped_ffn", "rows", "grouped", "grouped_rows", "plain_in_weights_dtype"),
    ("expert_ffn", "rows", "experts", "expert_rows", "plain_in_accumulator"),
)


def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"halma.ops.host.{module}"), name)


def _need(module: str, name: str, call: Call) -> str | None:
    return _load(module, name)(call)


@hookimpl(specname="halma_register_routes")
def register_routes(register: Callable[[RouteSpec], None]) -> None:
    """Answer to the hook ``halma_register_routes``: offer every route that ships with us."""
    for op, name, module, function, need in _HOST:
        register(
            RouteSpec(
                op,
                name,
                partial(_load, module, function),
                backends=("cpu",),
                needs=() if need is None else (partial(_need, module, need),),
                priority=10,
                opaque=True,
            )
        )
