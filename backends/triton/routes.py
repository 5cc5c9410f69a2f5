"""The routes of :mod:`halma.backends.triton.experts`, for a backend to register: without torch, Triton or a kernel."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from halma.hal.routes import Call, RouteSpec

NAME: Final = "triton"
_ROUTES: Final = (
    # op, priority, function, requirement
    ("expert_layout", 10, "expert_layout", "fits_layout"),
    ("expert_sum", 10, "expert_sum", "fits_sum"),
    # From fitting.FROM_ROWS on, where they are the faster ones.
    ("grouped_ffn", 30, "grouped_ffn", "fits_grouped"),
    ("expert_ffn", 30, "expert_ffn", "fits_ffn"),
)


def _load(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("halma.backends.triton.experts"), name)


def _need(name: str, call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return getattr(importlib.import_module("halma.backends.triton.fitting"), name)(call)


def register_for(backend: str, register: Callable[[RouteSpec], None]) -> None:
    """Offer the routes for the backend called ``backend``; the portable dialect's have 20, and 40 for many rows."""
    for op, priority, function, need in _ROUTES:
        register(
            RouteSpec(
                op,
                NAME,
                partial(_load, function),
                backends=(backend,),
                needs=(partial(_need, need),),
                priority=priority,
                opaque=True,
            )
        )
