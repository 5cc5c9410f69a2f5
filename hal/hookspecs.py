"""The two hooks of the layer, and the markers a plugin uses.

A plugin is any module or object with functions of these names, marked with :data:`hookimpl`. It is found
through an entry point: in the group ``halma.backends``, named after the backend that it registers, or in the
group ``halma.routes`` when it brings routes only. Both hooks hand the plugin a callback, which it calls as often as it
likes; they run at start-up and for reports, never on a hot path (a hook call costs 3 us, a bound method 0.08).

A hook must be safe to call again, in a spawned worker and before a device is bound: register, do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pluggy import HookimplMarker, HookspecMarker

from halma.hal.backend import BackendSpec
from halma.hal.routes import RouteSpec

PROJECT: Final = "halma"

hookspec = HookspecMarker(PROJECT)
hookimpl = HookimplMarker(PROJECT)


@hookspec
def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Call ``register`` with the :class:`~halma.hal.backend.BackendSpec` of each backend (added in API version 1)."""


@hookspec
def halma_register_routes(register: Callable[[RouteSpec], None]) -> None:
    """Call ``register`` with each :class:`~halma.hal.routes.RouteSpec` (added in API version 1).

    The route's ``origin`` is set to the distribution that the plugin comes from, whatever it says.
    """
