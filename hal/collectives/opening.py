"""How a channel is opened: its driver, its flight recorder, and the ranks that must all be ready (C18)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from halma.hal.backend import Backend
from halma.hal.collectives.choice import Table
from halma.hal.collectives.comparing import refuse_difference
from halma.hal.collectives.contract import FLIGHT_BYTES, ChannelDriver, ChannelSite
from halma.hal.collectives.ranks import AnsweringRanks

if TYPE_CHECKING:
    from halma.hal.arena.arena import Arena

FLIGHT_ENTRIES: Final = 256


def open_channel(
    backend: Backend,
    ranks: AnsweringRanks,
    arena: Arena,
    channel: str,
    *,
    bound: float,
    first_epoch: int,
    table: Table,
    checked: bool,
) -> ChannelDriver:
    """The driver of ``channel``, which every rank opens; the channel is taken until ``arena.vacate(channel)``.

    Raises:
        ArenaError: the arena is closed, or the channel is taken.
        CollectiveError: ranks disagree on what they open.
        RankError: a rank did not come.
    """
    again = arena.occupy(channel)
    try:
        driver = _driver(backend, ranks, arena, channel, bound, first_epoch)
        if again:
            # The one before left flags of the same epochs, maybe a fault. Once all are here nobody sends any more.
            backend.device.synchronize()
            ranks.exchange(f"channel {channel} is opened again", None)
            driver.rearm(first_epoch)
            backend.device.synchronize()
        # Every kernel is loaded on every rank before the first call can spin (C18).
        terms = (channel, first_epoch, tuple(table), checked)
        refuse_difference(ranks, "the channel", ranks.exchange(f"channel {channel} is loaded", terms))
    except BaseException:
        arena.vacate(channel)
        raise
    return driver


def _driver(
    backend: Backend, ranks: AnsweringRanks, arena: Arena, channel: str, bound: float, first_epoch: int
) -> ChannelDriver:
    recorder = backend.memory.pinned((FLIGHT_ENTRIES * FLIGHT_BYTES,), _uint8())
    recorder.zero_()
    return backend.collectives.channel(
        ChannelSite(
            rank=ranks.rank,
            size=ranks.size,
            layout=arena.layout(channel),
            own=arena.own,
            peers=arena.peers,
            bound_ns=int(bound * 1e9),
            dependent=backend.capabilities.dependent_launch is True,
            recorder=recorder,
            first_epoch=first_epoch,
            channels=len(arena.plan.channels),
        )
    )


def _uint8() -> Any:
    import torch

    return torch.uint8
