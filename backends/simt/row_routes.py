"""The routes of :mod:`halma.backends.simt.rows`, for a backend to register; nothing heavy is imported before one is
chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from halma.hal.policy import Guard, guarded
from halma.hal.routes import Call, RouteSpec

NAME: Final = "simt"
PRIORITY: Final = 20
OPS: Final = {
    # op: function, requirement
    "linear": ("linear_route", "fits_linear"),
    "grouped_linear": ("grouped_route", "fits_grouped"),
    "linear_fp8": ("linear_fp8_route", "fits_linear_fp8"),
    "swiglu": ("swiglu_route", "fits_swiglu"),
    "swiglu_fp8": ("swiglu_fp8_route", "fits_swiglu_fp8"),
    "rope": ("rope_route", "fits_rope"),
}


def _bound(function: str, backend: str) -> Callable[..., Any]:
    return partial(getattr(importlib.import_module("halma.backends.simt.rows"), function), backend)


def _need(name: str, call: Call) -> str | None:
    return getattr(importlib.import_module("halma.backends.simt.rows"), name)(call)


def register_for(backend: str, register: Callable[[RouteSpec], None], guard: Guard | None = None) -> None:
    """Offer the routes for the backend called ``backend``, before the reference.

    Args:
        guard: facts that they are for; None: any. CUDA does not offer them: nobody has measured them there.
    """
    for op, (function, need) in OPS.items():
        register(
            RouteSpec(
                op,
                NAME,
                partial(_bound, function, backend),
                backends=(backend,),
                needs=(*(() if guard is None else (guarded(guard),)), partial(_need, need)),
                priority=PRIORITY,
                opaque=True,
            )
        )
