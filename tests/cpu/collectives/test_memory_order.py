"""The CPU's table of memory order, and a stress of this machine's row."""

from __future__ import annotations

import platform

import pytest

from halma.backends.cpu.memory_order import TABLE, memory_order, store_atomicity, why_unordered
from halma.hal.capabilities import UNKNOWN
from halma.hal.testing.ranks import RankPools
from tests.cpu.collectives import stores as programs


@pytest.mark.invariant("C13")
@pytest.mark.invariant("C19")
def test_a_store_of_eight_bytes_is_never_seen_in_part(halma_rank_pools: RankPools) -> None:
    assert halma_rank_pools[2].run(programs.torn_words, 1.0, True) == [0, 0]


@pytest.mark.invariant("C13", control=True)
@pytest.mark.invariant("C19", control=True)
def test_two_stores_of_four_bytes_are(halma_rank_pools: RankPools) -> None:
    """The reader would see a store in part, if there were one."""
    assert halma_rank_pools[2].run(programs.torn_words, 1.0, False)[1] > 0


@pytest.mark.invariant("C13")
def test_a_flag_is_not_seen_before_its_data(halma_rank_pools: RankPools) -> None:
    assert halma_rank_pools[2].run(programs.early_flags, 2000, True) == [0, 0]


@pytest.mark.invariant("C13", control=True)
def test_a_flag_that_goes_first_is(halma_rank_pools: RankPools) -> None:
    assert halma_rank_pools[2].run(programs.early_flags, 50, False)[1] == 50


@pytest.mark.invariant("C13")
def test_a_machine_without_a_row_has_no_channel() -> None:
    assert memory_order("riscv64") is None and store_atomicity("riscv64") is UNKNOWN
    assert "riscv64" in (why_unordered("riscv64") or "")
    assert all(row.whole == 8 and row.why for row in TABLE.values())
    assert why_unordered() is None or platform.machine() not in TABLE


@pytest.mark.invariant("C13")
def test_the_fence_of_other_machines_can_be_made_anywhere() -> None:
    TABLE["aarch64"].fence()
    assert TABLE["x86_64"].fence is not TABLE["aarch64"].fence
