"""The driver of one rank's ends of rings on the CPU: the same protocol as on a device, in memory that processes share.

A captured submission is one opaque node of the tape, and so is a collection; nothing runs at record time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from halma.backends.cpu.channel_memory import Faulted
from halma.backends.cpu.memory_order import memory_order, why_unordered
from halma.backends.cpu.ring_memory import RingFaulted, RingMemory
from halma.hal.backend import Stream
from halma.hal.collectives.contract import ErrorRecord, Fault
from halma.hal.collectives.ring_contract import RingItem, RingNext, RingSite, RingStaging, RingWait
from halma.hal.collectives.ring_plan import HEADER_BYTES, HEADER_WORDS, NOBODY, ring_epoch
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_launch


class CpuRings:
    """See :class:`halma.hal.collectives.ring_contract.RingDriver`.

    Raises:
        CollectiveError: nobody has written down how this machine orders stores (C13).
    """

    def __init__(self, site: RingSite) -> None:
        order = memory_order()
        if order is None:
            raise CollectiveError("no ring can be used on this machine", found=why_unordered())
        self._site, self._geometry, self._plan = site, site.plan.geometry, site.plan
        self._memory = RingMemory(site, order)
        self._headers: list[Any] = [
            np.frombuffer(board.mapping, np.uint64, offset=site.headers) for board in site.boards
        ]
        self.set_bound(site.bound_ns)

    # -- attention --------------------------------------------------------------------------------------

    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stream: Stream) -> None:
        """See the contract."""
        self._make("submit", partial(self._submit, layer, x, ids, weights), layer, [x, ids, weights], [])

    def collect(self, out: torch.Tensor, stream: Stream) -> None:
        """See the contract."""
        self._make("collect", partial(self._collect, out), -1, [], [out])

    def _make(
        self,
        name: str,
        run: Callable[[], None],
        layer: int,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        recorder = current_recorder()
        if recorder is None:
            note_launch()
            run()
            return
        # All calls write the control block, so two that nothing orders are a race on the tape (C4).
        recorder.record_node(
            "collective:rings", run, reads=reads, writes=[*writes, self._memory.control],
            parameters=(("call", name), ("layer", layer)),
        )  # fmt: skip

    def _submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        memory, depth = self._memory, self._geometry.depth
        sequence = ring_epoch(int(memory.sent[0]), depth)
        slot = sequence % depth
        memory.sent.fill(sequence)
        if memory.faulted:
            return
        self._give_room()
        try:
            with self._whole(sequence, layer):
                for ffn in range(self._geometry.ffn):
                    self._send(ffn, sequence, slot, layer, x, ids, weights)
        except Faulted as fault:
            memory.write_fault(fault, sequence, layer)

    def _give_room(self) -> None:
        """Give back the reply slots that were collected: whoever gets the item finds room for its reply."""
        memory, g = self._memory, self._geometry
        for ffn in range(g.ffn):
            for slot in range(g.depth):
                memory.credit(g.attention + ffn, memory.rank, slot)[0] = memory.taken[slot]

    def _send(
        self,
        ffn: int,
        sequence: int,
        slot: int,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        memory, g, item = self._memory, self._geometry, self._plan.item
        to = g.attention + ffn
        rows, choices = ids.shape
        first, last = g.experts[ffn : ffn + 2]
        begin, end = g.shared_part(rows, ffn)
        chosen = ids.numpy()
        local = (chosen >= first) & (chosen < last)
        goes: Any = local.any(1)
        goes[begin:end] = True
        tokens = np.flatnonzero(goes)
        place = memory.place[slot, ffn]
        place[:rows] = -1
        place[tokens] = np.arange(len(tokens))
        previous = int(memory.filled[ffn, slot])
        memory.wait_word(memory.credit(memory.rank, ffn, slot), previous, to, RingWait.CREDIT)
        memory.filled[ffn, slot] = sequence
        shared_first = int(place[begin]) if begin < end else 0
        header = (layer, len(tokens), int(local.sum()), shared_first, end - begin)
        at = (memory.rank * g.depth + slot) * (HEADER_BYTES // 8)
        for word, value in enumerate(header):
            self._headers[to][at + word] = sequence << 32 | value
        base, count = self._plan.item_slot(memory.rank, slot), len(tokens)
        picked = torch.from_numpy(tokens)
        memory.part(to, base + item.rows, x.dtype, (count, g.hidden)).copy_(x[picked])
        memory.part(to, base + item.ids, torch.int32, (count, choices)).copy_(
            torch.from_numpy(np.where(local, chosen - first, -1)[tokens])
        )
        memory.part(to, base + item.weights, weights.dtype, (count, choices)).copy_(weights[picked])
        memory.words(to, base + item.header, len(header))[:] = header
        memory.publish(to, base + item.flags, sequence)

    def _collect(self, out: torch.Tensor) -> None:
        memory, g = self._memory, self._geometry
        sequence = ring_epoch(int(memory.collected[0]), g.depth)
        slot = sequence % g.depth
        memory.collected.fill(sequence)
        rows, dtype = out.shape[0], getattr(torch, g.reply)
        total = torch.zeros((rows, g.hidden), dtype=dtype)
        try:
            if memory.faulted:
                out.fill_(float("nan"))
                return
            with self._whole(sequence, 0):
                for ffn in range(g.ffn):
                    base = self._plan.reply_slot(ffn, slot)
                    memory.wait_flags(self._plan.reply, base, sequence, g.attention + ffn, RingWait.REPLY)
                    place = torch.from_numpy(memory.place[slot, ffn, :rows].astype(np.int64))
                    there = place >= 0
                    reply = memory.part(memory.rank, base + self._plan.reply.rows, dtype, (g.max_tokens, g.hidden))
                    part = reply[place[there]]
                    total[there] = part if ffn == 0 else total[there] + part
            memory.taken[slot] = sequence
            out.copy_(total)
        except Faulted as fault:
            memory.write_fault(fault, sequence, 0)
            out.fill_(float("nan"))

    # -- FFN --------------------------------------------------------------------------------------------

    def take(self, item: RingItem, staging: RingStaging, stream: Stream) -> None:
        """See the contract."""
        note_launch()
        self._take(item, staging)

    def _take(self, item: RingItem, staging: RingStaging) -> None:
        memory, g, box = self._memory, self._geometry, self._plan.item
        base = self._plan.item_slot(item.attention, item.sequence % g.depth)
        staging.ids[item.rows :].fill_(-1)
        if memory.faulted:
            return
        try:
            with self._whole(item.sequence, item.layer):
                memory.wait_flags(box, base, item.sequence, item.attention, RingWait.ITEM)
                rank, rows = memory.rank, item.rows
                staging.rows[:rows].copy_(memory.part(rank, base + box.rows, staging.rows.dtype, (rows, g.hidden)))
                ids = memory.part(rank, base + box.ids, torch.int32, (rows, g.top_k))
                staging.ids[:rows].copy_(ids)
                weights = memory.part(rank, base + box.weights, staging.weights.dtype, (rows, g.top_k))
                staging.weights[:rows].copy_(weights.masked_fill(ids < 0, 0.0))
        except Faulted as fault:
            memory.write_fault(fault, item.sequence, item.layer)

    def reply(self, item: RingItem, out: torch.Tensor, before: int, stream: Stream) -> None:
        """See the contract."""
        note_launch()
        self._reply(item, out, before)

    def _reply(self, item: RingItem, out: torch.Tensor, before: int) -> None:
        memory, g, box = self._memory, self._geometry, self._plan.reply
        if memory.faulted:
            return
        slot, to, mine = item.sequence % g.depth, item.attention, memory.rank - g.attention
        try:
            with self._whole(item.sequence, item.layer):
                memory.wait_word(memory.credit(memory.rank, to, slot), before, to, RingWait.ROOM)
                base = self._plan.reply_slot(mine, slot)
                memory.part(to, base + box.rows, out.dtype, (item.rows, g.hidden)).copy_(out)
                memory.publish(to, base + box.flags, item.sequence)
                memory.credit(to, mine, slot)[0] = item.sequence
        except Faulted as fault:
            memory.write_fault(fault, item.sequence, item.layer)

    # -- FFN, where the device takes items by itself ------------------------------------------------------

    def take_next(self, staging: RingStaging, seen: RingNext, patience_ns: int, stream: Stream) -> None:
        """See the contract."""
        told = [one for one in (seen.layer, seen.shared, seen.index, seen.counted) if one is not None]
        self._make(
            "take_next",
            partial(self._take_next, staging, seen, patience_ns),
            -1,
            [],
            [staging.rows, staging.ids, staging.weights, *told],
        )

    def reply_next(self, out: torch.Tensor, beside: torch.Tensor | None, stream: Stream) -> None:
        """See the contract."""
        reads = [out] if beside is None else [out, beside]
        self._make("reply_next", partial(self._reply_next, out, beside), -1, reads, [out])

    def _take_next(self, staging: RingStaging, seen: RingNext, patience_ns: int) -> None:
        memory, g = self._memory, self._geometry
        found = memory.wait_any(self._whoever_came, patience_ns)
        item, before = RingItem(NOBODY, 0, 0, 0, 0, 0, 0), 0
        if found is not None:
            number = ring_epoch(int(memory.served[found]), g.depth)
            slot = number % g.depth
            at = self._plan.item_slot(found, slot) + self._plan.item.header
            item = RingItem(found, number, *memory.words(memory.rank, at, len(HEADER_WORDS)).tolist())
            before = int(memory.replied[found, slot])
            memory.served[found] = memory.replied[found, slot] = number
            memory.turn[0] = (found + 1) % g.attention
            if item.layer >= g.layers or item.rows > g.max_tokens or item.shared_first + item.shared > item.rows:
                fault = RingFaulted(Fault.MISMATCH, found, g.max_tokens, item.rows, 0, RingWait.ITEM)
                memory.write_fault(fault, number, item.layer)
                item = RingItem(NOBODY, 0, 0, 0, 0, 0, 0)
        header = (item.layer, item.rows, item.pairs, item.shared_first, item.shared)
        memory.item[:] = (item.attention, item.sequence, before, *header)
        seen.layer.fill_(item.layer)
        seen.shared.fill_(item.shared)
        if seen.index is not None:
            seen.index.copy_(torch.arange(item.shared_first, item.shared_first + seen.index.numel()))
        came = item.attention != NOBODY
        more = (1, came, came and not item.rows, item.rows, item.pairs, item.shared)
        memory.totals += np.array(more, np.uint64)
        seen.counted.copy_(torch.from_numpy(memory.totals.astype(np.int64)))
        if came:
            self._take(item, staging)
        else:
            staging.ids.fill_(-1)

    def _whoever_came(self) -> int | None:
        memory, g = self._memory, self._geometry
        for step in range(g.attention):
            found = (int(memory.turn[0]) + step) % g.attention
            number = ring_epoch(int(memory.served[found]), g.depth)
            at = self._plan.item_slot(found, number % g.depth) + self._plan.item.flags
            if int(memory.words(memory.rank, at, 1)[0]) == number:
                return found
        return None

    def _reply_next(self, out: torch.Tensor, beside: torch.Tensor | None) -> None:
        attention, number, before, *header = self._memory.item.tolist()
        if attention == NOBODY:
            return
        item = RingItem(attention, number, *header)
        if beside is not None:
            begin = item.shared_first
            out[begin : begin + item.shared].add_(beside[: item.shared])
        self._reply(item, out[: item.rows], before)

    # -- both -------------------------------------------------------------------------------------------

    def _whole(self, sequence: int, layer: int) -> _Whole:
        return _Whole(self._memory, sequence, layer)

    def error(self) -> ErrorRecord | None:
        """The sticky fault."""
        return self._memory.error()

    def set_bound(self, bound_ns: int) -> None:
        """For all waits from now on."""
        self._memory.bound[0] = bound_ns

    def close(self) -> None:
        """Let go of the memory."""
        del self._memory, self._headers, self._site


class _Whole:
    """An interrupt inside leaves a call made by half, so nobody can go on: a fault of this rank's own."""

    def __init__(self, memory: RingMemory, sequence: int, layer: int) -> None:
        self._memory, self._sequence, self._layer = memory, sequence, layer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not issubclass(kind, Faulted):
            fault = Faulted(Fault.LEFT, self._memory.rank, self._sequence, 0, 0)
            self._memory.write_fault(fault, self._sequence, self._layer)
