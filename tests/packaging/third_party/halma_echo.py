"""A stranger's backend: the CPU's parts under another name, and one op route. It knows only ``halma.hal``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.hookspecs import hookimpl
from halma.hal.routes import RouteSpec

if TYPE_CHECKING:
    import torch

    from halma.hal.workspace import Workspace

NAME = "echo"


class Echo:
    """Every part is the CPU's; only the name is ours, so that routes for it are ours too."""

    def __init__(self, host: Backend) -> None:
        self._host = host

    @property
    def name(self) -> str:
        return NAME

    def __getattr__(self, part: str) -> Any:
        return getattr(self._host, part)


def build() -> Backend:
    """The factory."""
    from halma.hal.registry import default_registry

    return Echo(default_registry().select("cpu"))  # type: ignore[return-value]


def probe() -> Probe:
    """The probe: it runs wherever the CPU does."""
    return Probe(True, "repeats what the CPU says", {"echo": "0.3.0"})


def rms_norm_route() -> Callable[..., None]:
    """The route's factory; torch is imported only now."""
    import torch

    def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor, ws: Workspace) -> None:
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        wide = ws.take(x.shape, acc)
        wide.copy_(x)
        length = torch.linalg.vector_norm(wide, 2, -1, keepdim=True, out=ws.take((*x.shape[:-1], 1), acc))
        wide.mul_(length.mul_(length).div_(x.shape[-1]).add_(eps).rsqrt_())
        if weight is not None:
            wide.mul_(weight)
        out.copy_(wide)

    return rms_norm


@hookimpl
def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
    register(BackendSpec(NAME, API_VERSION, probe, build, accelerator=False, evidence="cpu"))


@hookimpl
def halma_register_routes(register: Callable[[RouteSpec], None]) -> None:
    register(RouteSpec("rms_norm", "echo", rms_norm_route, backends=(NAME,), priority=5))
