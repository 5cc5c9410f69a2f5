"""Where a peer's flag lands, with every rank's arena in this process: no race is needed to see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.backends.cpu.channel_memory import ChannelMemory
from halma.backends.cpu.memory_order import TABLE
from halma.hal.arena.plan import plan_channels
from halma.hal.collectives.contract import ChannelSite

PHASE = 0


@pytest.fixture
def sides() -> tuple[ChannelMemory, ChannelMemory]:
    """Two ranks' views of two arenas."""
    plan = plan_channels(largest=4096, size=2)
    layout = plan.layout("main")
    arenas: list[Any] = [SimpleNamespace(tensor=torch.zeros(plan.nbytes, dtype=torch.uint8)) for _ in range(2)]
    recorder = torch.zeros(0, dtype=torch.uint8)
    sites = [ChannelSite(rank, 2, layout, arenas[rank], arenas, 10**9, False, recorder) for rank in range(2)]
    one, other = (ChannelMemory(site, TABLE["x86_64"]) for site in sites)
    return one, other


@pytest.mark.invariant("C8")
def test_a_peer_one_call_ahead_leaves_the_flag_that_is_awaited(sides: tuple[ChannelMemory, ChannelMemory]) -> None:
    waiting, ahead = sides
    lane = waiting.layout.stage_flags
    assert lane is not None
    for epoch in (4, 5, 0xFFFFFFFE):
        ahead.send_flags(lane, PHASE, epoch)
        ahead.send_flags(lane, PHASE, epoch + 1)
        assert waiting.flag_of(lane, PHASE, 1, epoch) == epoch


@pytest.mark.invariant("C8", control=True)
def test_the_same_word_comes_back_two_calls_on(sides: tuple[ChannelMemory, ChannelMemory]) -> None:
    waiting, ahead = sides
    lane = waiting.layout.stage_flags
    assert lane is not None
    ahead.send_flags(lane, PHASE, 4)
    assert waiting.flag_of(lane, PHASE, 1, 4) == 4
    ahead.send_flags(lane, PHASE, 6)
    assert waiting.flag_of(lane, PHASE, 1, 6) == 6
