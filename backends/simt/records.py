"""What device code tells the host through pinned memory: the fault record and the flight recorder.

Reading them is a read of host memory, without a call of the driver, and also while the device hangs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halma.hal.backend import Backend
from halma.hal.collectives.contract import FLIGHT_BYTES, ErrorRecord, Fault, FlightEntry

if TYPE_CHECKING:
    import torch

_RECORD = struct.Struct("<8IQ")
_FLIGHT = struct.Struct("<IIQIIII")


class FaultRecord:
    """The words of :mod:`halma.hal.collectives.control` from ``FAULT`` on, in pinned host memory.

    Device code writes the fault word last, behind a fence at system scope; it must outlive the channel's last call.
    """

    def __init__(self, backend: Backend) -> None:
        import torch

        self._words: Any = backend.memory.pinned((_RECORD.size,), torch.uint8).numpy()
        self._fault = memoryview(self._words).cast("I")
        self.address = int(self._words.ctypes.data)
        self.clear()

    def read(self) -> ErrorRecord | None:
        """The fault, if there is one; 0.1 us where there is none."""
        if not self._fault[0]:
            return None
        fault, peer, call, digest, expected, seen, algorithm, _, waited = _RECORD.unpack(self._words)
        return ErrorRecord(Fault(fault), peer, call, digest, expected, seen, algorithm, waited)

    def clear(self) -> None:
        """There is none; no call of the channel is queued."""
        self._words.fill(0)


def read_flight(recorder: torch.Tensor) -> Sequence[FlightEntry]:
    """The entries of a flight recorder, oldest first."""
    raw = recorder.numpy().tobytes()
    count = len(raw) // FLIGHT_BYTES
    entries: list[FlightEntry] = []
    for place in range(count):
        call, digest, time_ns, nbytes, kind, algorithm, _ = _FLIGHT.unpack_from(raw, place * FLIGHT_BYTES)
        if call and call % count == place:  # else a half-written entry, or none
            entries.append(FlightEntry(call, digest, time_ns, nbytes, kind, algorithm))
    return sorted(entries, key=lambda entry: entry.time_ns)
