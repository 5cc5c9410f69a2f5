"""A group: the ranks that share an arena, what they have in common, and whether they can have channels at all."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halma.hal.arena.arena import Arena
from halma.hal.arena.plan import ArenaPlan
from halma.hal.backend import Backend
from halma.hal.capabilities import Unknown
from halma.hal.collectives.choice import Table, fingerprint
from halma.hal.collectives.communicator import Communicator
from halma.hal.collectives.contract import WORLD_SIZES
from halma.hal.collectives.ranks import AnsweringRanks, DistributedRanks, SoloRanks
from halma.hal.errors import CollectiveError
from halma.hal.settings import settings


@dataclass(frozen=True)
class NoArena:
    """In place of an arena where a group can have none: its communicators make every call by the vendor's way."""

    why: str

    def close(self) -> None:
        """Nothing is held."""


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
        CollectiveError: no member, or ranks came with different backends, capabilities, settings or tables.
        RankError: a rank did not come.
    """

    def __init__(self, world: Any, backend: Backend, *, table: Table = ()) -> None:
        now = settings()
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
            host=_host(),
            refusal=_refusal(backend),
        )
        self.why_no_channel = _common(self.ranks, self.ranks.exchange("group", facts))

    def arena(self, plan: ArenaPlan, **options: Any) -> Arena | NoArena:
        """Memory that all ranks share, as planned; :meth:`halma.hal.arena.arena.Arena.create` tells the rest.

        Where the group can have no channel (another number of ranks than 2, 4, 6 or 8; several machines; no memory
        that peers can map) what comes back says why, and communicators on it take the vendor's collectives.
        """
        if self.why_no_channel:
            return NoArena(self.why_no_channel)
        return Arena.create(self.backend, self.ranks, plan, **options)

    def communicator(self, arena: Arena | NoArena, channel: str = "main", **options: Any) -> Communicator:
        """The collectives of one channel of ``arena``."""
        lives = None if isinstance(arena, NoArena) else arena
        why = arena.why if isinstance(arena, NoArena) else ""
        return Communicator(
            self.backend, self.ranks, lives, channel,
            group=self.world, why_vendor=why, table=self._table, **options,
        )  # fmt: skip


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


def _host() -> str:
    """What tells machines apart; names alone repeat in containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}/{boot}"
