"""Which line of the program did it."""

from __future__ import annotations

import contextlib
import os
import sys

import torch

_OURS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))
_PYTHONS = os.path.dirname(contextlib.__file__) + os.sep


def program_line() -> str:
    """``file:line`` of the innermost frame that is not torch's, this backend's or the standard library's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and (not name.startswith(_PYTHONS) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
