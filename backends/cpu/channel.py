"""The driver of one channel on the CPU: ranks are processes, the arena is memory that they share.

The same protocol as on a device (docs/collectives.md): epoch, flags, headers and the sticky fault lie in the arena, so
a captured call, which is one opaque node of the tape, and an eager one are the same work. Nothing runs at record time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from halma.backends.cpu.channel_memory import ChannelMemory, Faulted
from halma.backends.cpu.channel_wires import WAYS, Turn
from halma.backends.cpu.memory_order import memory_order, why_unordered
from halma.backends.cpu.sums import bytes_of, poison
from halma.hal.backend import Stream
from halma.hal.collectives.arithmetic import fused_norm
from halma.hal.collectives.contract import (
    Algorithm,
    Box,
    Call,
    ChannelSite,
    Choice,
    ErrorRecord,
    Fault,
    FlightEntry,
    Kind,
    Operands,
    Wire,
)
from halma.hal.collectives.control import FAULT, FAULT_COMPLETE, next_epoch
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_launch

SCRUB_MASK: Final = 0xFFFFF
"""Two calls in 2^20, one of each parity, zero what is stale."""
PHASES: Final = {
    (Algorithm.TWO_SHOT, Wire.CHUNKS): (0, 1),
    (Algorithm.ONE_SHOT, Wire.CHUNKS): (1,),
    (Algorithm.STAGED, Wire.FLAGS): (0,),
    (Algorithm.STAGED_TWO_SHOT, Wire.FLAGS): (0, 1),
}
"""Whose flags a way uses."""
ENTRY: Final = np.dtype(
    [
        ("call", "<u4"),
        ("digest", "<u4"),
        ("time", "<u8"),
        ("nbytes", "<u4"),
        ("kind", "<u4"),
        ("algorithm", "<u4"),
        ("zero", "<u4"),
    ]
)


class CpuChannel:
    """See :class:`halma.hal.collectives.contract.ChannelDriver`. A grid has one block here: the calling thread.

    Raises:
        CollectiveError: nobody has written down how this machine orders stores (C13).
    """

    def __init__(self, site: ChannelSite) -> None:
        order, reason = memory_order(), why_unordered()
        if order is None:
            raise CollectiveError("no channel can be used on this machine", found=reason)
        self._memory = ChannelMemory(site, order)
        self._name = site.layout.name
        self._first = site.first_epoch
        self._entries: Any = site.recorder.numpy().view(ENTRY)
        self._memory.cells.fill(site.first_epoch)
        self.set_bound(site.bound_ns)

    # -- calls --------------------------------------------------------------------------------------

    def launch(self, call: Call, choice: Choice, operands: Operands, box: Box | None, stream: Stream) -> None:
        """Record the call where the thread records, else make it now."""
        run = partial(self._run, call, choice, operands, box)
        recorder = current_recorder()
        if recorder is None:
            note_launch()
            run()
            return
        reads = [t for t in (operands.source, operands.residual, operands.weight) if t is not None]
        writes = [t for t in (operands.out, operands.norm_out, operands.scale_out) if t is not None]
        # All calls of a channel write its control block, so two that nothing orders are a race on the tape (C4).
        recorder.record_node(
            f"collective:{self._name}",
            run,
            reads=reads,
            writes=[*writes, self._memory.control],
            parameters=(
                ("call", call.describe()),
                ("digest", call.digest),
                ("way", f"{choice.algorithm.name}/{choice.wire.name}"),
                ("box", box and (box.offset, box.stride)),
                ("eps", operands.eps),
            ),
        )

    def _run(self, call: Call, choice: Choice, operands: Operands, box: Box | None) -> None:
        memory = self._memory
        epoch = next_epoch(int(memory.cells[0]))
        number = (epoch - self._first) & 0xFFFFFFFF
        self._note(number, call, choice)
        if memory.fault[0]:
            poison(operands)
        else:
            algorithm = int(choice.algorithm)
            try:
                turn = Turn(memory, call, epoch, bytes_of(operands.source), operands.source.dtype, box)
                if epoch & SCRUB_MASK in (0, 1):
                    self._scrub(call, choice, epoch)
                memory.send_headers(call.digest, epoch)
                found = WAYS[choice.algorithm, choice.wire](turn) if call.nbytes else {}
                algorithm = 0
                for peer in memory.others:
                    memory.wait_header(call, epoch, peer)
                _deliver(call, operands, found)
            except Faulted as fault:
                memory.write_fault(fault, number, call.digest, algorithm)
                poison(operands)
            except BaseException:  # an interrupt, say: peers may have this call's data or not, so nobody can go on
                memory.write_fault(Faulted(Fault.LEFT, memory.rank, epoch, 0, 0), number, call.digest, algorithm)
                memory.cells.fill(epoch)
                raise
        memory.cells.fill(epoch)

    def _scrub(self, call: Call, choice: Choice, epoch: int) -> None:
        words = -(-call.nbytes // 4) if choice.wire is Wire.WORDS else 0
        layout = self._memory.layout
        flags = {Wire.CHUNKS: layout.chunk_flags, Wire.FLAGS: layout.stage_flags}.get(choice.wire)
        phases = PHASES.get((choice.algorithm, choice.wire), ())
        self._memory.scrub(epoch, words, flags if call.nbytes else None, phases)

    def _note(self, number: int, call: Call, choice: Choice) -> None:
        entry = self._entries[number % len(self._entries)]
        entry["call"] = 0  # nothing half-written is read as an entry
        entry["digest"], entry["time"], entry["nbytes"] = call.digest, time.monotonic_ns(), call.nbytes & 0xFFFFFFFF
        entry["kind"], entry["algorithm"], entry["zero"] = int(call.kind), int(choice.algorithm), 0
        entry["call"] = number

    # -- looking ------------------------------------------------------------------------------------

    def error(self) -> ErrorRecord | None:
        """The sticky fault."""
        words, complete = self._memory.fault, (FAULT_COMPLETE - FAULT) // 4
        if not words[0] or not words[complete]:
            return None
        fault, peer, call, digest, expected, seen, algorithm = (int(word) for word in words[:7])
        waited = int(self._memory.waited[0])
        return ErrorRecord(Fault(fault), peer, call, digest, expected, seen, algorithm, waited)

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first; readable from another thread while one waits."""
        entries = [
            FlightEntry(
                int(one["call"]),
                int(one["digest"]),
                int(one["time"]),
                int(one["nbytes"]),
                int(one["kind"]),
                int(one["algorithm"]),
            )
            for one in self._entries.copy()
            if one["call"]
        ]
        return sorted(entries, key=lambda entry: entry.time_ns)

    def set_bound(self, bound_ns: int) -> None:
        """For all waits from now on, of captured calls too."""
        self._memory.bound[0] = bound_ns

    def epoch(self) -> int:
        """The channel's epoch."""
        return int(self._memory.cells[0])

    def rearm(self, epoch: int) -> None:
        """Forget the fault, scrub the lanes, continue from ``epoch``."""
        memory = self._memory
        memory.refill()
        memory.fault.fill(0)
        memory.waited.fill(0)
        memory.cells.fill(epoch)

    def close(self) -> None:
        """Let go of the arena's memory."""
        del self._memory


def _deliver(call: Call, operands: Operands, found: dict[int, Any]) -> None:
    """Write what arrived to the tensors."""
    if not found:
        return
    if call.kind is Kind.ALL_GATHER:
        out = bytes_of(operands.out)
        for rank, part in found.items():
            out[rank * call.nbytes : (rank + 1) * call.nbytes] = part
        return
    (result,) = found.values()
    if call.kind is Kind.ALL_REDUCE_NORM:
        fused_norm(torch.from_numpy(result).view(operands.source.dtype), operands)
    else:
        bytes_of(operands.out)[:] = result
