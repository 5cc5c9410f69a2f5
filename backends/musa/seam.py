"""The one place where a stand-in may take the part of Moore Threads' software.

Everything in this backend reaches torch_musa as the module ``torch_musa``, and the vendor's libraries and compiler
through :func:`toolchain`. With ``HALMA_MUSA_SIM`` set, :func:`toolchain` asks ``halma.backends.musa.simulator`` for
both: nothing else in the backend knows that there is a simulator.

What the package ``halma.backends.musa.simulator`` has to offer:

    probe(mode: str) -> halma.hal.backend.Probe
        Whether ``mode`` ("cpu" or "cuda") can be simulated here, and why not. Imports no torch, never raises (B1).
    install(mode: str) -> Toolchain
        Puts its stand-in at ``sys.modules["torch_musa"]`` and ``torch.musa``, and returns the rest. Called once.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from halma.hal.errors import SettingError
from halma.hal.settings import settings

if TYPE_CHECKING:
    import torch

    from halma.hal.backend import KernelSource

SIMULATOR = "halma.backends.musa.simulator"
MODES = ("cpu", "cuda")


class Compiler(Protocol):
    """Makes a loadable image of a source of the dialect."""

    @property
    def version(self) -> str:
        """Of the compiler; part of the key of what is kept on disk."""
        ...

    def arch_of(self, capability: tuple[int, int]) -> str:
        """The architecture to compile for: ``mp_31`` for (3, 1)."""
        ...

    def flags(self, defines: Mapping[str, str], arch: str) -> list[str]:
        """Every flag that changes the image; part of the key."""
        ...

    def compile(self, source: KernelSource, arch: str) -> bytes:
        """What ``muModuleLoadData`` takes.

        Raises:
            KernelError: it does not compile; with the compiler's log.
        """
        ...


@dataclass(frozen=True)
class Toolchain:
    """Moore Threads' libraries and compiler, or what stands in for them.

    Attributes:
        device_type: torch's type of the device's tensors: ``musa`` on hardware and in the CPU simulator.
        load: "musart", "musa" or "mtrtc" -> an object with the library's functions as attributes, called as those of
            a ``ctypes.CDLL`` (``argtypes`` and ``restype`` are assigned first; results are returned error codes, 0 for
            success). Names and signatures: :mod:`halma.backends.musa.runtime`. A function that is not there raises
            AttributeError, a library that is not there OSError.
        compiler: finds the compiler, or raises :class:`NoCompiler` with the reason.
        tensor_at: (address, bytes, device, owner) -> uint8 tensor [bytes] on the device over that memory; keeps
            ``owner`` alive.
        dialect: spelling of the kernels' primitives that the compiler reads: ``musa``, or ``cuda`` where NVRTC stands
            in for it.
        simulated: what stands in for the device, as a clause for reports; "" on hardware.
        library_backend: torch.distributed's name for MCCL, or for what stands in for it.
        triton_targets: names by which Triton knows the device; FlagTree says "musa", the vendor's Triton 3.2 "mtgpu".
        collectives: makes the collective part where no kernels can run, as TorchCollectives would be made; None: that.
    """

    device_type: str
    load: Callable[[str], Any]
    compiler: Callable[[], Compiler]
    tensor_at: Callable[[int, int, torch.device, object], torch.Tensor]
    dialect: str = "musa"
    simulated: str = ""
    library_backend: str = "mccl"
    triton_targets: tuple[str, ...] = ("musa", "mtgpu")
    collectives: Callable[..., Any] | None = None


class NoCompiler(Exception):
    """There is no compiler for kernels; the text says what was looked for and where."""


LIBRARIES = {
    "musart": ("libmusart.so",),
    "musa": ("libmusa.so", "libmusa.so.1"),
    "mtrtc": ("libmtrtc.so",),
}


def _load(name: str) -> Any:
    failed: list[str] = []
    for file in LIBRARIES[name]:
        try:
            return ctypes.CDLL(file)
        except OSError as error:
            failed.append(str(error))
    raise OSError("; ".join(failed))


def simulation() -> str | None:
    """``cpu`` or ``cuda`` where ``HALMA_MUSA_SIM`` asks for a stand-in, else None.

    Raises:
        SettingError: it asks for another.
    """
    mode = settings().musa_sim
    if mode is not None and mode not in MODES:
        raise SettingError(
            f"HALMA_MUSA_SIM cannot be {mode!r}",
            asked=f"HALMA_MUSA_SIM={mode}",
            found=f"it takes {' or '.join(MODES)}",
            do="unset it where there is a MUSA device",
        )
    return mode


@cache
def toolchain() -> Toolchain:
    """The toolchain of this process; the simulator is installed at the first call where it is asked for."""
    mode = simulation()
    if mode is not None:
        return importlib.import_module(SIMULATOR).install(mode)
    return vendors_own()


def vendors_own() -> Toolchain:
    """Moore Threads' own libraries and compiler."""
    from halma.backends.musa.compiler import find_compiler
    from halma.backends.musa.tensors import tensor_at

    return Toolchain("musa", _load, find_compiler, tensor_at)


@cache
def torch_musa() -> Any:
    """The module torch_musa, or what stands in for it: the only way by which this backend reaches it.

    Raises:
        ImportError: it is not installed, or was built for another torch.
    """
    toolchain()
    return importlib.import_module("torch_musa")
