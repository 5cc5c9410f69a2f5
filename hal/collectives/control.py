"""The control block of a channel: byte offsets behind its epoch cells, shared by Python and device code.

Device code gets them as macros (:func:`defines`), so that they are written once. All words are u32 but where said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halma.hal.arena.layout import MAX_BLOCKS

EPOCH_CELLS: Final = 0
"""u32 [MAX_BLOCKS]: block b of a grid of g reads cell b and writes cells b, b + g, b + 2g ..."""
BOUND: Final = 4 * MAX_BLOCKS
"""u64, ns: how long a wait may take. Device state, so that it can be changed without another capture."""
FAULT: Final = BOUND + 8
"""Fault, written by compare-and-swap from 0; then, where host code makes the calls, the record's words."""
FAULT_PEER: Final = FAULT + 4
FAULT_CALL: Final = FAULT + 8
FAULT_DIGEST: Final = FAULT + 12
FAULT_EXPECTED: Final = FAULT + 16
FAULT_SEEN: Final = FAULT + 20
FAULT_ALGORITHM: Final = FAULT + 24
FAULT_COMPLETE: Final = FAULT + 28
"""1 once the record's words are all written. Host code only."""
FAULT_WAITED: Final = FAULT + 32
"""u64, ns."""
FAULT_PLACE: Final = FAULT + 40
"""u64: address of pinned host memory, laid out as from FAULT on, that a device writes the record's words to; FAULT
last. The fault itself stays here, where the next call looks for it."""
CONTROL_BYTES: Final = FAULT + 64

EPOCH_LAST: Final = 0xFFFFFFFF
EPOCH_AFTER_LAST: Final = 2
"""The epoch after the last: parity is kept, and 0, which untouched memory holds, is skipped (C2)."""


def next_epoch(epoch: int) -> int:
    """The epoch of the call after the one with ``epoch``."""
    return EPOCH_AFTER_LAST if epoch == EPOCH_LAST else epoch + 1


def defines() -> Mapping[str, str]:
    """The offsets as macros ``HALMA_...`` for device code."""
    names = (
        "MAX_BLOCKS",
        "EPOCH_CELLS",
        "BOUND",
        "FAULT",
        "FAULT_PEER",
        "FAULT_CALL",
        "FAULT_DIGEST",
        "FAULT_EXPECTED",
        "FAULT_SEEN",
        "FAULT_ALGORITHM",
        "FAULT_WAITED",
        "FAULT_PLACE",
        "EPOCH_LAST",
        "EPOCH_AFTER_LAST",
    )
    return {f"HALMA_{name}": f"{globals()[name]}u" for name in names}
