"""How a call's data travels on the CPU: the six ways of a channel, over numpy arrays.

A way takes a :class:`Turn` and gives the bytes of its result: of a sum the sum, else every sender's message by rank.
The result is complete only once the headers are there, which the driver waits for; nothing is written to a tensor
before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from halma.backends.cpu.channel_memory import ALL_ONES, FLAG_SHIFT, ChannelMemory
from halma.backends.cpu.sums import added_up, words_of
from halma.hal.arena.layout import Lane
from halma.hal.collectives.choice import REDUCTIONS, shard
from halma.hal.collectives.contract import Algorithm, Box, Call, Kind, Wire

NOT_ALL_ONES: Final = np.uint32(0xFFFFFFFE)
"""Another NaN, as float32 and as two 16-bit floats, than the one that stands for "not there"."""


@dataclass
class Turn:
    """One call while it runs. ``data`` is this rank's message as uint8 [nbytes]."""

    memory: ChannelMemory
    call: Call
    epoch: int
    data: Any
    dtype: torch.dtype
    box: Box | None = None

    @property
    def senders(self) -> list[int]:
        """Ranks that send data."""
        return [self.call.root] if self.call.kind is Kind.BROADCAST else list(range(self.memory.size))

    @property
    def sends(self) -> bool:
        """Whether this rank does."""
        return self.memory.rank in self.senders

    def lane(self, lane: Lane | None) -> Lane:
        """A lane that the choice promised."""
        assert lane is not None
        return lane

    def summed(self, parts: dict[int, Any]) -> dict[int, Any]:
        """``parts``, or their sum under this rank's number where the call adds up."""
        if self.call.kind not in REDUCTIONS:
            return parts
        return {self.memory.rank: added_up([parts[rank] for rank in sorted(parts)], self.dtype)}


def words(turn: Turn) -> dict[int, Any]:
    """Push of {data, flag} pairs: a word is there when its flag is this call's."""
    memory, epoch, call = turn.memory, turn.epoch, turn.call
    lane = turn.lane(memory.layout.words)
    count = -(-call.nbytes // 4)
    flag = np.uint64(epoch) << FLAG_SHIFT
    parts: dict[int, Any] = {}
    if turn.sends:
        parts[memory.rank] = turn.data
        pairs = words_of(turn.data).astype(np.uint64) | flag
        for peer in memory.others:
            # an arithmetic loop stores whole elements; a byte copy need not
            np.bitwise_or(pairs, np.uint64(0), out=memory.u64(peer, lane.at(epoch & 1, memory.rank), count))
    for peer in turn.senders:
        if peer == memory.rank:
            continue
        box = memory.u64(memory.rank, lane.at(epoch & 1, peer), count)
        pairs = np.empty(count, dtype=np.uint64)

        def ready(box: Any = box, pairs: Any = pairs) -> bool:
            if box[-1] >> FLAG_SHIFT != epoch:  # cheap, and the last to come more often than not
                return False
            np.bitwise_or(box, np.uint64(0), out=pairs)
            return bool(((pairs >> FLAG_SHIFT) == epoch).all())

        def seen(box: Any = box) -> int:
            flags = box >> FLAG_SHIFT
            wrong = flags[flags != epoch]
            return int(wrong[0]) if wrong.size else epoch

        memory.wait(call, epoch, peer, ready, seen)
        parts[peer] = pairs.astype(np.uint32).view(np.uint8)[: call.nbytes]  # the data is the low half
    return turn.summed(parts)


def sentinel(turn: Turn) -> dict[int, Any]:
    """Push of plain words: one is there when it is no longer all ones. Each is made so again once it is read (C9)."""
    memory, epoch, call = turn.memory, turn.epoch, turn.call
    lane = turn.lane(memory.layout.sentinel)
    count = -(-call.nbytes // 4)
    parts: dict[int, Any] = {}
    if turn.sends:
        message = words_of(turn.data)
        message = np.where(message == ALL_ONES, NOT_ALL_ONES, message)
        parts[memory.rank] = message.view(np.uint8)[: call.nbytes]  # as the peers see it: the same bits everywhere
        for peer in memory.others:
            np.bitwise_or(message, np.uint32(0), out=memory.u32(peer, lane.at(epoch & 1, memory.rank), count))
    for peer in turn.senders:
        if peer == memory.rank:
            continue
        box = memory.u32(memory.rank, lane.at(epoch & 1, peer), count)

        def ready(box: Any = box) -> bool:
            return bool(box[-1] != ALL_ONES and (box != ALL_ONES).all())

        memory.wait(call, epoch, peer, ready, lambda: 0)
        parts[peer] = box.copy().view(np.uint8)[: call.nbytes]
        box.fill(ALL_ONES)
    return turn.summed(parts)


def chunks(turn: Turn) -> dict[int, Any]:
    """Two-shot push: parts to their owners, sums to everybody; a flag behind each."""
    memory, epoch, call = turn.memory, turn.epoch, turn.call
    layout, me = memory.layout, memory.rank
    scatter, gather, flags = (turn.lane(one) for one in (layout.scatter, layout.gather, layout.chunk_flags))
    cuts = [shard(call.nbytes, memory.size, rank) for rank in range(memory.size)]
    start, end = cuts[me]
    for peer in memory.others:
        theirs = turn.data[slice(*cuts[peer])]
        memory.u8(peer, scatter.at(0, me), theirs.nbytes)[:] = theirs
    memory.send_flags(flags, 0, epoch)
    _await_flags(turn, flags, 0, memory.others)
    boxes = {peer: memory.u8(me, scatter.at(0, peer), end - start) for peer in memory.others}
    boxes[me] = turn.data[start:end]
    mine = added_up([boxes[rank] for rank in sorted(boxes)], turn.dtype)
    for peer in memory.others:
        memory.u8(peer, gather.at(0, me), mine.nbytes)[:] = mine
    memory.send_flags(flags, 1, epoch)
    _await_flags(turn, flags, 1, memory.others)
    sums = {peer: memory.u8(me, gather.at(0, peer), cuts[peer][1] - cuts[peer][0]) for peer in memory.others}
    sums[me] = mine
    return {me: np.concatenate([sums[rank] for rank in sorted(sums)])}


def moved_in_chunks(turn: Turn) -> dict[int, Any]:
    """One push of plain bytes, and a flag behind it, into the boxes that a two-shot's sums come to.

    They have one buffer: nobody sends before every rank has begun the call, and so has read those of the last.
    """
    memory, call, me = turn.memory, turn.call, turn.memory.rank
    gather, flags = turn.lane(memory.layout.gather), turn.lane(memory.layout.chunk_flags)
    parts: dict[int, Any] = {}
    if turn.sends:
        for peer in memory.others:
            memory.wait_header(call, turn.epoch, peer)
        parts[me] = turn.data
        for peer in memory.others:
            memory.u8(peer, gather.at(0, me), call.nbytes)[:] = turn.data
        memory.send_flags(flags, 1, turn.epoch)
    peers = [rank for rank in turn.senders if rank != me]
    _await_flags(turn, flags, 1, peers)
    return parts | {peer: memory.u8(me, gather.at(0, peer), call.nbytes) for peer in peers}


def staged(turn: Turn) -> dict[int, Any]:
    """Each sender puts its message into its own memory; the others pull it behind a flag."""
    memory, call = turn.memory, turn.call
    flags = turn.lane(memory.layout.stage_flags)
    place = _place(turn)
    parts: dict[int, Any] = {}
    if turn.sends:
        parts[memory.rank] = turn.data
        memory.u8(memory.rank, place, call.nbytes)[:] = turn.data
        memory.send_flags(flags, 0, turn.epoch)
    peers = [rank for rank in turn.senders if rank != memory.rank]
    _await_flags(turn, flags, 0, peers)
    for peer in peers:
        parts[peer] = memory.u8(peer, place, call.nbytes).copy()
    return turn.summed(parts)


def staged_two_shot(turn: Turn) -> dict[int, Any]:
    """As :func:`staged`, but each rank pulls and adds up its own part, and pulls the others' sums."""
    memory, epoch, call, me = turn.memory, turn.epoch, turn.call, turn.memory.rank
    flags, sums = turn.lane(memory.layout.stage_flags), turn.lane(memory.layout.stage_sum)
    place = _place(turn)
    cuts = [shard(call.nbytes, memory.size, rank) for rank in range(memory.size)]
    start, end = cuts[me]
    memory.u8(me, place, call.nbytes)[:] = turn.data
    memory.send_flags(flags, 0, epoch)
    _await_flags(turn, flags, 0, memory.others)
    parts = {peer: memory.u8(peer, place + start, end - start) for peer in memory.others}
    parts[me] = turn.data[start:end]
    mine = added_up([parts[rank] for rank in sorted(parts)], turn.dtype)
    memory.u8(me, sums.at(epoch & 1, 0), mine.nbytes)[:] = mine
    memory.send_flags(flags, 1, epoch)
    _await_flags(turn, flags, 1, memory.others)
    pulled = {peer: memory.u8(peer, sums.at(epoch & 1, 0), cuts[peer][1] - cuts[peer][0]) for peer in memory.others}
    pulled[me] = mine
    return {me: np.concatenate([pulled[rank] for rank in sorted(pulled)])}


def _place(turn: Turn) -> int:
    """Where messages are staged in every rank's arena: the call's own slot, else the channel's buffer."""
    half = turn.epoch & 1
    if turn.box is not None:
        return turn.box.offset + half * turn.box.stride
    return turn.lane(turn.memory.layout.staging).at(half, 0)


def _await_flags(turn: Turn, lane: Lane, phase: int, peers: list[int]) -> None:
    memory, epoch = turn.memory, turn.epoch
    for peer in peers:

        def seen(peer: int = peer) -> int:
            return memory.flag_of(lane, phase, peer, epoch)

        memory.wait(turn.call, epoch, peer, lambda seen=seen: seen() == epoch, seen)
    memory.fence()


WAYS: Final[dict[tuple[Algorithm, Wire], Callable[[Turn], dict[int, Any]]]] = {
    (Algorithm.ONE_SHOT, Wire.WORDS): words,
    (Algorithm.ONE_SHOT, Wire.SENTINEL): sentinel,
    (Algorithm.TWO_SHOT, Wire.CHUNKS): chunks,
    (Algorithm.ONE_SHOT, Wire.CHUNKS): moved_in_chunks,
    (Algorithm.STAGED, Wire.FLAGS): staged,
    (Algorithm.STAGED_TWO_SHOT, Wire.FLAGS): staged_two_shot,
}
