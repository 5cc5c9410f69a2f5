"""Launches of our own kernels: the parameters' memory, and what an open capture learns of one."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from halma.backends.torch_device.watch import CaptureWatch
from halma.hal.errors import KernelError
from halma.hal.graph.current import current_recorder

MOST_PARAMETERS: Final = 64
WORD: Final = 8
_PACKERS: Final = [struct.Struct(f"@{count}Q").pack_into for count in range(MOST_PARAMETERS + 1)]


class Parameters(threading.local):
    """Memory that the driver reads a launch's parameters from, one for each thread: it has read them when a launch
    returns. Eight ints are packed in 0.5 us."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint64 * MOST_PARAMETERS)()
        at = ctypes.addressof(self._words)
        self._places = (ctypes.c_void_p * MOST_PARAMETERS)(*(at + WORD * index for index in range(MOST_PARAMETERS)))
        self._address = ctypes.addressof(self._places)

    def packed(self, args: Sequence[Any]) -> int:
        """The address of the parameters' addresses, good for this thread's next launch.

        Args:
            args: ints, 8 bytes each; scalars of ctypes and numpy, in their own size.

        Raises:
            KernelError: there are more than 64, or one is none of these.
        """
        if len(args) > MOST_PARAMETERS:
            raise KernelError(f"{len(args)} arguments of a kernel", found=f"room for {MOST_PARAMETERS}")
        try:
            _PACKERS[len(args)](self._words, 0, *args)
        except struct.error:  # what is no int from 0 on
            for index, arg in enumerate(args):
                raw = _bytes_of(arg)
                ctypes.memmove(self._places[index] or 0, raw, len(raw))
        return self._address


def _bytes_of(arg: Any) -> bytes:
    if isinstance(arg, int):
        return (arg & (1 << 64) - 1).to_bytes(WORD, "little")
    if isinstance(arg, np.generic):
        raw = arg.tobytes()
    elif isinstance(arg, ctypes._SimpleCData):
        raw = bytes(arg)
    else:
        raise KernelError(
            "not an argument of a kernel",
            found=f"{type(arg).__name__}: {arg!r}",
            do="give ints, and scalars of ctypes or numpy in the parameter's own size",
        )
    if len(raw) > WORD:
        raise KernelError(
            "an argument of a kernel has at most 8 bytes", found=f"{type(arg).__name__}, {len(raw)} bytes"
        )
    return raw


def note_launch(name: str, grid: int, block: int, args: Sequence[Any]) -> None:
    """Tell the capture of this thread of a launch, with every host value that it bakes in."""
    watch = current_recorder()
    if isinstance(watch, CaptureWatch):
        values = [(f"argument {index}", getattr(value, "value", value)) for index, value in enumerate(args)]
        watch.note_launch(name, [("grid", grid), ("block", block), *values])
