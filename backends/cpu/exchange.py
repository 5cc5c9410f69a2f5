"""The driver of an exchange on the CPU: ranks are processes, and what they send lands in memory that they share.

The protocol is that of a device (docs/exchange.md): choices of experts as {data, flag} words, rows with a flag behind
each, sums on their way back as words that are all ones until they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from halma.backends.cpu.channel import ENTRY, SCRUB_MASK
from halma.backends.cpu.channel_memory import FLAG_SHIFT, ChannelMemory, Faulted
from halma.backends.cpu.memory_order import memory_order, why_unordered
from halma.hal.backend import Stream
from halma.hal.collectives.contract import ErrorRecord, Fault, FlightEntry
from halma.hal.collectives.control import FAULT, FAULT_COMPLETE, next_epoch
from halma.hal.collectives.exchange_contract import NOT_HERE, ExchangeCall, ExchangeSite, Outgoing, Returning, Stage
from halma.hal.collectives.exchange_limits import PARTS
from halma.hal.collectives.exchange_rows import as_bits, empty_layout, lay_out, local_sums, owners, rank_sums, to_fp8
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_launch

ABSENT: Final = 0xFFFFFFFF
"""Of an expert's id on the way: no expert."""


class CpuExchange:
    """See :class:`halma.hal.collectives.exchange_contract.ExchangeDriver`. The calling thread does it all.

    Raises:
        CollectiveError: nobody has written down how this machine orders stores (C13).
    """

    def __init__(self, site: ExchangeSite) -> None:
        order, reason = memory_order(), why_unordered()
        if order is None:
            raise CollectiveError("no exchange can be used on this machine", found=reason)
        geometry = site.geometry
        self._geometry, self._places = geometry, geometry.places
        self._memory = ChannelMemory(site.channel, order)
        self._first_epoch = site.channel.first_epoch
        self._entries: Any = site.channel.recorder.numpy().view(ENTRY)
        self._starts = [geometry.first(rank) for rank in range(geometry.ranks + 1)]
        self._carrier, self._acc = (getattr(torch, name) for name in (geometry.given, geometry.accumulator))
        self._back_word: Any = np.uint64 if self._carrier.itemsize == 8 else np.uint32
        self._rows, self._scales = site.rows, site.scales
        self._memory.cells.fill(self._first_epoch)
        self.set_bound(site.channel.bound_ns)

    # -- calls --------------------------------------------------------------------------------------

    def dispatch(self, call: ExchangeCall, operands: Outgoing, stream: Stream) -> None:
        """Record the call where the thread records, else make it now."""
        # What stands in the landing area is what experts read: whoever reads it depends on this node.
        writes = [self._rows, *([] if self._scales is None else [self._scales])]
        if operands.ids is None or operands.weights is None:
            reads = [operands.x, *operands.layout.tensors()]
            return self._make(call, partial(self._dispatch_kept, call, operands), lambda: None, reads, writes)
        ids, weights = operands.ids, operands.weights
        work = partial(self._dispatch, call, operands, ids, weights)
        writes += operands.layout.tensors()
        self._make(call, work, lambda: empty_layout(operands.layout), [operands.x, ids, weights], writes)

    def combine(self, call: ExchangeCall, operands: Returning, stream: Stream) -> None:
        """As :meth:`dispatch`."""
        layout = operands.layout
        reads = [operands.parts, layout.slots, layout.tokens, layout.sources]
        poison = lambda: operands.out.fill_(float("nan"))  # noqa: E731
        self._make(call, partial(self._combine, call, operands), poison, reads, [operands.out])

    def _make(
        self,
        call: ExchangeCall,
        work: Callable[[int], None],
        poison: Callable[[], Any],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        run = partial(self._run, call, work, poison)
        recorder = current_recorder()
        if recorder is None:
            note_launch()
            run()
            return
        # All calls write the control block, so two that nothing orders are a race on the tape (C4).
        recorder.record_node(
            f"collective:{self._memory.layout.name}",
            run,
            reads=reads,
            writes=[*writes, self._memory.control],
            parameters=(("call", call.describe()), ("digest", call.digest)),
        )

    def _run(self, call: ExchangeCall, work: Callable[[int], None], poison: Callable[[], Any]) -> None:
        memory = self._memory
        epoch = next_epoch(int(memory.cells[0]))
        number = (epoch - self._first_epoch) & 0xFFFFFFFF
        self._note(number, call)
        self._stage = 0
        if memory.fault[0]:
            poison()
        else:
            try:
                with torch.no_grad():
                    work(epoch)
            except Faulted as fault:
                memory.write_fault(fault, number, call.digest, self._stage)
                poison()
            except BaseException:  # an interrupt, say: peers may have this call's data or not, so nobody can go on
                memory.write_fault(Faulted(Fault.LEFT, memory.rank, epoch, 0, 0), number, call.digest, self._stage)
                memory.cells.fill(epoch)
                raise
        memory.cells.fill(epoch)

    # -- dispatch -----------------------------------------------------------------------------------

    def _dispatch(
        self, call: ExchangeCall, operands: Outgoing, own_ids: torch.Tensor, own_weights: torch.Tensor, epoch: int
    ) -> None:
        memory, geometry = self._memory, self._geometry
        tokens, layout = operands.x.shape[0], operands.layout
        here = owners(own_ids, self._starts)
        layout.sources[:tokens].copy_(as_bits(here))
        pairs = self._pairs(own_ids, own_weights, epoch)
        for peer in memory.others:
            box = memory.u64(peer, self._places.choices.at(memory.rank), pairs.size)
            np.bitwise_or(pairs, np.uint64(0), out=box)
        self._send_headers(call, epoch, tokens)
        self._send_rows(operands.x, here, epoch)
        ids, weights, rows = [], [], []
        counts = [self._tokens_of(call, epoch, sender, tokens) for sender in range(geometry.ranks)]
        for sender, count in enumerate(counts):
            found = (own_ids, own_weights)
            if sender != memory.rank:
                found = self._await_choices(call, epoch, sender, count)
                self._await_rows(call, epoch, sender, owners(found[0], self._starts)[:, memory.rank])
            ids.append(found[0])
            weights.append(found[1])
            rows.append(torch.arange(count) + sender * geometry.max_tokens)
        memory.fence()
        self._scrub(epoch)
        first = self._starts[memory.rank]
        lay_out(
            torch.cat(ids), torch.cat(weights), torch.cat(rows),
            first, self._starts[memory.rank + 1] - first, geometry.alignment, layout,
        )  # fmt: skip
        layout.tokens.copy_(torch.tensor(counts, dtype=torch.int32))

    def _dispatch_kept(self, call: ExchangeCall, operands: Outgoing, epoch: int) -> None:
        """Rows alone, to where the layout says; headers say how many tokens, which must be the layout's."""
        memory, geometry, layout = self._memory, self._geometry, operands.layout
        tokens, kept = operands.x.shape[0], layout.tokens.tolist()
        self._send_headers(call, epoch, tokens)
        bits = torch.arange(geometry.ranks, dtype=torch.int32)
        here = (torch.bitwise_right_shift(layout.sources[:tokens].unsqueeze(1), bits) & 1).bool()
        self._send_rows(operands.x, here, epoch)
        for sender in memory.others:
            count = self._tokens_of(call, epoch, sender, tokens)
            if count != kept[sender]:
                raise Faulted(Fault.MISMATCH, sender, kept[sender], count, 0)
            slots = layout.slots[sender * geometry.max_tokens :][:count]
            self._await_rows(call, epoch, sender, (slots >= 0).any(1))
        memory.fence()
        self._scrub(epoch)

    def _pairs(self, own_ids: torch.Tensor, own_weights: torch.Tensor, epoch: int) -> Any:
        """u64 [M x k x (1 + weight words)]: every word beside its flag."""
        ids = own_ids.reshape(-1, 1)
        inside = (ids >= 0) & (ids < self._geometry.experts)
        words = torch.where(inside, ids, ABSENT).numpy().astype(np.uint32)
        weights = own_weights.contiguous().view(-1, 1).numpy().view(np.uint32)
        return np.concatenate([words, weights], 1).reshape(-1).astype(np.uint64) | np.uint64(epoch) << FLAG_SHIFT

    def _send_headers(self, call: ExchangeCall, epoch: int, tokens: int) -> None:
        """{digest, epoch, tokens, epoch} to every peer: a count word for every pair of ranks, zero included."""
        memory = self._memory
        memory.fence()
        for peer in memory.others:
            header = memory.u64(peer, memory.layout.headers.at(epoch & 1, memory.rank), 2)
            header[1] = epoch << 32 | tokens
            memory.fence()
            header[0] = epoch << 32 | call.digest

    def _send_rows(self, x: torch.Tensor, here: torch.Tensor, epoch: int) -> None:
        """A token's row once to each rank that has one of its experts, and a flag behind it; this rank's own stay."""
        memory, geometry, places = self._memory, self._geometry, self._places
        scales = None
        if geometry.payload == "fp8":
            x, scales = to_fp8(x)
        data: Any = x.contiguous().view(torch.uint8).numpy().reshape(x.shape[0], geometry.row_bytes)
        for rank in range(geometry.ranks):
            chosen = here[:, rank].nonzero().flatten().tolist()
            box = memory.u8(rank, places.rows.at(memory.rank), places.rows.stride).reshape(-1, geometry.row_bytes)
            box[chosen] = data[chosen]
            if scales is not None:
                count = geometry.max_tokens * geometry.groups
                box = memory.u32(rank, places.scales.at(memory.rank), count).reshape(-1, geometry.groups)
                box[chosen] = scales.numpy().view(np.uint32)[chosen]
            if rank != memory.rank:
                memory.fence()
                self._flags(rank, memory.rank)[chosen] = epoch

    def _flags(self, rank: int, sender: int) -> Any:
        """u32 [max_tokens]: the flags of a sender's rows in a rank's memory; a row has one part here."""
        count = self._geometry.max_tokens * PARTS
        return self._memory.u32(rank, self._places.flags.at(sender), count).reshape(-1, PARTS)[:, 0]

    def _tokens_of(self, call: ExchangeCall, epoch: int, sender: int, own: int) -> int:
        """How many tokens a rank sends, once its header is here."""
        memory = self._memory
        if sender == memory.rank:
            return own
        self._stage = 0
        memory.wait_header(call, epoch, sender)  # pyright: ignore[reportArgumentType]
        memory.fence()
        word = int(memory.u64(memory.rank, memory.layout.headers.at(epoch & 1, sender), 2)[1])
        return word & 0xFFFFFFFF

    def _await_choices(
        self, call: ExchangeCall, epoch: int, sender: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory, geometry = self._memory, self._geometry
        words = geometry.choice_bytes // 8
        box = memory.u64(memory.rank, self._places.choices.at(sender), tokens * geometry.top_k * words)
        pairs = np.empty_like(box)

        def ready() -> bool:
            np.bitwise_or(box, np.uint64(0), out=pairs)
            return bool(((pairs >> FLAG_SHIFT) == epoch).all())

        def seen() -> int:
            flags = box >> FLAG_SHIFT
            wrong = flags[flags != epoch]
            return int(wrong[0]) if wrong.size else epoch

        self._wait(call, epoch, sender, Stage.CHOICES, ready, seen)
        data = pairs.astype(np.uint32).reshape(-1, words)
        ids = data[:, 0].astype(np.int64)
        ids[ids == ABSENT] = -1
        weights = np.ascontiguousarray(data[:, 1:]).view(np.float32 if words == 2 else np.float64)
        shape = (tokens, geometry.top_k)
        return torch.from_numpy(ids).view(shape), torch.from_numpy(weights.reshape(shape))

    def _await_rows(self, call: ExchangeCall, epoch: int, sender: int, wanted: torch.Tensor) -> None:
        needed = wanted.nonzero().flatten().numpy()
        flags = self._flags(self._memory.rank, sender)

        def seen() -> int:
            found = flags[needed]
            wrong = found[found != epoch]
            return int(wrong[0]) if wrong.size else epoch

        self._wait(call, epoch, sender, Stage.ROWS, lambda: bool((flags[needed] == epoch).all()), seen)

    # -- combine ------------------------------------------------------------------------------------

    def _combine(self, call: ExchangeCall, operands: Returning, epoch: int) -> None:
        memory, geometry, layout = self._memory, self._geometry, operands.layout
        counts = layout.tokens.tolist()
        boxes = [layout.slots[rank * geometry.max_tokens :][:count] for rank, count in enumerate(counts)]
        memory.send_headers(call.digest, epoch)
        own = counts[memory.rank]
        back = torch.zeros((geometry.ranks, own, geometry.hidden), dtype=self._carrier)
        for rank, slots in enumerate(boxes):
            sums = local_sums(operands.parts, slots, self._acc, self._carrier)
            if rank == memory.rank:
                back[rank] = sums
            else:
                self._send_sums(rank, sums, (slots >= 0).any(1))
        sources = layout.sources[:own]
        for peer in memory.others:
            back[peer] = self._await_sums(call, epoch, peer, (sources >> peer & 1).bool())
        self._stage = 0
        for peer in memory.others:
            memory.wait_header(call, epoch, peer)  # pyright: ignore[reportArgumentType]
        rank_sums(back, sources, operands.out[:own], self._acc)

    def _back(self, rank: int, sender: int) -> Any:
        """Words [max_tokens, words of a row] that a sender's sums come to in a rank's memory."""
        geometry, width = self._geometry, np.dtype(self._back_word).itemsize
        raw = self._memory.u8(rank, self._places.back.at(sender), geometry.max_tokens * geometry.back_bytes)
        return raw.view(self._back_word).reshape(geometry.max_tokens, geometry.back_bytes // width)

    def _send_sums(self, peer: int, sums: torch.Tensor, chosen: torch.Tensor) -> None:
        box = self._back(peer, self._memory.rank)
        ones = self._back_word(-1 & (1 << 8 * box.itemsize) - 1)
        words: Any = sums.view(torch.uint8).numpy().view(self._back_word)
        words = np.where(words == ones, ones - self._back_word(1), words)  # another NaN than "not there"
        for token in chosen.nonzero().flatten().tolist():
            # an arithmetic loop stores whole elements; a byte copy need not
            np.bitwise_or(words[token], self._back_word(0), out=box[token])

    def _await_sums(self, call: ExchangeCall, epoch: int, peer: int, sent: torch.Tensor) -> torch.Tensor:
        geometry, box = self._geometry, self._back(self._memory.rank, peer)
        needed = sent.nonzero().flatten().numpy()
        ones = self._back_word(-1 & (1 << 8 * box.itemsize) - 1)
        self._wait(call, epoch, peer, Stage.BACK, lambda: bool((box[needed] != ones).all()), lambda: NOT_HERE)
        found = torch.zeros((sent.shape[0], geometry.hidden), dtype=self._carrier)
        words = np.ascontiguousarray(box[needed])
        found[torch.from_numpy(needed)] = torch.from_numpy(words.view(np.uint8)).view(self._carrier)
        box[needed] = ones  # emptied by its reader; the sender comes back behind this rank's next dispatch
        return found

    def _wait(
        self,
        call: ExchangeCall,
        epoch: int,
        peer: int,
        stage: Stage,
        ready: Callable[[], bool],
        seen: Callable[[], int],
    ) -> None:
        self._stage = int(stage)
        flag = stage is not Stage.BACK  # which has none: what is seen is data
        self._memory.wait(call, epoch, peer, ready, seen, is_flag=flag)  # pyright: ignore[reportArgumentType]

    # -- staleness, records -------------------------------------------------------------------------

    def _scrub(self, epoch: int) -> None:
        """Zero old flags once all of this call is here: nobody stores here again before this rank's next header."""
        if epoch & SCRUB_MASK not in (0, 1):
            return
        memory, geometry = self._memory, self._geometry
        for peer in memory.others:
            words = memory.u64(memory.rank, self._places.choices.at(peer), self._places.choices.stride // 8)
            words[(words >> FLAG_SHIFT) != epoch] = 0
            flags = memory.u32(memory.rank, self._places.flags.at(peer), geometry.max_tokens * PARTS)
            flags[flags != epoch] = 0

    def _note(self, number: int, call: ExchangeCall) -> None:
        entry = self._entries[number % len(self._entries)]
        entry["call"] = 0  # nothing half-written is read as an entry
        entry["digest"], entry["time"], entry["nbytes"] = call.digest, time.monotonic_ns(), 0
        entry["kind"], entry["algorithm"], entry["zero"] = int(call.kind), 0, 0
        entry["call"] = number

    def error(self) -> ErrorRecord | None:
        """The sticky fault."""
        words, complete = self._memory.fault, (FAULT_COMPLETE - FAULT) // 4
        if not words[0] or not words[complete]:
            return None
        fault, peer, call, digest, expected, seen, stage = (int(word) for word in words[:7])
        return ErrorRecord(Fault(fault), peer, call, digest, expected, seen, stage, int(self._memory.waited[0]))

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first."""
        names = ("call", "digest", "time", "nbytes", "kind", "algorithm")
        entries = [FlightEntry(*(int(one[name]) for name in names)) for one in self._entries.copy() if one["call"]]
        return sorted(entries, key=lambda entry: entry.time_ns)

    def set_bound(self, bound_ns: int) -> None:
        """For all waits from now on, of captured calls too."""
        self._memory.bound[0] = bound_ns

    def epoch(self) -> int:
        """The exchange's epoch."""
        return int(self._memory.cells[0])

    def rearm(self, epoch: int) -> None:
        """Forget the fault, make every region as before the first call, continue from ``epoch``."""
        memory = self._memory
        memory.refill()
        for region in self._places.regions.values():
            memory.u8(memory.rank, region.offset, region.nbytes).fill(region.fill)
        memory.fault.fill(0)
        memory.waited.fill(0)
        memory.cells.fill(epoch)

    def close(self) -> None:
        """Let go of the memory."""
        del self._memory
