"""Stand-ins for torch_musa 2.7.1 and Moore Threads' libraries, so that this backend's own code runs without a device.

``HALMA_MUSA_SIM=cpu`` puts a device ``musa`` on the CPU: tensors say ``musa:0``, and what a device refuses is refused.
``HALMA_MUSA_SIM=cuda`` maps the same names to torch.cuda, libcudart and NVRTC on an NVIDIA GPU. Both have the names,
the signatures and the known misbehaviours of that version; nothing that they show is behaviour of Moore Threads'
hardware.

A process has one stand-in for its life. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from halma.backends.musa.probing import beside_torchada
from halma.hal.backend import Probe

if TYPE_CHECKING:
    from halma.backends.musa.seam import Toolchain

HELPER = "_setup_privateuseone_for_python_backend"
"""What registers torch's PrivateUse1 from Python (torch.utils.backend_registration); torch 2.9 has none."""


def probe(mode: str) -> Probe:
    """Whether ``mode`` ("cpu" or "cuda") can be simulated here, and why not. Imports no torch, never raises."""
    try:
        reason = _why_not(mode)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        return Probe(False, f"HALMA_MUSA_SIM={mode}: {reason}")
    return Probe(True, f"simulated on {'the CPU' if mode == 'cpu' else 'an NVIDIA GPU'}", {"simulated": mode})


def _why_not(mode: str) -> str | None:
    beside = beside_torchada()
    if beside is not None:
        return beside
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed"
    if mode == "cpu":
        helper = Path(found.origin).parent / "utils" / "backend_registration.py"
        if not helper.exists() or f"def {HELPER}" not in helper.read_text(encoding="utf-8"):
            return f"this torch cannot register a device from Python (it has no {HELPER})"
        return None
    from halma.backends.cuda import probe as cuda_probe

    there = cuda_probe()
    return None if there.ok else f"it runs on an NVIDIA GPU, and cuda is not usable: {there.reason}"


def install(mode: str) -> Toolchain:
    """Put the stand-in at ``sys.modules["torch_musa"]`` and ``torch.musa``; the rest of the software is returned.

    Raises:
        BackendError: it cannot be simulated here.
    """
    from halma.hal.errors import BackendError

    there = probe(mode)
    if not there.ok:
        raise BackendError("the MUSA simulator cannot run here", asked=f"HALMA_MUSA_SIM={mode}", found=there.reason)
    return importlib.import_module(f"{__name__}.{mode}.installing").install()
