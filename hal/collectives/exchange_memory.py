"""The memory that ranks of an exchange share: how it begins, and who may write to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES
from halma.hal.arena.memory import SymmetricMemory
from halma.hal.collectives.contract import FLIGHT_BYTES, ChannelSite
from halma.hal.collectives.exchange_contract import ExchangeDriver, ExchangeSite, GivesExchange
from halma.hal.collectives.exchange_geometry import Places
from halma.hal.collectives.exchange_opening import Terms
from halma.hal.collectives.group import Group
from halma.hal.collectives.opening import FLIGHT_ENTRIES
from halma.hal.errors import CollectiveError

if TYPE_CHECKING:
    import torch


def prepare(memory: torch.Tensor, places: Places) -> None:
    """A rank's uint8 memory, zero so far, as it is before the first call."""
    for region in places.regions.values():
        if region.fill:
            memory[region.offset : region.offset + region.nbytes].fill_(region.fill)
    for guard in places.channel.guards:
        memory[guard : guard + GUARD_BYTES].fill_(GUARD_BYTE)


def open_driver(
    group: Group,
    terms: Terms,
    memory: SymmetricMemory,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    bound: float,
    epoch: int,
) -> ExchangeDriver:
    """The backend's driver over that memory.

    Args:
        rows, scales: the landing area, views of the rank's own memory.
        bound: seconds that a wait may take.
        epoch: before the first call.
    """
    import torch

    collectives = group.backend.collectives
    assert isinstance(collectives, GivesExchange)  # terms say so
    recorder = group.backend.memory.pinned((FLIGHT_ENTRIES * FLIGHT_BYTES,), torch.uint8)
    recorder.zero_()
    site = ChannelSite(
        rank=group.rank,
        size=group.size,
        layout=terms.geometry.places.channel,
        own=memory.own,
        peers=tuple(memory.peers),
        bound_ns=int(bound * 1e9),
        dependent=group.backend.capabilities.dependent_launch is True,
        recorder=recorder,
        first_epoch=epoch,
    )
    return collectives.exchange(ExchangeSite(site, terms.geometry, terms.tuning, rows, scales))


def refuse_written_guards(memory: torch.Tensor, places: Places) -> None:
    """Look at a rank's guard zones.

    Raises:
        CollectiveError: one of them was written to.
    """
    for guard in places.channel.guards:
        if bool((memory[guard : guard + GUARD_BYTES] != GUARD_BYTE).any()):
            raise CollectiveError(
                "a guard zone of the exchange was written to",
                found=f"at byte {guard}; {places}",
                do="some kernel wrote past its memory here; run it alone, under a memory checker",
            )
