"""The CUDA backend: NVIDIA GPUs through torch.cuda, the driver and NVRTC. Registering it imports none of them."""

from __future__ import annotations

from collections.abc import Callable

from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.hookspecs import hookimpl

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
