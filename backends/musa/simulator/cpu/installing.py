"""Installs the CPU simulator: one device ``musa`` whose memory and kernels are the CPU's."""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import _disable_current_modes

from halma.backends.musa.seam import NoCompiler, Toolchain
from halma.backends.musa.simulator import HELPER, chosen
from halma.backends.musa.simulator.cpu import collectives, dispatch, libraries, musac, pinned, placing, random
from halma.hal.errors import BackendError

SIMULATED: Final = "torch_musa 2.7.1 and its device are simulated on the CPU"
DEVICES: Final = 1


def install() -> Toolchain:
    """See :func:`halma.backends.musa.simulator.install`."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise BackendError(
            "the MUSA simulator needs torch's one free device type for itself",
            found=f"this process has given it to {taken!r} already",
            do="start a process of its own, without torch_musa or another device in it",
        )
    _musac = chosen.choose({**musac.NAMES, "_musa_version": str(libraries.VERSION)})
    from halma.backends.musa.simulator.front import module  # reads the choice

    made = module.make(SIMULATED, random.functions())
    getattr(backend_registration, HELPER)(placing.DEVICE_TYPE, made)
    sys.modules.update({"torch_musa": made, "torch_musa._MUSAC": _musac})
    torch.version.musa = str(libraries.VERSION)  # pyright: ignore[reportAttributeAccessIssue]
    dispatch.install(DEVICES)
    pinned.install()
    collectives.install()
    return Toolchain(
        placing.DEVICE_TYPE, libraries.load, _no_compiler, _tensor_at,
        simulated=SIMULATED, library_backend="gloo", collectives=_collectives,
    )  # fmt: skip


def _collectives(*arguments: Any) -> Any:
    from halma.backends.musa.simulator.cpu.channels import HostCollectives

    return HostCollectives(*arguments)


def _no_compiler() -> NoReturn:
    raise NoCompiler("the CPU simulator runs no kernels of the portable dialect (mcc needs a MUSA machine)")


def _tensor_at(address: int, nbytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        keeper = (owner, libraries.keeper_of(address))
        return placing.allocators[device.index or 0].over(address, nbytes, keeper)
