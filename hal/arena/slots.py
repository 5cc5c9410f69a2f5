"""Plans in which each captured call has memory of its own, as vllm-musa's arena.

The budget is that plan's (MooreThreads/vllm-musa vllm_musa/runtime_plan/policy.py, restated): an eager part of whole
4 MiB, then for each call of each descriptor its message and up to 16 KiB of whatever else it needs, all of it rounded
to 4 MiB. There a rank allocates that much twice, for data and for flags with scratch. Here it is allocated once: flags
and sums belong to the channel, and guard zones are what a slot takes beside its message.

    [control | headers | flags | eager staging | eager sums] [slot | slot | ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from halma.hal.arena.channels import finished, flags, head, shard, staging
from halma.hal.arena.layout import GUARD_BYTES, ChannelLayout
from halma.hal.arena.sizes import MIB, Cursor, down, up
from halma.hal.collectives.contract import Box
from halma.hal.errors import ArenaError
from halma.hal.graph.descriptor import Descriptor

GRAIN: Final = 4 * MIB
"""The eager part and the whole buffer are rounded up to it."""
SLOT_META: Final = 16 * 1024
"""Most bytes that a call may need beside its message."""
REUSE_DISTANCE: Final = 2
"""Calls of its channel that must lie between two uses of a slot: with fewer, a peer that is late may still read it."""


@dataclass(frozen=True)
class SlotRun:
    """The slots of one descriptor, one behind the other in order of its calls.

    Attributes:
        nbytes: of a message, and of each half of a doubled slot.
        offset: of the first slot.
        stride: from a slot's half for even epochs to its half for odd ones; 0 where it is not doubled.
        step: from a slot to the next.
    """

    descriptor: Descriptor
    calls: int
    nbytes: int
    offset: int
    stride: int
    step: int

    def box(self, ordinal: int) -> Box:
        """The slot of the call at this place in its graph, from 0.

        Raises:
            ArenaError: the plan has fewer.
        """
        if not 0 <= ordinal < self.calls:
            raise ArenaError(
                f"the slots of {self.descriptor} are used up",
                asked=f"a slot for call {ordinal + 1}",
                found=f"the plan has {self.calls} calls a descriptor, {self.nbytes:,} bytes each",
                do=f"plan with calls_per_descriptor={ordinal + 1} or more",
            )
        return Box(self.offset + ordinal * self.step, self.stride)

    @property
    def end(self) -> int:
        """First byte behind the last slot and its guard."""
        return self.offset + self.calls * self.step


@dataclass(frozen=True)
class SlotTable:
    """All slots, and what they come to.

    Attributes:
        channel: what eager calls use; its flags and sums serve captured ones too.
        eager_bytes: reserved for staging and sums of eager calls.
        data_bytes: messages of all slots.
        meta_bytes: with 16 KiB a slot added.
        needed_bytes: before rounding.
        buffer_bytes: what a rank allocates.
    """

    channel: ChannelLayout
    runs: dict[Descriptor, SlotRun]
    bytes_per_token: int
    eager_bytes: int
    data_bytes: int
    meta_bytes: int
    needed_bytes: int
    buffer_bytes: int

    @property
    def count(self) -> int:
        """Slots of all descriptors."""
        return sum(run.calls for run in self.runs.values())

    def headroom(self, limit: int) -> int:
        """Bytes that could still be needed under ``limit``."""
        return limit - self.needed_bytes

    def refusal(self, descriptor: Descriptor) -> str | None:
        """Why there are no slots for it, or None."""
        return None if descriptor in self.runs else f"no slots are planned for it, but for {len(self.runs)} others"

    def guards(self) -> Iterator[int]:
        """Offsets of the guard zones behind slots."""
        for run in self.runs.values():
            for ordinal in range(run.calls):
                yield run.offset + (ordinal + 1) * run.step - GUARD_BYTES

    def terms(self) -> list[str]:
        """A line for each descriptor."""
        return [
            f"{run.descriptor}: {run.calls} slots of {run.nbytes} from {run.offset}, step {run.step}, "
            f"stride {run.stride}"
            for run in self.runs.values()
        ]


@dataclass(frozen=True)
class SlotRequest:
    """What a plan of slots is made from; descriptors are sorted, so that no order of a ladder changes an offset."""

    descriptors: tuple[Descriptor, ...]
    calls: int
    bytes_per_token: int
    eager: int
    channel: str

    def asked(self) -> str:
        """In words."""
        last = self.descriptors[-1]
        return (
            f"{len(self.descriptors)} descriptors up to ({last.num_tokens} tokens, {last.num_requests} requests), "
            f"{self.calls} calls each"
        )

    def placed(self, size: int) -> SlotTable:
        """All offsets at a world size."""
        largest = up(self.descriptors[-1].num_tokens * self.bytes_per_token)
        # A multiple of 256 bytes a rank, so that a shard's box is exactly its share. An eager call may be as large
        # as any captured one, hence the larger of the two.
        least = up(largest, 256 * size)
        eager_bytes = up(max(self.eager, 2 * (least + least // size)), GRAIN)
        channel = self._channel(size, down(eager_bytes // 2 * size // (size + 1), 256 * size))
        offset, runs = channel.end, dict[Descriptor, SlotRun]()
        data = 0
        for one in self.descriptors:
            run = self._run(one, offset)
            runs[one], offset = run, run.end
            data += run.calls * (run.nbytes + run.stride)
        meta = data + SLOT_META * self.calls * len(runs)
        needed = max(eager_bytes + data, eager_bytes + SLOT_META + meta, offset)
        return SlotTable(
            channel, runs, self.bytes_per_token, eager_bytes, data, meta, needed, buffer_bytes=up(needed, GRAIN)
        )

    def first_beyond(self, size: int, limit: int) -> Descriptor | None:
        """The smallest descriptor with which the ladder passes ``limit``, or None."""
        for count, one in enumerate(self.descriptors, start=1):
            if replace(self, descriptors=self.descriptors[:count]).placed(size).buffer_bytes > limit:
                return one
        return None

    def _channel(self, size: int, box: int) -> ChannelLayout:
        cursor = Cursor()
        layout = replace(head(cursor, self.channel, size, box), stage_flags=flags(cursor, size))
        return finished(cursor, staging(cursor, layout, box, shard(box, size)))

    def _run(self, descriptor: Descriptor, offset: int) -> SlotRun:
        nbytes = up(descriptor.num_tokens * self.bytes_per_token)
        stride = nbytes if self.calls - 1 < REUSE_DISTANCE else 0
        return SlotRun(descriptor, self.calls, nbytes, offset, stride, nbytes + stride + GUARD_BYTES)
