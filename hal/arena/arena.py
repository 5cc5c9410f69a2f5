"""The arena: memory of one layout on every rank of a group, at fixed addresses, and who uses what of it.

Before anything is allocated every rank tells what it would allocate, and whether its memory can be exported at all
(A4, A8). Ranks are those of the group, 0 to size - 1, whatever they are called outside of it (A13).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halma.hal.arena.consensus import RanksAgreement, refuse_difference, together
from halma.hal.arena.coverage import Coverage, check_ladder, known_policy
from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES, ChannelLayout
from halma.hal.arena.memory import SymmetricMemory
from halma.hal.arena.plan import ArenaPlan
from halma.hal.arena.use import Use
from halma.hal.backend import Backend, SharedMemory
from halma.hal.collectives.contract import Algorithm, Box, Call, Ranks
from halma.hal.errors import ArenaError
from halma.hal.graph.agreement import Agreement
from halma.hal.graph.current import note_failure, open_captures, open_scopes
from halma.hal.graph.descriptor import Descriptor
from halma.hal.process import Home
from halma.hal.settings import settings

KINDS = ("persistent", "scratch")


class Arena:
    """Memory that all ranks of a group share; :meth:`create` makes it on every one of them. Not thread-safe.

    Attributes:
        plan: bound to the group.
        policy: ``error`` or ``fall back``, for descriptors that the plan does not cover.
        checked: guard zones are looked at whenever a session is settled, and at the end.
        recording: the descriptor whose calls are being captured, if any.
    """

    def __init__(
        self, backend: Backend, ranks: Ranks, plan: ArenaPlan, memory: SymmetricMemory, policy: str, checked: bool
    ) -> None:
        self.backend = backend
        self.ranks = ranks
        self.plan = plan
        self.policy = policy
        self.checked = checked
        self.closed = False
        self.recording: Descriptor | None = None
        self._home = Home()
        self._memory = memory
        self._recorder: Use | None = None
        self._uses: list[Use] = []
        self._occupied: dict[str, bool] = {}

    @classmethod
    def create(
        cls, backend: Backend, ranks: Ranks, plan: ArenaPlan, *, policy: str = "error", checked: bool | None = None
    ) -> Arena:
        """An arena on every rank of a group; all of them call it.

        Args:
            plan: an open one is bound to the group's size and the backend's store atomicity.
            policy: what :meth:`check_ladder` does about uncovered descriptors.
            checked: look at guard zones; by default what ``HALMA_CHECKED`` says.

        Raises:
            ArenaError: on every rank: one has another plan, one that does not fit, memory that cannot be exported, or
                not enough of it, or a capture is open (A5). Nothing stays allocated.
            RankError: a rank did not come.
        """
        bound = plan.bind(ranks.size, backend.capabilities.remote_store_atomicity)

        def accepted() -> tuple[str, ...]:
            refuse_capturing("an arena is made")
            known_policy(policy)
            _refuse_unexportable(backend, bound.need())
            return (f"backend: {backend.name}", f"policy: {policy}", *bound.terms())

        terms = together(ranks, "the arena's plan", accepted)
        refuse_difference(ranks, "the arena's plan", terms, "give every rank the same plan, backend and policy")
        memory = SymmetricMemory.create(backend, ranks, bound.nbytes, lambda tensor: _prepare(tensor, bound))
        return cls(backend, ranks, bound, memory, policy, settings().checked if checked is None else checked)

    def close(self) -> None:
        """Give the memory back: a barrier, then unmap, a barrier, free (A9). All ranks call it; twice is once.

        Graphs that use the arena cannot be replayed any more, so close their sessions first.

        Raises:
            ArenaError: a capture is open, or this process is a fork of the one that made the arena. Or, when all is
                freed: in checked mode a guard zone was written to.
            RankError: a peer did not come; everything is freed all the same.
        """
        self._home.refuse_other("the arena", "close()", ArenaError)
        if self.closed:
            return
        refuse_capturing("an arena is closed")
        self.closed = True
        self._memory.close(self._guards_intact if self.checked else _nothing)

    # -- where things are -----------------------------------------------------------------------------

    @property
    def own(self) -> SharedMemory:
        """This rank's memory."""
        self.refuse_closed("this rank's memory")
        return self._memory.own

    @property
    def peers(self) -> Sequence[SharedMemory]:
        """Every rank's memory as it is mapped here, by rank of the group."""
        self.refuse_closed("the peers' memory")
        return tuple(self._memory.peers)

    def layout(self, channel: str = "main") -> ChannelLayout:
        """Where a channel lies; see :meth:`ArenaPlan.layout`."""
        return self.plan.layout(channel)

    def occupy(self, channel: str) -> bool:
        """A communicator begins to use a channel; whether another one did before. For the communicator.

        Raises:
            ArenaError: another one still does: its epochs, flags and faults are those of the channel. Or the arena is
                closed, or has no such channel.
        """
        self.refuse_closed(f'a communicator on channel "{channel}"')
        self.layout(channel)
        if self._occupied.get(channel):
            raise ArenaError(
                f'channel "{channel}" of the arena has a communicator',
                asked="another one on the same channel",
                found="it is not closed",
                do="use that one, close it first, or plan a second channel: plan_channels(channels=(...))",
            )
        before = channel in self._occupied
        self._occupied[channel] = True
        return before

    def vacate(self, channel: str) -> None:
        """A communicator ends to use a channel."""
        self._occupied[channel] = False

    def refill(self, channel: str) -> None:
        """Write a channel's lanes as before its first use, on this rank: for a channel that starts again.

        Raises:
            ArenaError: no such channel, the arena is closed, or a capture is open.
        """
        refuse_capturing("a channel is refilled")
        _fill(self.own.tensor, self.layout(channel), scrub=True)
        self.backend.device.synchronize()

    def check_guards(self) -> None:
        """Look at all guard zones of this rank's memory; waits for the device (A7).

        Raises:
            ArenaError: one was written to, or the arena is closed, or a capture is open.
        """
        refuse_capturing("guard zones are looked at")
        self.refuse_closed("a look at the guard zones")
        self._guards_intact()

    def _guards_intact(self) -> None:
        offsets = self.plan.guards
        tensor = self._memory.own.tensor
        zones = torch.stack([tensor[offset : offset + GUARD_BYTES] for offset in offsets]).cpu()
        damaged = [index for index, zone in enumerate(zones) if bool((zone != GUARD_BYTE).any())]
        if damaged:
            raise ArenaError(
                "a guard zone of the arena was written to",
                asked=f"{len(offsets)} zones as they were made",
                found=[_damage(self.plan, offsets[index], zones[index]) for index in damaged[:8]],
                do="some kernel wrote past its memory here; run it alone, under a memory checker",
            )

    # -- sessions -------------------------------------------------------------------------------------

    def session(self, kind: str) -> Use:
        """A capture session's part of the arena; sessions ask for it themselves.

        Raises:
            ArenaError: no such kind, the arena is closed, or a capture is open.
        """
        if kind not in KINDS:
            raise ArenaError(f"no kind of session called {kind!r}", do="one of " + ", ".join(KINDS))
        refuse_capturing("a session is opened on an arena")
        self.refuse_closed(f"a {kind} session")
        self._uses.append(Use(self, kind))
        return self._uses[-1]

    def agreement(self) -> Agreement:
        """The ranks of the arena, as those that capture together."""
        return RanksAgreement(self.ranks)

    def check_ladder(self, ladder: Sequence[Descriptor]) -> Coverage:
        """See :func:`halma.hal.arena.coverage.check_ladder`."""
        return check_ladder(self.plan, ladder, self.policy)

    def take(self, call: Call, algorithm: Algorithm, channel: str = "main") -> Box | None:
        """File a captured call and return its slot, or None where it uses the channel's own buffers.

        For the communicator, once for every call that it captures. A call of a channel plan that is captured outside
        of a session is not filed: there is no descriptor to file it under.

        Raises:
            ArenaError: slots, and no session captures; the descriptor is not covered, its slots are used up or too
                small; no such channel; the arena is closed. An open capture ends as failed, whoever catches it.
        """
        try:
            self.refuse_closed(call.describe())
            self.layout(channel)
            if self._recorder is not None and self.recording is not None:
                return self._recorder.take(self.recording, call, algorithm, channel)
            if self.plan.slots is None:
                return None
            raise ArenaError(
                "a call was captured that belongs to no descriptor",
                asked=call.describe(),
                found="slots are given out by descriptor, and no session with this arena is capturing",
                do="halma.session(arenas=[arena]), and capture in it",
            )
        except ArenaError as error:
            note_failure(error)
            raise

    @property
    def live_slots(self) -> int:
        """Slots that captured calls of open sessions hold; 0 in a channel plan."""
        return sum(entry.offset >= 0 for use in self._uses for entry in use.ledger.entries)

    @property
    def sealed(self) -> frozenset[Descriptor]:
        """What persistent sessions have settled: captured once, and not again while they last."""
        return frozenset(one for use in self._uses if use.kind == "persistent" for one in use.settled)

    def holder(self, descriptor: Descriptor) -> Use | None:
        """The session that holds the slots of a descriptor, if there are any to hold. For :class:`Use`."""
        if self.plan.slots is None or self.plan.refusal(descriptor) is not None:
            return None
        return next((use for use in self._uses if descriptor in use.captured), None)

    def start_recording(self, use: Use, descriptor: Descriptor) -> None:
        """For :class:`Use`."""
        self._recorder, self.recording = use, descriptor

    def end_recording(self) -> None:
        """For :class:`Use`."""
        self._recorder = self.recording = None

    def forget_use(self, use: Use) -> None:
        """For :class:`Use`."""
        self._uses = [one for one in self._uses if one is not use]

    def refuse_closed(self, asked: str) -> None:
        """Raise ArenaError where the arena is closed, or this process is a fork of the one that made it."""
        self._home.refuse_other("the arena", asked, ArenaError)
        if self.closed:
            raise ArenaError("the arena is closed", asked=asked, do="make a new one")


def refuse_capturing(what: str) -> None:
    """Refuse what allocates, maps, waits or registers while anything is captured in this process (A5).

    Raises:
        ArenaError: a capture is open, on any thread; it ends as failed.
    """
    open_now = [*open_scopes.values(), *open_captures.values()]
    if open_now:
        error = ArenaError(
            f"{what} during a capture",
            found=f"{open_now[0] or 'a graph'} is being captured",
            do="do it before the first capture: arenas do not grow afterwards",
        )
        note_failure(error)
        raise error


def _refuse_unexportable(backend: Backend, plan: ArenaPlan) -> None:
    reason = backend.memory.not_exportable()
    if reason is not None:
        raise ArenaError(
            "memory of this process cannot be shared with other ranks",
            asked=plan.asked(),
            found=reason,
            do="mend that, or take the vendor's collectives",
        )


def _prepare(tensor: torch.Tensor, plan: ArenaPlan) -> None:
    """Lanes and guard zones as they are before the first use; all else is zero."""
    for channel in plan.channels:
        _fill(tensor, channel)
    for offset in plan.guards:
        tensor[offset : offset + GUARD_BYTES].fill_(GUARD_BYTE)


def _fill(tensor: torch.Tensor, channel: ChannelLayout, *, scrub: bool = False) -> None:
    """Lanes with a fill; with ``scrub`` the others too."""
    for lane in channel.lanes.values():
        if lane.fill or scrub:
            tensor[lane.offset : lane.offset + lane.nbytes].fill_(lane.fill)


def _damage(plan: ArenaPlan, offset: int, zone: torch.Tensor) -> str:
    """Which zone, where in it, and what stands there now."""
    first = int((zone != GUARD_BYTE).nonzero()[0])
    places = [(one.control, f"{one.name}.control") for one in plan.channels]
    places += [(lane.offset, f"{one.name}.{name}") for one in plan.channels for name, lane in one.lanes.items()]
    if plan.slots is not None:
        places += [(run.offset, f"the slots of {run.descriptor}") for run in plan.slots.runs.values()]
    before = max((place for place in places if place[0] < offset), default=(0, "the start"))[1]
    return f"byte {offset + first}, behind {before}: {int(zone[first]):#04x} where {GUARD_BYTE:#04x} was"


def _nothing() -> None:
    pass
