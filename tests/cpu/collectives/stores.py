"""Programs for two processes that try to see a store in part, or a flag before its data."""

from __future__ import annotations

import time

import numpy as np
import torch.distributed as distributed

from halma.backends.cpu.memory import CpuMemory
from halma.backends.cpu.memory_order import memory_order
from halma.hal.collectives.ranks import DistributedRanks

WORDS = 64
STOP = 0xFFFF


def torn_words(seconds: float, whole: bool) -> int:
    """Rank 0 stores pairs of equal halves over and over; how many unequal ones rank 1 sees.

    Args:
        whole: as the channel stores them; else one half after the other.
    """
    ranks = DistributedRanks(distributed.group.WORLD)
    memory, own, shared = _shared(ranks, 8 * WORDS)
    box, halves = shared.view(np.uint64), shared.view(np.uint32)
    seen, end = 0, time.monotonic() + seconds
    value = 0
    while time.monotonic() < end:
        for _ in range(50):
            if ranks.rank == 0:
                value = (value + 1) & 0xFFFFFFFF
                if whole:
                    pairs = np.full(WORDS, value << 32 | value, dtype=np.uint64)
                    np.bitwise_or(pairs, np.uint64(0), out=box)
                else:
                    halves[0::2] = value
                    halves[1::2] = value
            else:
                pairs = np.bitwise_or(box, np.uint64(0))
                seen += int((pairs >> np.uint64(32) != pairs & np.uint64(0xFFFFFFFF)).sum())
    return _closed(ranks, memory, own, seen)


def early_flags(turns: int, ordered: bool) -> int:
    """Rank 0 stores data and then its flag, rank 1 reads them the other way round; how often the data was older.

    Args:
        ordered: as the channel does it, with the table's fence; else the flag goes first.
    """
    ranks = DistributedRanks(distributed.group.WORLD)
    order = memory_order()
    assert order is not None
    memory, own, shared = _shared(ranks, 8 * (WORDS + 16))
    words = shared.view(np.uint64)
    data, flag, answer = words[:WORDS], words[WORDS : WORDS + 1], words[WORDS + 8 : WORDS + 9]
    early = 0
    for turn in range(1, turns + 1):
        if ranks.rank == 0:
            if ordered:
                data[:] = turn
                order.fence()
                flag[0] = turn
            else:
                flag[0] = turn
                _until(lambda turn=turn: answer[0] == turn)  # the reader is let in between
                data[:] = turn
            _until(lambda turn=turn: answer[0] == turn)
        else:
            _until(lambda turn=turn: flag[0] == turn)
            order.fence()
            early += bool((data != turn).any())
            answer[0] = turn
    return _closed(ranks, memory, own, early)


def _until(ready) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, "the other rank does not come"
        time.sleep(0)


def _shared(ranks: DistributedRanks, nbytes: int):
    memory = CpuMemory()
    own, handle = memory.exportable(nbytes)
    theirs = memory.open(ranks.exchange("handles", handle)[0])
    return theirs, own, theirs.tensor.numpy()


def _closed(ranks: DistributedRanks, theirs, own, found: int) -> int:
    ranks.exchange("done", None)
    theirs.close()
    own.close()
    return found
