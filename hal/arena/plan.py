"""Plans of arenas: pure arithmetic, equal on every rank, with a reason where they do not fit (A1).

    plan = plan_channels(largest=320 * 4096 * 2)            # the world size is bound by the group
    plan = plan_channels(largest=320 * 4096 * 2, size=8)    # or given, and then everything is known
    plan.reason or plan.nbytes

Two kinds pass the same suite. A *channel* plan (the default) has a few buffers a channel that all calls share by the
parity of a device-side epoch. A *slots* plan gives each captured call memory of its own
(:mod:`halma.hal.arena.slots`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from halma.hal.arena.channels import Lanes, place
from halma.hal.arena.layout import ChannelLayout
from halma.hal.arena.sizes import LARGEST_ADDRESSABLE, MIB, down, whole
from halma.hal.arena.slots import SlotRequest, SlotTable
from halma.hal.capabilities import UNKNOWN, Unknown
from halma.hal.collectives.contract import WORLD_SIZES
from halma.hal.errors import ArenaError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import refuse_unfit

CHANNEL_LIMIT: Final = 32 * MIB
"""Holds V4-Flash's ladder through (320 tokens, 64 requests) at every world size, one-shot capped where it must be."""
SLOT_LIMIT: Final = 512 * MIB
"""The bound that MooreThreads/vllm-musa#178 had."""
LANES: Final = ("push", "staged", "both")


class Request(Protocol):
    """What was asked of a plan."""

    @property
    def kind(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def atomicity(self) -> int | Unknown | None: ...
    def asked(self) -> str:
        """In words, without the world size."""
        ...

    def placed(self, size: int) -> ArenaPlan:
        """The plan at a world size that channels are written for."""
        ...


@dataclass(frozen=True)
class ArenaPlan:
    """Where everything lies, or why there is no such arena.

    Attributes:
        request: what was asked; :meth:`bind` makes the plan again from it.
        size: ranks; None as long as the plan is open.
        channels: their layouts, in order.
        slots: of a slots plan.
        nbytes: what one rank allocates; what would be needed, where that is known and the plan is refused.
        reason: why it is refused; empty where it is not.
        do: what to try instead.
    """

    request: Request
    size: int | None = None
    channels: tuple[ChannelLayout, ...] = ()
    slots: SlotTable | None = None
    nbytes: int = 0
    reason: str = ""
    do: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``channel`` or ``slots``."""
        return self.request.kind

    @property
    def limit(self) -> int:
        """Most bytes that it may have."""
        return self.request.limit

    def asked(self) -> str:
        """What was asked, in words."""
        world = "any world size" if self.size is None else f"world {self.size}"
        return f"{self.request.asked()}, {world}, {self.kind}"

    def need(self) -> ArenaPlan:
        """The plan itself, where it can be allocated.

        Raises:
            ArenaError: it was refused, with its reason, or its world size is still open.
        """
        if self.reason:
            what = {"channel": "the messages do not fit", "slots": "the capture ladder does not fit"}[self.kind]
            raise ArenaError(f"{what} the arena plan", asked=self.asked(), found=self.reason, do=self.do)
        if self.size is None:
            raise ArenaError(
                "the arena plan has no world size yet",
                asked=self.asked(),
                found="size was left open",
                do="give it to group.arena(plan), which binds it, or plan with size=",
            )
        return self

    def bind(self, size: int, atomicity: int | Unknown = UNKNOWN) -> ArenaPlan:
        """The plan for a group of ``size`` ranks, whose backend has this ``remote_store_atomicity``.

        What was given when the plan was made stays as it is; a plan for another world size is refused.
        """
        if self.size not in (None, size):
            return replace(
                self,
                reason=f"it was made for {self.size} ranks, and the group has {size}",
                do=(f"plan with size={size}, or leave the size open",),
            )
        request = self.request
        if isinstance(request, ChannelRequest) and request.atomicity is None:
            request = replace(request, atomicity=atomicity)
        return _plan(request, size)

    def layout(self, channel: str) -> ChannelLayout:
        """The layout of a channel.

        Raises:
            ArenaError: there is none of that name.
        """
        found = next((one for one in self.channels if one.name == channel), None)
        if found is None:
            names = ", ".join(one.name for one in self.channels)
            raise ArenaError(f'the arena has no channel "{channel}"', found=f"channels: {names}", do="name one of them")
        return found

    def refusal(self, descriptor: Descriptor) -> str | None:
        """Why calls of a step of ``descriptor`` cannot use the arena, or None (A2)."""
        if self.reason:
            return self.reason
        if self.slots is not None:
            return self.slots.refusal(descriptor)
        request = self.request
        if isinstance(request, ChannelRequest) and request.bytes_per_token is not None:
            nbytes = descriptor.num_tokens * request.bytes_per_token
            if nbytes > request.largest:
                return f"its messages have {nbytes:,} bytes, and the channel's largest has {request.largest:,}"
        return None

    @property
    def guards(self) -> tuple[int, ...]:
        """Offsets of all guard zones."""
        zones = [offset for channel in self.channels for offset in channel.guards]
        return (*zones, *(self.slots.guards() if self.slots is not None else ()))

    def terms(self) -> tuple[str, ...]:
        """Everything that must be equal on all ranks, a line each: what was asked, every lane, every run of slots."""
        lines = [f"asked: {self.asked()}", f"limit: {self.limit}", f"refused: {self.reason or 'no'}"]
        for one in self.channels:
            lines.append(f"channel {one.name}: control at {one.control}, largest {one.largest}")
            lines += [f"channel {one.name}, {name}: {lane}" for name, lane in one.lanes.items()]
            lines.append(f"channel {one.name}: end {one.end}, guards {one.guards}")
        if self.slots is not None:
            lines += self.slots.terms()
        return (*lines, f"bytes: {self.nbytes}")

    @property
    def fingerprint(self) -> str:
        """16 hex digits of :meth:`terms`."""
        return hashlib.sha256("\n".join(self.terms()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ChannelRequest:
    """What :func:`plan_channels` was asked."""

    largest: int
    channels: tuple[str, ...]
    limit: int
    atomicity: int | Unknown | None
    lanes: str | None
    bytes_per_token: int | None
    kind: str = "channel"

    def asked(self) -> str:
        """In words."""
        return f"messages of up to {self.largest:,} bytes on {', '.join(self.channels)}"

    def chosen_lanes(self) -> Lanes:
        """By capability, where they were not named; all of them while the capability is open."""
        known = 8 if self.atomicity is None else self.atomicity
        atomicity = 0 if isinstance(known, Unknown) else known
        lanes = self.lanes or ("both" if self.atomicity is None else "push" if atomicity >= 4 else "staged")
        push = lanes in ("push", "both")
        return Lanes(words=push and atomicity >= 8, push=push and atomicity >= 4, staged=lanes != "push")

    def placed(self, size: int) -> ArenaPlan:
        """The plan at a world size."""
        lanes = self.chosen_lanes()
        if not (lanes.push or lanes.staged):
            return ArenaPlan(
                self,
                size,
                reason=f"push needs stores of 4 bytes that peers see whole; remote_store_atomicity is {self.atomicity}",
                do=("lanes='staged' assumes nothing of stores",),
            )
        share, made = down(self.limit // len(self.channels)), list[ChannelLayout]()
        for name in self.channels:
            made.append(place(name, size, made[-1].end if made else 0, self.largest, lanes, share))
        nbytes = made[-1].end
        return _within(
            ArenaPlan(self, size, tuple(made), nbytes=nbytes),
            f"{nbytes:,} bytes needed ({lanes}), {self.limit:,} allowed",
            (f"limit={nbytes} or more, a smaller largest, or fewer channels",),
        )


@dataclass(frozen=True)
class SlotsRequest:
    """What :func:`plan_slots` was asked."""

    slots: SlotRequest
    limit: int
    atomicity: int | Unknown | None = None
    kind: str = "slots"

    def asked(self) -> str:
        """In words."""
        return self.slots.asked()

    def placed(self, size: int) -> ArenaPlan:
        """The plan at a world size."""
        table = self.slots.placed(size)
        first = self.slots.first_beyond(size, self.limit)
        return _within(
            ArenaPlan(self, size, (table.channel,), table, table.buffer_bytes),
            f"{table.needed_bytes:,} bytes needed, {self.limit:,} allowed"
            + (f"; first that does not fit: {first}" if first is not None else ""),
            ("plan_channels(), whose buffers are shared by all calls, or fewer descriptors, or a smaller eager part",),
        )


def plan_channels(
    *,
    largest: int,
    channels: Sequence[str] = ("main",),
    size: int | None = None,
    limit: int = CHANNEL_LIMIT,
    atomicity: int | Unknown | None = None,
    lanes: str | None = None,
    bytes_per_token: int | None = None,
) -> ArenaPlan:
    """A plan of channels, each with buffers that its calls share by the parity of the channel's epoch.

    Args:
        largest: bytes of the largest message, such as tokens x hidden size x 2.
        channels: their names; each has a copy of everything.
        size: ranks; None: bound by the group.
        limit: most bytes. One-shot by sentinel gets what the rest leaves, so its cap depends on the world size.
        atomicity: the capability ``remote_store_atomicity``; None: bound by the group, all lanes until then.
        lanes: ``push``, ``staged`` or ``both``, against what follows from the capability.
        bytes_per_token: of a message; with it whole ladders can be checked against the plan (A2).

    Raises:
        ArenaError: an argument that no plan can have. One that only does not fit has a reason instead.
    """
    whole("largest", largest, even=True)
    whole("limit", limit)
    if bytes_per_token is not None:
        whole("bytes_per_token", bytes_per_token, even=True)
    if atomicity is not None and not isinstance(atomicity, Unknown):
        whole("atomicity", atomicity)
    given: Sequence[Any] = channels
    named = not isinstance(channels, str) and all(isinstance(one, str) and one for one in given)
    if not named or not channels or len(set(channels)) != len(channels):
        raise ArenaError(
            "channels need names",
            asked=f"channels={channels!r}",
            found="none, one that is empty or no text, or one twice",
            do='channels=("main",)',
        )
    if lanes is not None and lanes not in LANES:
        raise ArenaError(f"no lanes called {lanes!r}", asked=f"lanes={lanes!r}", do="one of " + ", ".join(LANES))
    return _plan(ChannelRequest(largest, tuple(channels), limit, atomicity, lanes, bytes_per_token), size)


def plan_slots(
    descriptors: Sequence[Descriptor],
    *,
    calls_per_descriptor: int,
    bytes_per_token: int,
    max_batched_tokens: int = 0,
    size: int | None = None,
    limit: int = SLOT_LIMIT,
    channel: str = "main",
) -> ArenaPlan:
    """A plan in which every captured call has a slot of its own, by descriptor and position in its graph.

    Args:
        descriptors: the ladder; its order does not matter.
        calls_per_descriptor: calls that a captured step makes on the channel. Exactly so many: with fewer, a slot
            could be reused before its readers are done.
        bytes_per_token: of a message.
        max_batched_tokens: tokens of the largest eager step: memory for its messages is reserved beside the slots.
        size, limit: as for :func:`plan_channels`.

    Raises:
        ArenaError: an argument that no plan can have.
        CaptureError: a descriptor occurs twice or holds nothing.
    """
    whole("calls_per_descriptor", calls_per_descriptor)
    whole("bytes_per_token", bytes_per_token, even=True)
    whole("max_batched_tokens", max_batched_tokens, least=0)
    whole("limit", limit)
    if not descriptors:
        raise ArenaError("a plan of slots needs a descriptor", asked="no descriptors", do="give it the capture ladder")
    refuse_unfit(descriptors)
    eager = whole("max_batched_tokens x bytes_per_token", max_batched_tokens * bytes_per_token, least=0)
    smallest_first = tuple(sorted(descriptors, key=_by_size))
    wanted = SlotRequest(smallest_first, calls_per_descriptor, bytes_per_token, eager, channel)
    return _plan(SlotsRequest(wanted, limit), size)


def _by_size(one: Descriptor) -> tuple[int, Descriptor]:
    return (one.num_tokens, one)


def _plan(request: Request, size: int | None) -> ArenaPlan:
    if size is None:
        return ArenaPlan(request)
    whole("size", size)
    if size not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return ArenaPlan(
            request,
            size,
            reason=f"channels are written for {sizes} ranks, not for {size}: collectives take the vendor's library",
            do=("a group of another size, or the vendor's collectives as they are",),
        )
    return request.placed(size)


def _within(plan: ArenaPlan, why: str, do: tuple[str, ...]) -> ArenaPlan:
    """``plan``, refused with ``why`` where it is larger than its limit, or than anything can be."""
    if plan.nbytes > LARGEST_ADDRESSABLE:
        return replace(plan, reason=f"{plan.nbytes:,} bytes do not fit 64 bits", do=do)
    return replace(plan, reason=why, do=do) if plan.nbytes > plan.limit else plan
