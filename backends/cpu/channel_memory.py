"""A channel's memory as arrays, and the waits on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from halma.backends.cpu.memory_order import MemoryOrder
from halma.hal.arena.layout import Lane
from halma.hal.collectives.contract import Call, ChannelSite, Fault
from halma.hal.collectives.control import BOUND, EPOCH_CELLS, FAULT, FAULT_COMPLETE, FAULT_WAITED, MAX_BLOCKS

ALL_ONES: Final = np.uint32(0xFFFFFFFF)
FLAG_SHIFT: Final = np.uint64(32)
POLLS_A_LOOK: Final = 32
"""Polls between two looks at the clock."""
SPIN_NS: Final = 2_000_000
"""How long a wait polls and yields; then it naps between polls, so that a stalled peer costs no core."""
NAP: Final = 0.0001


class Faulted(Exception):
    """A wait ended in a fault; only inside a call."""

    def __init__(self, fault: Fault, peer: int, expected: int, seen: int, waited_ns: int) -> None:
        super().__init__(fault, peer)
        self.fault = fault
        self.peer = peer
        self.expected = expected
        self.seen = seen
        self.waited_ns = waited_ns


def later(flag: int, epoch: int) -> bool:
    """Whether ``flag`` belongs to a call after ``epoch``; 0 is untouched memory. Right across the wrap."""
    return flag != 0 and 0 < (flag - epoch) & 0xFFFFFFFF < 0x80000000


def flag_word(epoch: int) -> int:
    """Which word of a flag box a call uses, by parity.

    In a staged one-shot a peer may be one call ahead, and its next flag must not take the place of the one that this
    rank still waits for. (In two phases one word would do: whoever is in the second has read the first.)
    """
    return epoch & 1


class ChannelMemory:
    """Every rank's part of the arena as seen from here, and this rank's control block."""

    def __init__(self, site: ChannelSite, order: MemoryOrder) -> None:
        self.rank, self.size, self.layout = site.rank, site.size, site.layout
        self.others = [rank for rank in range(site.size) if rank != site.rank]
        self.fence = order.fence
        self.raw: list[Any] = [memory.tensor.numpy() for memory in site.peers]
        self.control = site.own.tensor[site.layout.control : site.layout.control + FAULT + 64]
        block: Any = self.control.numpy()
        self.cells: Any = block[EPOCH_CELLS : EPOCH_CELLS + 4 * MAX_BLOCKS].view(np.uint32)
        self.bound: Any = block[BOUND : BOUND + 8].view(np.uint64)
        self.fault: Any = block[FAULT:FAULT_WAITED].view(np.uint32)
        self.waited: Any = block[FAULT_WAITED : FAULT_WAITED + 8].view(np.uint64)

    def u8(self, rank: int, offset: int, count: int) -> Any:
        """uint8 [count] of a rank's arena."""
        return self.raw[rank][offset : offset + count]

    def u32(self, rank: int, offset: int, count: int) -> Any:
        """uint32 [count]."""
        return self.raw[rank][offset : offset + 4 * count].view(np.uint32)

    def u64(self, rank: int, offset: int, count: int) -> Any:
        """uint64 [count]."""
        return self.raw[rank][offset : offset + 8 * count].view(np.uint64)

    # -- headers ------------------------------------------------------------------------------------

    def send_headers(self, digest: int, epoch: int) -> None:
        """{digest, epoch, 0, epoch} to every peer (C15).

        A peer that has it may write where this rank has read, cleared or scrubbed so far: that must be over.
        """
        self.fence()
        for peer in self.others:
            header = self.u64(peer, self.layout.headers.at(epoch & 1, self.rank), 2)
            header[1] = epoch << 32
            header[0] = epoch << 32 | digest

    def header_of(self, peer: int, epoch: int) -> tuple[int, int]:
        """(digest, flag) that stand in a peer's header box; one load, so they belong together."""
        word = int(self.u64(self.rank, self.layout.headers.at(epoch & 1, peer), 2)[0])
        return word & 0xFFFFFFFF, word >> 32

    # -- flags apart from data ----------------------------------------------------------------------

    def send_flags(self, lane: Lane, phase: int, epoch: int) -> None:
        """Tell every peer that what was stored before is there."""
        self.fence()
        for peer in self.others:
            self.u32(peer, lane.at(phase, self.rank), MAX_BLOCKS)[flag_word(epoch)] = epoch

    def flag_of(self, lane: Lane, phase: int, peer: int, epoch: int) -> int:
        """The flag word of a peer."""
        return int(self.u32(self.rank, lane.at(phase, peer), MAX_BLOCKS)[flag_word(epoch)])

    # -- staleness ----------------------------------------------------------------------------------

    def scrub(self, epoch: int, words_in_use: int, flags_in_use: Lane | None, phases: Sequence[int]) -> None:
        """Zero what this call and the calls of its buffer since the last scrub left, at the start of a call.

        A peer may have started this call, never the next one, before it has this rank's header. So nobody stores
        to what this call does not use, and no flag that stays is older than 2^20 calls when epochs wrap (C2).
        """
        layout = self.layout
        if layout.words is not None:
            lane = layout.words
            for peer in self.others:
                self.u64(self.rank, lane.at(epoch & 1, peer), lane.box // 8)[words_in_use:] = 0
        for lane in (layout.chunk_flags, layout.stage_flags):
            if lane is None:
                continue
            for phase in range(lane.buffers):
                for peer in self.others:
                    flags = self.u32(self.rank, lane.at(phase, peer), MAX_BLOCKS)
                    mine = flag_word(epoch)
                    flags[:mine] = flags[mine + 1 :] = 0
                    if lane is not flags_in_use or phase not in phases:  # else this call's flag may be there already
                        flags[mine] = 0

    def refill(self) -> None:
        """Every lane as it was before the first call."""
        for lane in self.layout.lanes.values():
            self.u8(self.rank, lane.offset, lane.nbytes).fill(lane.fill)

    # -- waits --------------------------------------------------------------------------------------

    def wait_header(self, call: Call, epoch: int, peer: int) -> None:
        """Until a peer's header of this call is there.

        Raises:
            Faulted: it is another call's, or does not come.
        """
        self.wait(call, epoch, peer, lambda: self.header_of(peer, epoch) == (call.digest, epoch), None)

    def wait(
        self,
        call: Call,
        epoch: int,
        peer: int,
        ready: Callable[[], bool],
        seen: Callable[[], int] | None,
        *,
        is_flag: bool = True,
    ) -> None:
        """Until ``ready()``; bounded by the control block's BOUND. The peer's header is watched meanwhile.

        Args:
            seen: the flag that stands where the awaited one should be; None: the header's own.
            is_flag: False where what is seen is data: as a flag it would be of a later call in half of all epochs.

        Raises:
            Faulted: the peer makes another call, is ahead, or does not come within the bound.
        """
        start, polls = time.monotonic_ns(), 0
        napping = False
        while not ready():
            digest, flag = self.header_of(peer, epoch)
            if flag == epoch and digest != call.digest:
                raise Faulted(Fault.MISMATCH, peer, call.digest, digest, time.monotonic_ns() - start)
            polls += 1
            look = napping or polls % POLLS_A_LOOK == 0
            shown = seen() if look and seen is not None else flag  # all of a message's flags are slow to look at
            ahead = shown if is_flag else flag
            if later(ahead, epoch):
                raise Faulted(Fault.OVERRUN, peer, epoch, ahead, time.monotonic_ns() - start)
            if look:
                waited = time.monotonic_ns() - start
                if waited > int(self.bound[0]):
                    raise Faulted(Fault.TIMEOUT, peer, epoch, shown, waited)
                napping = waited > SPIN_NS
            if napping:
                time.sleep(NAP)
            else:
                os.sched_yield()

    def write_fault(self, fault: Faulted, number: int, digest: int, algorithm: int) -> None:
        """Keep the first fault; it is sticky (C7)."""
        if self.fault[0]:
            return
        words = (fault.peer, number, digest, fault.expected, fault.seen, algorithm)
        self.fault[1 : 1 + len(words)] = words
        self.waited[0] = fault.waited_ns
        self.fault[0] = int(fault.fault)
        self.fault[(FAULT_COMPLETE - FAULT) // 4] = 1
