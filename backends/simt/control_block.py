"""A channel's control block and records on a device, as the host sees them: bound, fault, epoch, flight recorder."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from halma.backends.simt.records import FaultRecord, read_flight
from halma.hal.arena.layout import MAX_BLOCKS
from halma.hal.backend import Backend
from halma.hal.collectives import control
from halma.hal.collectives.contract import ChannelSite, ErrorRecord, FlightEntry


class Filled(Protocol):
    """Memory of an arena that has a byte of its own before its first use: a lane, a region."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fill(self) -> int: ...


class ControlBlock:
    """Of one channel on this rank. What it asks of the device goes over a stream of its own, so that it can be asked
    while the channel's hangs.

    Args:
        name: of the stream.

    Attributes:
        address: where the block is.
        memory: all of it, uint8.
    """

    def __init__(self, site: ChannelSite, backend: Backend, name: str) -> None:
        at, self._own = site.layout.control, site.own.tensor
        self.address = site.own.address + at
        self.memory = self._own[at : at + control.CONTROL_BYTES]
        self._recorder = site.recorder
        self._side = backend.device.new_stream(f"{name} settings")
        self._record = FaultRecord(backend)
        self._set(control.FAULT_PLACE, struct.pack("<Q", self._record.address))
        self.set_bound(site.bound_ns)
        if site.first_epoch:
            self._set_epoch(site.first_epoch)

    def error(self) -> ErrorRecord | None:
        """The sticky fault, if there is one; a read of host memory, also while the device hangs."""
        return self._record.read()

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first; a read of host memory."""
        return read_flight(self._recorder)

    def set_bound(self, bound_ns: int) -> None:
        """Device state: captured calls take it at their next look at the clock."""
        self._set(control.BOUND, struct.pack("<Q", bound_ns))

    def epoch(self) -> int:
        """The epoch now; the device must be idle."""
        with self._side:
            raw = self.memory[control.EPOCH_CELLS : control.EPOCH_CELLS + 4].cpu().numpy().tobytes()
        return struct.unpack("<I", raw)[0]

    def rearm(self, epoch: int, lanes: Iterable[Filled]) -> None:
        """Fill every lane as before the first call, clear the fault, set every epoch cell."""
        with self._side:
            for lane in lanes:
                self._own[lane.offset : lane.offset + lane.nbytes].fill_(lane.fill)
            self.memory[control.FAULT : control.FAULT_PLACE].zero_()
        self._side.synchronize()
        self._record.clear()
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._set(control.EPOCH_CELLS, struct.pack("<I", epoch) * MAX_BLOCKS)

    def _set(self, offset: int, raw: bytes) -> None:
        import torch

        data: Any = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        with self._side:
            self.memory[offset : offset + len(raw)].copy_(data)
        self._side.synchronize()
