"""The memory that ranks of an exchange share: how it begins, and who may write to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES
from halma.hal.arena.memory import SymmetricMemory
from halma.hal.collectives.contract import FLIGHT_BYTES, ChannelSite
from halma.hal.collectives.exchange_contract import ExchangeDriver, ExchangeSite, GivesExchange, Layout
from halma.hal.collectives.exchange_geometry import Geometry, Places
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


def layout_tensors(group: Group, geometry: Geometry) -> Layout:
    """Memory of a layout of full size, of no token yet."""
    import torch

    empty = group.backend.memory.empty
    capacity, local = geometry.capacity(geometry.max_tokens), geometry.local(group.rank)
    return Layout(
        index=empty((capacity,), torch.int32).fill_(-1),
        weights=empty((capacity,), getattr(torch, geometry.accumulator)).zero_(),
        counts=empty((local,), torch.int32).zero_(),
        offsets=empty((local + 1,), torch.int32).zero_(),
        total=empty((1,), torch.int32).zero_(),
        slots=empty((geometry.landing, geometry.top_k), torch.int32).fill_(-1),
        tokens=empty((geometry.ranks,), torch.int32).zero_(),
        sources=empty((geometry.max_tokens,), torch.int32).zero_(),
    )


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
