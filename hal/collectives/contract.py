"""What the layer and a backend's collectives say to each other: a call, a choice, a channel's site and driver.

A *channel* is an ordered sequence of calls: every rank makes the same calls in the same order, on one stream at a
time. Its state (one epoch, whatever the grid; flags; the sticky error) is device state at fixed offsets of the
arena, so a captured call and an eager one are the same work. ``hal`` validates, chooses, keeps the ledger and turns
records into errors; a driver only launches.

This module imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

if TYPE_CHECKING:
    import torch

    from halma.hal.arena.layout import ChannelLayout
    from halma.hal.backend import SharedMemory, Stream

WORLD_SIZES = (2, 4, 6, 8)
"""World sizes that the channel kernels are written for; others take the vendor's path, with the reason."""


FP8_NORM = "norm float8_e4m3fn"
"""What the detail of a fused norm ends with whose output is fp8."""


class Kind(IntEnum):
    """What a call does; part of its digest, so the numbers never change."""

    ALL_REDUCE = 1
    ALL_REDUCE_NORM = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    ALL_REDUCE_STREAMS = 6


class Algorithm(IntEnum):
    """How a call moves its data (docs/collectives.md)."""

    ONE_SHOT = 1
    """Each rank pushes its message to every peer; each adds up all of them in rank order."""
    TWO_SHOT = 2
    """Each rank adds up the shard it owns, then pushes the sum to every peer."""
    STAGED = 3
    """Each rank copies its message to its own staging; peers pull it after a flag. No store atomicity is assumed."""
    STAGED_TWO_SHOT = 4
    """As staged, but each rank pulls and adds up its own shard, and peers pull the sum."""


class Wire(IntEnum):
    """How arrival is told."""

    WORDS = 1
    """Eight bytes {data, flag}: half of the wire is payload; needs stores of 8 bytes that are seen whole."""
    SENTINEL = 2
    """All payload; a word is there when it is no longer all ones; needs stores of 4 bytes that are seen whole."""
    CHUNKS = 3
    """Plain payload, then a flag a chunk with release and acquire."""
    FLAGS = 4
    """Plain payload in the owner's own memory, then flags by atomic exchange behind a system fence."""


@dataclass(frozen=True)
class Call:
    """One call, as all ranks must make it.

    Attributes:
        nbytes: payload of one rank.
        dtype: torch's name without the prefix, such as ``bfloat16``.
        root: the rank that a broadcast comes from, else -1.
        detail: what else must be equal, such as the row length and epsilon of a fused norm.
        descriptor: what is being run; for reports and the digest.
        row_length: elements of a row, where what a channel can do depends on it; also part of ``detail`` then.
    """

    kind: Kind
    nbytes: int
    dtype: str
    root: int = -1
    detail: str = ""
    descriptor: str = ""
    row_length: int = 0

    @property
    def gives_fp8(self) -> bool:
        """Whether it is a fused norm whose output is fp8 with scales."""
        return self.detail.endswith(FP8_NORM)

    @property
    def digest(self) -> int:
        """32 bits that tell calls apart, never 0: the header word of every call (C15)."""
        text = f"{int(self.kind)}|{self.nbytes}|{self.dtype}|{self.root}|{self.detail}|{self.descriptor}"
        return crc32(text.encode()) or 1

    def describe(self) -> str:
        """``all_reduce of 8192 bytes of bfloat16 (decode 1 request)``."""
        parts = [self.kind.name.lower(), f"of {self.nbytes} bytes of {self.dtype}"]
        parts += [f"from rank {self.root}"] if self.root >= 0 else []
        parts += [f"[{self.detail}]"] if self.detail else []
        parts += [f"({self.descriptor})"] if self.descriptor else []
        return " ".join(parts)


@dataclass(frozen=True)
class Choice:
    """How a call is done on all ranks: a pure function of the call, the layout and agreed values (C5).

    Attributes:
        blocks, threads: launch geometry of a measured row; 1 and 1: the driver's own, a pure function as well.
        why: for ``explain`` and the decision record.
    """

    algorithm: Algorithm
    wire: Wire
    blocks: int = 1
    threads: int = 1
    why: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why no channel can do a call; it goes to the vendor's collective, with this reason."""

    why: str


@dataclass(frozen=True)
class ChannelSite:
    """Where a channel lives on this rank, all of it fixed for the channel's life.

    Attributes:
        rank, size: of the group: 0..size-1, whatever the global ranks are (A13).
        layout: offsets within the arena, equal on every rank.
        own: this rank's arena memory; zero but for what ``layout`` says is prefilled.
        peers: every rank's memory as mapped here, by rank of the group; ``peers[rank]`` is ``own``.
        bound_ns: how long a wait may take before it is an error.
        dependent: use dependent launches where the capability holds.
        channels: of the arena, this one included; their grids may spin at the same time and fit the device together
            (C16).
        recorder: pinned host memory uint8 that the flight recorder writes, see :class:`FlightEntry`.
        first_epoch: the channel's epoch before its first call; 0 but in tests of the wrap.
    """

    rank: int
    size: int
    layout: ChannelLayout
    own: SharedMemory
    peers: Sequence[SharedMemory]
    bound_ns: int
    dependent: bool
    recorder: torch.Tensor
    first_epoch: int = 0
    channels: int = 1


@dataclass(frozen=True)
class Box:
    """Which staging a call uses in place of the channel's own buffers: a slot of a slot plan.

    Attributes:
        offset: of the slot in the arena.
        stride: bytes from the slot's even-epoch half to its odd one; 0 where the slot is not doubled, because at
            least two calls of its channel lie between two uses.
    """

    offset: int
    stride: int


@dataclass(frozen=True)
class StreamMix:
    """Of an all-reduce that ends in mixed residual streams (mHC): M rows, 4 streams, D columns.

    ``fn``, ``base`` and both scales are at rest: a channel reads them before the work queued just before has ended.

    Attributes:
        streams: [M, 4, D], dtype of the message; what its sum is mixed into.
        mixes: float32 [M, 20], raw: what the sublayer that ends here made of ``streams`` for its way back, ``post``
            (4) and ``comb`` (16). Replaced by those of the next sublayer.
        base, scale: float32 [24], [3], of the sublayer that ends here.
        fn, next_base, next_scale: float32 [24, 4 D], [24], [3], of the sublayer that begins.
        hc_eps: added to ``pre``, to the softmax and to every sum that divides.
        iterations: Sinkhorn rounds.
    """

    streams: torch.Tensor
    mixes: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    fn: torch.Tensor
    next_base: torch.Tensor
    next_scale: torch.Tensor
    hc_eps: float
    iterations: int


@dataclass(frozen=True)
class Operands:
    """Tensors of a call, contiguous, on the channel's device.

    Attributes:
        source: what this rank contributes; of a broadcast, what the root sends.
        out: where the result goes; may be ``source`` itself.
        residual, weight, norm_out: of a fused norm (``out`` is the new residual): same dtype as source; weight
            may be float32.
        eps: of a fused norm.
        scale_out: float32 [rows, columns / 128] where ``norm_out`` is fp8 with a scale a group of 128.
        mix: of an all-reduce into streams, beside ``weight``, ``norm_out`` and ``eps``; ``out`` are the new streams,
            and may be the old ones.
    """

    source: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    norm_out: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    eps: float = 0.0
    row_length: int = 0
    mix: StreamMix | None = None


class Fault(IntEnum):
    """What an error record says."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    """A peer made another call: its header word has another digest."""
    OVERRUN = 3
    """A peer is ahead: a flag of a later epoch came."""
    LEFT = 4
    """An exception, such as an interrupt, left the call before its end; ``peer`` is this rank. Host code only."""


@dataclass(frozen=True)
class ErrorRecord:
    """The first fault of a channel on this rank, as its device code wrote it. It is sticky (C7).

    Attributes:
        peer: the rank of the group that was waited for.
        call: number of the call on the channel, from 1.
        expected, seen: flags, or digests for a mismatch.
        algorithm: :class:`Algorithm`, or 0 where only the header word was waited for.
        waited_ns: how long.
    """

    fault: Fault
    peer: int
    call: int
    digest: int
    expected: int
    seen: int
    algorithm: int
    waited_ns: int


@dataclass(frozen=True)
class FlightEntry:
    """One line of the flight recorder: a call that this rank started, newest last.

    In memory: 32 bytes, little-endian: u32 call number (written last), u32 digest, u64 device time in ns, u32 bytes,
    u32 kind, u32 algorithm, u32 zero. Entry ``call % (recorder bytes / 32)``.
    """

    call: int
    digest: int
    time_ns: int
    nbytes: int
    kind: int
    algorithm: int


FLIGHT_BYTES = 32


class ChannelDriver(Protocol):
    """Launches the calls of one channel. Not thread-safe; one stream at a time."""

    def launch(self, call: Call, choice: Choice, operands: Operands, box: Box | None, stream: Stream) -> None:
        """Queue one call on ``stream``: captured where the stream captures, run where it does not. Never waits.

        One object stands for all equal calls, and one choice for all of a shape, so that what was prepared for them is
        found by identity; but of :data:`halma.hal.collectives.remembered.MOST` of them at most.

        Every call sends each peer a header word and waits for one from each (C15), reads the epoch from device
        state and advances it (C2), and bounds every wait (C7). After a fault, calls write NaN and touch no peer.
        """
        ...

    def error(self) -> ErrorRecord | None:
        """The sticky fault, if there is one; reads memory without waiting for the device."""
        ...

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        ...

    def set_bound(self, bound_ns: int) -> None:
        """Change the bound of all waits, captured ones included."""
        ...

    def rearm(self, epoch: int) -> None:
        """Forget the fault and continue from ``epoch``; every rank does so between two barriers, idle (no work of
        the channel is queued). Stale words of the old epochs are scrubbed."""
        ...

    def epoch(self) -> int:
        """The channel's epoch now; the device must be idle."""
        ...

    def close(self) -> None:
        """Forget device handles; the arena frees the memory."""
        ...


class Ranks(Protocol):
    """A group of ranks as the host sees it: always explicit, never the world by default."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def names(self) -> Sequence[str]:
        """How each member is called in messages: its global rank and host."""
        ...

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's value, by rank of the group; also a barrier. ``stage`` must be equal on all ranks.

        Raises:
            RankLeft: a rank said that it does not come.
            RankError: a rank did not come in time, ended, or is at another stage; names it.
        """
        ...

    def leave(self, reason: str) -> None:
        """Instead of this rank's next exchange: tell whoever comes to it that this rank does not, and why.

        Never waits and never raises, so that it can be called while an exception is on its way (G26). Ranks stay in
        step: it counts as that exchange.
        """
        ...
