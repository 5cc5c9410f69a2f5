"""The memory of one rank's ends of rings as arrays, and the waits on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from halma.backends.cpu.channel_memory import NAP, POLLS_A_LOOK, SPIN_NS, Faulted
from halma.backends.cpu.memory_order import MemoryOrder
from halma.hal.collectives import control
from halma.hal.collectives.contract import ErrorRecord, Fault
from halma.hal.collectives.ring_contract import RingSite, RingWait
from halma.hal.collectives.ring_plan import FLAGS, HEADER_WORDS, SPLITS, TOTALS, Box, ServingWords, StateWords

COMPLETE: Final = (control.FAULT_COMPLETE - control.FAULT) // 4


class RingMemory:
    """This rank's words, and slots at both ends. Views are made once: a slot does not move."""

    def __init__(self, site: RingSite, order: MemoryOrder) -> None:
        self.plan, self.geometry, self.fence = site.plan, site.plan.geometry, order.fence
        self.rank = site.rank
        self.raw: list[Any] = [peer.tensor.numpy() for peer in site.peers]
        self.tensors = [peer.tensor for peer in site.peers]
        self.control = site.own.tensor[: control.CONTROL_BYTES]
        block: Any = self.control.numpy()
        self.bound: Any = block[control.BOUND : control.BOUND + 8].view(np.uint64)
        self.fault: Any = block[control.FAULT : control.FAULT_WAITED].view(np.uint32)
        self.waited: Any = block[control.FAULT_WAITED : control.FAULT_WAITED + 8].view(np.uint64)
        g, words = self.geometry, StateWords.of(self.geometry)
        self.sent = self._state(words.sent, (g.ffn,))
        self.collected = self._state(words.collected, (SPLITS,))
        self.filled = self._state(words.filled, (g.ffn, g.depth))
        self.taken = self._state(words.taken, (g.depth,))
        self.place = self._state(words.place, (g.depth, g.ffn, g.max_tokens)).view(np.int32)
        # An FFN rank's, in the same place.
        own = ServingWords.of(self.geometry)
        self.served = self._state(own.served, (g.attention,))
        self.replied = self._state(own.replied, (g.attention, g.depth))
        self.turn = self._state(own.turn, (1,))
        self.item = self._state(own.item, (3 + len(HEADER_WORDS),))
        self.totals = self._state(own.totals, (2 * TOTALS,)).view(np.uint64)

    def _state(self, offset: int, shape: tuple[int, ...]) -> Any:
        at, count = self.plan.state + offset, int(np.prod(shape))
        return self.raw[self.rank][at : at + 4 * count].view(np.uint32).reshape(shape)

    def words(self, rank: int, offset: int, count: int) -> Any:
        """uint32 [count] of a rank's memory."""
        return self.raw[rank][offset : offset + 4 * count].view(np.uint32)

    def credit(self, rank: int, peer: int, slot: int) -> Any:
        """uint32 [1] at the sender ``rank``: what the receiver ``peer`` gave back of a slot."""
        return self.words(rank, self.plan.credit(peer, slot), 1)

    def part(self, rank: int, slot: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of a slot at byte ``slot`` of a rank's memory."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.tensors[rank][slot : slot + nbytes].view(dtype).view(shape)

    # -- flags ------------------------------------------------------------------------------------------

    def publish(self, rank: int, at: int, sequence: int) -> None:
        """Tell a receiver that the rows of its slot at ``at`` are there."""
        self.fence()
        self.words(rank, at, FLAGS).fill(sequence)

    def wait_flags(self, box: Box, at: int, sequence: int, peer: int, what: RingWait) -> None:
        """Until every part of this rank's slot at ``at`` is there.

        Raises:
            Faulted: it does not come within the bound.
        """
        flags = self.words(self.rank, at + box.flags, FLAGS)
        self.wait(lambda: bool((flags == sequence).all()), lambda: int(flags.min()), sequence, peer, what)
        self.fence()

    def wait_word(self, word: Any, expected: int, peer: int, what: RingWait) -> None:
        """Until a word is ``expected``. Raises Faulted as :meth:`wait_flags`."""
        self.wait(lambda: int(word[0]) == expected, lambda: int(word[0]), expected, peer, what)
        self.fence()

    def wait_any(self, look: Callable[[], int | None], patience_ns: int) -> int | None:
        """What ``look()`` finds within ``patience_ns``, which is no fault; None after that, or after a fault."""
        start = time.monotonic_ns()
        while (found := look()) is None and not self.faulted:
            waited = time.monotonic_ns() - start
            if waited > patience_ns:
                return None
            if waited > SPIN_NS:
                time.sleep(NAP)
            else:
                os.sched_yield()
        self.fence()
        return found

    def wait(
        self, ready: Callable[[], bool], seen: Callable[[], int], expected: int, peer: int, what: RingWait
    ) -> None:
        """Until ``ready()``, bounded by the control block's BOUND.

        Raises:
            Faulted: ``peer``, a rank of the group, does not come.
        """
        start, polls, napping = time.monotonic_ns(), 0, False
        while not ready():
            polls += 1
            if napping or polls % POLLS_A_LOOK == 0:
                waited = time.monotonic_ns() - start
                if waited > int(self.bound[0]):
                    raise RingFaulted(Fault.TIMEOUT, peer, expected, seen(), waited, what)
                napping = waited > SPIN_NS
            if napping:
                time.sleep(NAP)
            else:
                os.sched_yield()

    # -- faults -----------------------------------------------------------------------------------------

    @property
    def faulted(self) -> bool:
        """Whether there is a fault."""
        return bool(self.fault[0])

    def write_fault(self, fault: Faulted, sequence: int, layer: int) -> None:
        """Keep the first fault; it is sticky (C7)."""
        if self.fault[0]:
            return
        what = fault.what if isinstance(fault, RingFaulted) else 0
        words = (fault.peer, sequence, layer, fault.expected, fault.seen, int(what))
        self.fault[1 : 1 + len(words)] = words
        self.waited[0] = fault.waited_ns
        self.fault[0] = int(fault.fault)
        self.fault[COMPLETE] = 1

    def error(self) -> ErrorRecord | None:
        """The fault, once its record is written."""
        words = self.fault
        if not words[0] or not words[COMPLETE]:
            return None
        fault, peer, call, digest, expected, seen, what = (int(word) for word in words[:7])
        return ErrorRecord(Fault(fault), peer, call, digest, expected, seen, what, int(self.waited[0]))


class RingFaulted(Faulted):
    """A wait on a ring ended in a fault."""

    def __init__(self, fault: Fault, peer: int, expected: int, seen: int, waited_ns: int, what: RingWait) -> None:
        super().__init__(fault, peer, expected, seen, waited_ns)
        self.what = what
