"""The routes of :mod:`halma.backends.simt.experts` and :mod:`halma.backends.simt.many_experts`, for a backend to
register; nothing heavy is imported before one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from halma.hal.routes import Call, RouteSpec

_PRIORITY: Final = 20
_ROUTES: Final = (
    # op, route, priority, function, what it is given first, requirements
    ("expert_layout", "simt", _PRIORITY, "layout_route", (), ("fits_layout",)),
    ("expert_sum", "simt", _PRIORITY, "sum_route", (), ("fits_sum",)),
    ("grouped_ffn", "simt", _PRIORITY, "grouped_route", (None,), ("fits_grouped",)),
    ("expert_ffn", "simt", _PRIORITY, "ffn_route", (None,), ("fits_ffn",)),
    # One tiling each, to measure: behind the one that chooses.
    *(
        (op, f"simt_{tiling}", -1, function, (tiling,), (need, *more))
        for tiling, more in (("thin", ()), ("wide", ("fits_wide",)))
        for op, function, need in (
            ("grouped_ffn", "grouped_route", "fits_grouped"),
            ("expert_ffn", "ffn_route", "fits_ffn"),
        )
    ),
    # For many rows an expert, before every other; with a most of tokens an item, to measure.
    ("grouped_ffn", "simt_many", 40, "many_route", (None,), ("fits_many", "fits_share")),
    *(("grouped_ffn", f"simt_many_{most}", -1, "many_route", (most,), ("fits_many",)) for most in (64, 128, 256)),
)


def _load(name: str) -> Callable[..., Any]:
    module = "many_experts" if name in ("many_route", "fits_many", "fits_share") else "experts"
    return getattr(importlib.import_module(f"halma.backends.simt.{module}"), name)


def _bound(name: str, *first: Any) -> Callable[..., Any]:
    return partial(_load(name), *first)


def _need(name: str, call: Call) -> str | None:
    return _load(name)(call)


def register_for(backend: str, register: Callable[[RouteSpec], None]) -> None:
    """Offer the routes for the backend called ``backend``."""
    for op, route, priority, function, first, needs in _ROUTES:
        register(
            RouteSpec(
                op,
                route,
                partial(_bound, function, backend, *first),
                backends=(backend,),
                needs=tuple(partial(_need, need) for need in needs),
                priority=priority,
                opaque=True,
            )
        )
