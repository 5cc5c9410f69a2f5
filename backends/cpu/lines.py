"""Which line of the program did it."""

from __future__ import annotations

import os
import sys

import torch

_NOT_THE_PROGRAM = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def program_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor this backend's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
