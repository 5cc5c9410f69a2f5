"""What the simulated driver says, by code. Codes and texts are CUDA's by the rule cudaX -> musaX."""

from __future__ import annotations

from typing import Final

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
ILLEGAL_ADDRESS: Final = 700
NOT_SUPPORTED: Final = 801
UNSUPPORTED: Final = 900
INVALIDATED: Final = 901
MERGE: Final = 902
UNJOINED: Final = 904
ISOLATION: Final = 905
CAPTURED_EVENT: Final = 907
WRONG_THREAD: Final = 908
INVALID_HANDLE: Final = 400
INVALID_CONTEXT: Final = 201

TEXTS: Final[dict[int, tuple[str, str]]] = {
    0: ("musaSuccess", "no error"),
    INVALID_VALUE: ("musaErrorInvalidValue", "invalid argument"),
    OUT_OF_MEMORY: ("musaErrorMemoryAllocation", "out of memory"),
    INVALID_CONTEXT: ("musaErrorDeviceUninitialized", "invalid device context"),
    INVALID_HANDLE: ("musaErrorInvalidResourceHandle", "invalid resource handle"),
    ILLEGAL_ADDRESS: ("musaErrorIllegalAddress", "an illegal memory access was encountered"),
    NOT_SUPPORTED: ("musaErrorNotSupported", "operation not supported"),
    UNSUPPORTED: ("musaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    INVALIDATED: (
        "musaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    MERGE: ("musaErrorStreamCaptureMerge", "operation would result in a merge of two independent captures"),
    UNJOINED: ("musaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    ISOLATION: ("musaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    CAPTURED_EVENT: (
        "musaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
    ),
    WRONG_THREAD: (
        "musaErrorStreamCaptureWrongThread",
        "attempted to terminate a thread-local capture sequence from another thread",
    ),
}


class SimulatedError(RuntimeError):
    """A call of the simulated runtime that failed, as torch reports it. ``error_code`` is the runtime's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"MUSA error: {TEXTS[code][1]}")
        self.error_code = code


CEILING: Final = 2048
"""Live executables of a process; the next one fails (torchada 0.1.103, _graph_rotation.py, on an S5000 with driver
3.3.5; sgl-project/sglang#27537)."""


class Executables:
    """Counts the live executables of the process."""

    def __init__(self, ceiling: int = CEILING) -> None:
        self.ceiling = ceiling
        self.live = 0

    def made(self) -> None:
        """One more.

        Raises:
            SimulatedError: it is beyond the ceiling; the driver then reports an access that has nothing to do with it.
        """
        if self.live >= self.ceiling:
            raise SimulatedError(ILLEGAL_ADDRESS)
        self.live += 1

    def destroyed(self) -> None:
        """One less."""
        self.live -= 1


executables = Executables()
