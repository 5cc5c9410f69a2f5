"""Numbers that the kernels of an exchange are written for. Imports no torch: kernels are compiled without it."""

from __future__ import annotations

from typing import Final

MOST_CHOICES: Final = 32
"""Choices of a token: a lane of the narrowest warp reads one."""
MOST_EXPERTS: Final = 512
"""Of one rank: the block that sorts counts them in its shared memory."""
PARTS: Final = 8
"""Flags of a row: as many warps may share its way."""
SORTERS: Final = 16
"""Most blocks that sort the choices of a call."""
COMBINE_UNITS: Final = (1, 2, 4)
"""Units of 16 bytes that a thread of combine may have under way; those above 1 are for many rows."""
