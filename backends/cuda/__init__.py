"""The CUDA backend: NVIDIA GPUs through torch.cuda, the driver and NVRTC. Registering it imports none of them."""

from __future__ import annotations

from collections.abc import Callable

from halma.backends.simt.expert_routes import register_for as simt_routes
from halma.backends.triton.routes import register_for as triton_routes
from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.hookspecs import hookimpl
from halma.hal.routes import RouteSpec

NAME = "cuda"


def probe() -> Probe:
    """Whether this process could use a GPU, and why not; see :mod:`halma.backends.cuda.probing`."""
    from halma.backends.cuda.probing import probe as look

    return look()


def _factory() -> Backend:
    from halma.backends.cuda.backend import CudaBackend

    return CudaBackend()


@hookimpl
def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Offer the backend ``cuda``."""
    register(BackendSpec(NAME, API_VERSION, probe, _factory, evidence="cuda"))


@hookimpl
def halma_register_routes(register: Callable[[RouteSpec], None]) -> None:
    """Offer the kernels that CUDA and MUSA share."""
    simt_routes(NAME, register)
    triton_routes(NAME, register)
