"""The CPU backend: runs everywhere, and captures for real. Registering it imports no torch."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable

from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.hookspecs import hookimpl

NAME = "cpu"


def probe() -> Probe:
    """Usable wherever torch is installed; looks for it without importing it."""
    if importlib.util.find_spec("torch") is None:
        return Probe(False, "torch is not installed")
    return Probe(True, "runs on every machine", {"machine": platform.machine(), "cores": str(os.cpu_count() or 1)})


def _factory() -> Backend:
    from halma.backends.cpu.backend import CpuBackend

    return CpuBackend()


@hookimpl
def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Offer the backend ``cpu``."""
    register(BackendSpec(NAME, API_VERSION, probe, _factory, accelerator=False, evidence="cpu"))
