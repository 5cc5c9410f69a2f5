"""torch.cuda's own streams, events and graphs are not torch_musa's: whoever makes one here is told.

On a MUSA machine ``torch.cuda.Event()`` fails, or with a patched torch gives an event of another kind that orders
nothing. Here it would quietly work, because a GPU of NVIDIA's is below. So the names are replaced in this process;
torch's own modules, Triton's, and this simulator still get the real ones.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

NAMES: Final = ("Event", "Stream", "ExternalStream", "CUDAGraph")
ALLOWED: Final = ("torch.", "triton.", "halma.backends.musa.simulator.")


def install() -> None:
    """Once a process."""
    for name in NAMES:
        real = getattr(torch.cuda, name)
        setattr(torch.cuda, name, trap_of(name, real))


def trap_of(name: str, real: Any) -> Any:
    """A class that is ``real`` for torch, and refuses anybody else."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller != "torch" and not caller.startswith(ALLOWED):
            raise RuntimeError(
                f"torch.cuda.{name} was called by {caller} while a MUSA device is simulated: on a MUSA machine there "
                "is no such thing; use the backend's own streams, events and graphs"
            )
        return real.__new__(cls, *args, **kwargs)

    return type(name, (real,), {"__new__": new, "__module__": real.__module__, "__doc__": real.__doc__})
