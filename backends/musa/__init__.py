"""The MUSA backend: Moore Threads GPUs through torch_musa, libmusart and mcc. Registering it imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from halma.backends.musa.v4_policy import ROUTES as V4_ROUTES
from halma.backends.simt.expert_routes import register_for as simt_routes
from halma.backends.simt.row_routes import register_for as row_routes
from halma.backends.triton.routes import register_for as triton_routes
from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.errors import SettingError
from halma.hal.hookspecs import hookimpl
from halma.hal.routes import Call, RouteSpec

NAME = "musa"


def probe() -> Probe:
    """Whether this process could use a GPU, or its stand-in, and why not. Never raises."""
    from halma.backends.musa.seam import SIMULATOR, simulation

    try:
        mode = simulation()
    except SettingError as error:
        return Probe(False, "; ".join((error.what, *error.found)))
    if mode is None:
        from halma.backends.musa.probing import probe as look

        return look()
    try:
        return importlib.import_module(SIMULATOR).probe(mode)
    except ImportError as error:
        return Probe(False, f"the simulator cannot be imported: {error}")


def _factory() -> Backend:
    from halma.backends.musa.backend import MusaBackend

    return MusaBackend()


def _simulated() -> bool:
    from halma.backends.musa.seam import simulation

    try:
        return simulation() is not None
    except SettingError:
        return True  # the probe says what is wrong with it


@hookimpl
def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Offer the backend ``musa``; over a stand-in it is simulated, and has to be named (B10)."""
    simulated = _simulated()
    evidence = "simulated" if simulated else NAME
    register(BackendSpec(NAME, API_VERSION, probe, _factory, simulated=simulated, evidence=evidence))


@hookimpl
def halma_register_routes(register: Callable[[RouteSpec], None]) -> None:
    """Offer the kernels that CUDA and MUSA share, where their compilers are."""
    simt_routes(NAME, partial(_with_need, register, "no_dialect"))
    row_routes(NAME, partial(_with_need, register, "no_dialect"), V4_ROUTES)
    triton_routes(NAME, partial(_with_need, register, "no_triton"))


def _with_need(register: Callable[[RouteSpec], None], need: str, spec: RouteSpec) -> None:
    register(replace(spec, needs=(partial(_need, need), *spec.needs)))


def _need(name: str, call: Call) -> str | None:
    return getattr(importlib.import_module("halma.backends.musa.needs"), name)()
