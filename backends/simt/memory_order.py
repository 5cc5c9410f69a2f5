"""Every choice of memory order, in one table per backend (C13). Kernels name the *use*; this table names the primitive.

A use is a macro ``HALMA_ORDER_...``; :func:`defines` gives it to the compiler, so that nothing else can choose.
Primitives are functions of ``kernels/dialect.h`` and ``kernels/dialect_musa.h``. *Relaxed* is single-copy atomic an
element at system scope and, on CUDA, bypasses the first-level cache; what orders it is said in ``why``. On MUSA nothing
says that: there a word that is polled is *fresh* (behind an invalidation, or by an atomic), and one that somebody polls
is *sent*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CUDA: Final = "cuda"
MUSA: Final = "musa"


@dataclass(frozen=True)
class Order:
    """One use of memory that a peer, or another kernel, sees.

    Attributes:
        use: the macro behind ``HALMA_ORDER_``.
        cuda, musa: the primitive; None where the spelling is not known, and units that need it do not compile.
        why: what makes this enough.
        test: the stress test that would fail if it were not.
    """

    use: str
    cuda: str
    musa: str | None
    why: str
    test: str


_STRESS = "tests/gpu/collectives/test_stress.py"
_WORDS = f"{_STRESS}::test_words"
_SENTINEL = f"{_STRESS}::test_sentinel"
_CHUNKS = f"{_STRESS}::test_chunks"
_STAGED = f"{_STRESS}::test_staged"
_EXCHANGE = "tests/gpu/exchange/test_exchange.py::test_replays_with_fresh_routing"
_MIXED = f"{_STRESS}::test_mixed_grids"
_STREAMS = "tests/gpu/collectives/test_streams.py::test_back_to_back_replays"
_FAULTS = "tests/gpu/collectives/test_faults.py::test_a_rank_is_missing"
_HANGS = "tests/gpu/collectives/test_faults.py::test_a_fault_is_read_while_the_device_hangs"
_WRAP = "tests/gpu/collectives/test_interleaved.py::test_old_flags_are_scrubbed"
_RINGS = "tests/gpu/roles/test_rings.py::test_items_of_every_size"
_FLIGHT = "tests/gpu/collectives/test_faults.py::test_the_flight_recorder_names_the_straggler"

TABLE: Final = (
    Order(
        "EPOCH_LOAD",
        "load4_relaxed",
        "load4_relaxed",
        "written by the call before: a kernel boundary, or the grid-dependency wait, orders it",
        _MIXED,
    ),
    Order(
        "EPOCH_STORE",
        "store4_relaxed",
        "store4_relaxed",
        "read by the next call, behind the same boundary; this block's own reads come before it by the block's barrier",
        _MIXED,
    ),
    Order(
        "WORD_STORE",
        "store16_relaxed",
        "store16_sent",
        "the flag is in the same 8 bytes as its data, so there is no order to keep; needs 8-byte store atomicity (C19)",
        _WORDS,
    ),
    Order(
        "WORD_LOAD",
        "load16_relaxed",
        "load16_fresh",
        "each 8-byte half carries its own flag; bypasses L1, or a poll would never end",
        _WORDS,
    ),
    Order(
        "SENTINEL_STORE",
        "store16_relaxed",
        "store16_sent",
        "each 4-byte word is its own flag; needs 4-byte atomicity",
        _SENTINEL,
    ),
    Order(
        "SENTINEL_LOAD",
        "load16_relaxed",
        "load16_fresh",
        "each word is its own flag; bypasses L1, or a poll would never end",
        _SENTINEL,
    ),
    Order(
        "SENTINEL_CLEAR",
        "store16_relaxed",
        "store16_relaxed",
        "after the read by data dependence; the sender writes this word "
        "again two calls on, when this kernel has ended: no fence with two buffers",
        _SENTINEL,
    ),
    Order(
        "CHUNK_STORE",
        "store16_relaxed",
        "store16_relaxed",
        "ordered by the release that follows the block's barrier",
        _CHUNKS,
    ),
    Order(
        "SCALE_STORE",
        "store4_relaxed",
        "store4_relaxed",
        "of a row on its way, ordered like the row by the release that follows the warp's barrier",
        _EXCHANGE,
    ),
    Order(
        "CHUNK_LOAD",
        "load16_relaxed",
        "load16_relaxed",
        "behind an acquire by another thread and the block's barrier",
        _CHUNKS,
    ),
    Order(
        "BEFORE_PUBLISH",
        "no_fence",
        "fence_system",
        "a release at system scope is cumulative on CUDA; nothing says so of MUSA, where every thread that stored "
        "fences before the barrier (vllm-project/vllm#50941)",
        _CHUNKS,
    ),
    Order(
        "FLAG_PUBLISH",
        "store4_release",
        "store4_release",
        "release at system scope is cumulative: it covers what the other threads stored before the block's barrier",
        _CHUNKS,
    ),
    Order(
        "FLAG_WAIT",
        "load4_acquire",
        "load4_acquire",
        "pairs with the release, or with the exchange behind a fence; "
        "on MUSA an atomic read of the memory itself, then a fence",
        _CHUNKS,
    ),
    Order(
        "STAGE_STORE", "store16_relaxed", "store16_relaxed", "ordered by the fence of the thread that stored", _STAGED
    ),
    Order(
        "BEFORE_EXCHANGE",
        "fence_system",
        "fence_system",
        "by every thread that stored: one lane's fence does not "
        "speak for the others on every device (vllm-project/vllm#50941)",
        _STAGED,
    ),
    Order(
        "FLAG_EXCHANGE",
        "exchange4",
        "exchange4",
        "an atomic at the peer's memory: no posted store can pass it unseen",
        _STAGED,
    ),
    Order(
        "STAGE_LOAD",
        "load16_relaxed",
        "load16_relaxed",
        "behind FLAG_WAIT and the block's barrier; bypasses L1, where the call before last may have left the line",
        _STAGED,
    ),
    Order(
        "PART_STORE",
        "store8_relaxed",
        "store8_sent",
        "the flag is in the same 8 bytes as its value, in memory of this device alone",
        _STREAMS,
    ),
    Order(
        "PART_LOAD",
        "load16_relaxed",
        "load16_fresh",
        "each 8-byte half carries its own flag; bypasses L1, or a poll would never end",
        _STREAMS,
    ),
    Order(
        "HEADER_STORE",
        "store16_relaxed",
        "store16_sent",
        "digest and epoch in one 8-byte word; below 8-byte atomicity the "
        "header goes by BEFORE_EXCHANGE and FLAG_EXCHANGE instead",
        _MIXED,
    ),
    Order(
        "HEADER_LOAD",
        "load8_relaxed",
        "load8_fresh",
        "digest and epoch are read as one 8-byte word; bypasses L1",
        _MIXED,
    ),
    Order(
        "FAULT_LOAD",
        "load4_relaxed",
        "load4_relaxed",
        "only ever goes from 0 to a fault: late is harmless; of the record, by the thread that stored it",
        _FAULTS,
    ),
    Order(
        "FAULT_CLAIM", "compare_exchange4", "compare_exchange4", "one thread of the device writes the record", _FAULTS
    ),
    Order(
        "FAULT_PLACE_LOAD",
        "load8_relaxed",
        "load8_relaxed",
        "written by the host before the channel's first call",
        _HANGS,
    ),
    Order("FAULT_STORE", "store4_relaxed", "store4_relaxed", "the fault word last, behind FAULT_FENCE", _HANGS),
    Order(
        "FAULT_FENCE",
        "fence_system",
        "fence_system",
        "the host reads the record's words when it has seen the fault word; a fence and a store: atomics on host "
        "memory are not given on every bus",
        _HANGS,
    ),
    Order("BOUND_LOAD", "load8_relaxed", "load8_relaxed", "written by the host; seen at the next look", _FAULTS),
    Order(
        "RING_HEADER_STORE",
        "store8_relaxed",
        "store8_relaxed",
        "an item's header to its receiver's host: value and number are one word of 8 bytes, so words need no order; "
        "below 8-byte atomicity numbers go behind FAULT_FENCE instead",
        _RINGS,
    ),
    Order("RING_STORE", "store4_relaxed", "store4_relaxed", "ordered by RING_PUBLISH, or by BEFORE_EXCHANGE", _RINGS),
    Order(
        "RING_PUBLISH",
        "store4_release",
        "store4_release",
        "as FLAG_PUBLISH; where stores are unknown the flag goes by BEFORE_EXCHANGE and FLAG_EXCHANGE instead",
        _RINGS,
    ),
    Order(
        "RING_LOAD",
        "load4_relaxed",
        "load4_relaxed",
        "behind FLAG_WAIT by one thread and the block's barrier; bypasses L1, where the item before may have left the "
        "line",
        _RINGS,
    ),
    Order(
        "RING_CREDIT_STORE",
        "store4_relaxed",
        "store4_relaxed",
        "what it gives back was read by a kernel that ended before this one began",
        _RINGS,
    ),
    Order(
        "SCRUB_STORE",
        "store16_relaxed",
        "store16_relaxed",
        "nobody writes here before this call ends, and the kernel boundary orders it before those who then do",
        _WRAP,
    ),
    Order(
        "SCRUB_CLAIM",
        "compare_exchange4",
        "compare_exchange4",
        "a peer one call ahead may store here: only an old value is taken back",
        _WRAP,
    ),
    Order(
        "RECORD_STORE",
        "store16_relaxed",
        "store16_relaxed",
        "both halves of an entry leave in one 32-byte write of "
        "two lanes; the host checks the call number against the entry's place",
        _FLIGHT,
    ),
)


def unknown(backend: str) -> tuple[Order, ...]:
    """The uses whose primitive is not known on ``backend``: units that need them do not compile there."""
    return tuple(order for order in TABLE if getattr(order, backend) is None)


def defines(backend: str) -> Mapping[str, str]:
    """``HALMA_ORDER_<use>`` -> primitive, for the uses that are known on ``backend``."""
    return {
        f"HALMA_ORDER_{order.use}": primitive for order in TABLE if (primitive := getattr(order, backend)) is not None
    }
