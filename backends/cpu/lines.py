"""Which line of the program did it."""

from __future__ import annotations

import contextlib
import os
import sys

import torch

from halma.hal import workspace

_HAL = os.path.dirname(workspace.__file__) + os.sep
# What stands between a program and its work: the call of an op, a break, the poison of a scope that closes.
_BETWEEN = tuple(_HAL + part for part in ("dispatch.py", "graph" + os.sep, "workspace"))
_BACKENDS = os.path.dirname(os.path.dirname(__file__))
_OURS = (os.path.dirname(torch.__file__) + os.sep, _BACKENDS + os.sep, *_BETWEEN)
_PYTHONS = os.path.dirname(contextlib.__file__) + os.sep


def program_line() -> str:
    """``file:line`` of the innermost frame that is not torch's, this layer's or the standard library's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and (not name.startswith(_PYTHONS) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
