"""A group: the ranks that share an arena, what they have in common, and whether they can have channels at all."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halma.hal.arena.arena import Arena
from halma.hal.arena.consensus import RanksAgreement
from halma.hal.arena.plan import ArenaPlan
from halma.hal.backend import Backend
from halma.hal.capabilities import Unknown
from halma.hal.collectives.choice import Table, fingerprint
from halma.hal.collectives.communicator import Communicator
from halma.hal.collectives.contract import WORLD_SIZES, Ranks
from halma.hal.collectives.ranks import AnsweringRanks, DistributedRanks, SoloRanks
from halma.hal.errors import CollectiveError
from halma.hal.graph.agreement import Agreement
from halma.hal.graph.descriptor import Descriptor
from halma.hal.settings import settings

importlib.import_module("halma.hal.collectives.custom_op")  # registers what tracers take for a communicator's calls


@dataclass(frozen=True)
class NoArena:
    """In place of an arena where a group can have none: its communicators make every call by the vendor's way.

    Sessions take it like an arena, and their ranks agree as over one.
    """

    why: str
    ranks: Ranks = field(default_factory=SoloRanks)

    def agreement(self) -> Agreement:
        """The ranks of the group, as those that capture together."""
        return RanksAgreement(self.ranks)

    def session(self, kind: str) -> NoUse:
        """Nothing is shared, so nothing is taken."""
        return NoUse()

    def close(self) -> None:
        """Nothing is held."""


class NoUse:
    """A session's part of no arena; see :class:`halma.hal.graph.arenas.ArenaUse`."""

    def check(self, descriptors: Sequence[Descriptor]) -> None:
        """Every call takes the vendor's way, which its own decision records."""

    def recording(self, descriptor: Descriptor) -> AbstractContextManager[None]:
        """Nothing is filed."""
        return nullcontext()

    def give_back(self, descriptor: Descriptor) -> None:
        """There is nothing."""

    def unsettled(self) -> tuple[str, ...]:
        """One line, so that ranks with and without an arena are told apart."""
        return ("a session without an arena",)

    def check_memory(self) -> None:
        """There is none."""

    def settle(self) -> None:
        """There is nothing."""

    def refuse_replay(self, descriptor: Descriptor) -> None:
        """The vendor's calls need no settling."""

    def close(self) -> None:
        """There is nothing."""


@dataclass(frozen=True)
class _Facts:
    """What a rank says of itself. ``equal`` must be so on all ranks; the rest decides whether there are channels."""

    equal: tuple[tuple[str, Any], ...]
    host: str
    refusal: str


class Group:
    """Ranks and a backend. Every rank makes it, and its arenas and communicators, in the same order.

    Args:
        world: a torch.distributed group, or None for this process alone.
        backend: of every rank.
        table: measured choices, equal on every rank.

    Raises:
        CollectiveError: no member, or ranks came with different backends, capabilities, settings or tables; None
            among several processes.
        RankError: a rank did not come.
    """

    def __init__(self, world: Any, backend: Backend, *, table: Table = ()) -> None:
        now = settings()
        if world is None:
            _refuse_no_world()
        self.backend = backend
        self.world = world
        self.ranks: AnsweringRanks = SoloRanks() if world is None else DistributedRanks(world, now.collective_bound)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self._table = tuple(table)
        atomicity = backend.capabilities.remote_store_atomicity
        facts = _Facts(
            equal=(
                ("backend", backend.name),
                ("remote_store_atomicity", "unknown" if isinstance(atomicity, Unknown) else atomicity),
                ("resident_threads", str(backend.capabilities.resident_threads)),
                ("HALMA_CHECKED", now.checked),
                ("HALMA_STRICT", now.strict),
                ("measured table", fingerprint(self._table)),
            ),
            host=machine(),
            refusal=_refusal(backend),
        )
        answers = self.ranks.exchange("group", facts)
        self.why_no_channel = _common(self.ranks, answers)
        self.hosts: tuple[str, ...] = tuple(answer.host for answer in answers)

    def arena(self, plan: ArenaPlan, **options: Any) -> Arena | NoArena:
        """Memory that all ranks share, as planned; :meth:`halma.hal.arena.arena.Arena.create` tells the rest.

        Where the group can have no channel (another number of ranks than 2, 4, 6 or 8; several machines; no memory
        that peers can map) what comes back says why, and communicators on it take the vendor's collectives.
        """
        if self.why_no_channel:
            return NoArena(self.why_no_channel, self.ranks)
        return Arena.create(self.backend, self.ranks, plan, **options)

    def communicator(self, arena: Arena | NoArena, channel: str = "main", **options: Any) -> Communicator:
        """The collectives of one channel of ``arena``."""
        if not isinstance(arena, (Arena, NoArena)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CollectiveError(
                "a communicator needs an arena",
                found=repr(arena),
                do="group.communicator(group.arena(plan)): where there can be none, it says why",
            )
        lives = None if isinstance(arena, NoArena) else arena
        why = arena.why if isinstance(arena, NoArena) else ""
        return Communicator(
            self.backend, self.ranks, lives, channel,
            group=self.world, why_vendor=why, table=self._table, **options,
        )  # fmt: skip


def _refuse_no_world() -> None:
    """torch.distributed.group.WORLD is None before init_process_group(): each rank would work for itself, silently."""
    size = os.environ.get("WORLD_SIZE", "")
    if size not in ("", "1"):
        raise CollectiveError(
            "None is one process alone, and the launcher started several",
            asked="collectives(world=None)",
            found=f"WORLD_SIZE={size}; torch.distributed.group.WORLD is None until there is a process group",
            do="torch.distributed.init_process_group() first; or a group of this rank alone: new_group([rank])",
        )


def _refusal(backend: Backend) -> str:
    """Why this rank can have no channel, or nothing."""
    reason = backend.collectives.unsupported() or backend.memory.not_exportable()
    if reason is None and not backend.capabilities.ipc:
        reason = f"the capability ipc is {backend.capabilities.ipc}"
    return reason or ""


def _common(ranks: AnsweringRanks, facts: Sequence[_Facts]) -> str:
    """Why the group has no channel, the same on every rank; nothing where it can have one."""
    for rank, other in enumerate(facts):
        for (name, one), (_, two) in zip(facts[0].equal, other.equal, strict=True):
            if one != two:
                raise CollectiveError(
                    f"ranks of one group differ in {name}",
                    found=(f"rank 0 ({ranks.names[0]}): {one}", f"rank {rank} ({ranks.names[rank]}): {two}"),
                    do="start every rank alike",
                )
    if ranks.size == 1:
        return "one rank has nobody to talk to"
    if ranks.size not in WORLD_SIZES:
        return f"{ranks.size} ranks: channels are made for {', '.join(map(str, WORLD_SIZES))}"
    hosts = sorted({fact.host for fact in facts})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} machines: {', '.join(hosts)}"
    return next((f"rank {rank}: {fact.refusal}" for rank, fact in enumerate(facts) if fact.refusal), "")


def machine() -> str:
    """What tells machines apart; names alone repeat in containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}/{boot}"
