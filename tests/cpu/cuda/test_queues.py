"""Who has which queue; over stand-ins, without a device."""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from halma.backends.torch_device.queues import POOLED, Lending, pooled_queue
from halma.hal.errors import CapabilityError


class Owner:
    """A stream."""


@pytest.mark.invariant("C4")
def test_live_owners_never_share_and_what_is_free_is_lent_again() -> None:
    numbers = count()
    lending = Lending(lambda: next(numbers))
    owners: list[tuple[Owner, int]] = []
    for _ in range(100):
        owner, thing = Owner(), lending.take()
        lending.lend(owner, thing)
        owners.append((owner, thing))
    assert len({thing for _, thing in owners}) == 100
    freed = {thing for _, thing in owners[40:70]}
    del owners[40:70], owner
    gc.collect()
    again = [lending.take() for _ in range(30)]
    assert set(again) == freed and lending.take() == 100


def in_turn() -> Any:
    """A family whose module hands out streams as torch does."""
    numbers = count()
    made = lambda index: SimpleNamespace(stream_id=next(numbers) % POOLED)  # noqa: E731
    return SimpleNamespace(module=SimpleNamespace(Stream=made), more_queues="install more")


@pytest.mark.invariant("C4")
def test_of_torchs_streams_those_in_use_are_passed_over() -> None:
    family = in_turn()
    live: set[int] = set()
    for _ in range(POOLED):
        live.add(pooled_queue(family, 0, live.__contains__).stream_id)
    assert len(live) == POOLED
    with pytest.raises(CapabilityError, match="all of them are in use"):
        pooled_queue(family, 0, live.__contains__)
    live.discard(7)
    assert pooled_queue(family, 0, live.__contains__).stream_id == 7


@pytest.mark.invariant("C4", control=True)
def test_without_looking_they_repeat() -> None:
    family = in_turn()
    found = [pooled_queue(family, 0, lambda number: False).stream_id for _ in range(POOLED + 1)]
    assert len(set(found)) == POOLED
