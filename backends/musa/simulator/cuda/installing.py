"""Installs the stand-in that maps torch_musa to torch.cuda. torch's type of the tensors stays torch.cuda's."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from halma.backends.cuda.driver import why_missing
from halma.backends.cuda.memory import DeviceBytes
from halma.backends.musa.seam import Compiler, NoCompiler, Toolchain
from halma.backends.musa.simulator import chosen
from halma.backends.musa.simulator.cuda import libraries, musac, traps

SIMULATED: Final = "torch_musa 2.7.1 is simulated over torch.cuda, on an NVIDIA GPU"
_RANDOM: Final = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "initial_seed",
    "get_rng_state",
    "set_rng_state",
)


def install() -> Toolchain:
    """See :func:`halma.backends.musa.simulator.install`."""
    torch.cuda.init()
    _musac = chosen.choose({**musac.NAMES, "_musa_version": str(musac.VERSION)})
    from halma.backends.musa.simulator.front import module  # reads the choice

    made = module.make(SIMULATED, {name: getattr(torch.cuda, name) for name in _RANDOM})
    sys.modules.update({"torch_musa": made, "torch_musa._MUSAC": _musac})
    setattr(torch, "musa", made)  # noqa: B010 - torch's stubs know no such module
    setattr(torch.version, "musa", str(musac.VERSION))  # noqa: B010
    traps.install()
    return Toolchain(
        musac.DEVICE_TYPE, libraries.load, _compiler, _tensor_at,
        dialect="cuda", simulated=SIMULATED, library_backend="nccl", triton_targets=("cuda",),
    )  # fmt: skip


def _compiler() -> Compiler:
    missing = why_missing()
    if missing is not None:
        raise NoCompiler(f"NVRTC stands in for mcc, and {missing}")
    from halma.backends.musa.simulator.cuda.compiler import NvrtcCompiler

    return NvrtcCompiler()


def _tensor_at(address: int, nbytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    return torch.as_tensor(DeviceBytes(address, nbytes, owner), device=device)
