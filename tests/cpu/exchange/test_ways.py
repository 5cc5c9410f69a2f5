"""Exchanges of CPU processes: torch.distributed's way, two machines, stale flags, interrupts, guard zones."""

from __future__ import annotations

import pytest

from halma.hal.collectives.exchange_contract import Stage
from halma.hal.collectives.exchange_tuning import Tuning
from halma.hal.testing.conformance.exchange_programs import one_rank_stays_away
from halma.hal.testing.ranks import RankPools
from tests.cpu.exchange import programs


@pytest.mark.parametrize(
    ("size", "why"), [pytest.param(3, None, marks=pytest.mark.nightly), (2, "because"), (4, "because")]
)
def test_where_memory_is_not_shared_torch_distributed_does_the_same(
    halma_rank_pools: RankPools, size: int, why: str | None
) -> None:
    for found in halma_rank_pools[size].run(programs.by_the_vendor, why, seconds=200.0):
        assert (why or "3 ranks: channels are made for 2, 4, 6, 8") in found.pop("why")
        assert found == {"bf16": [], "fp8": [], "fp64": [], "replays": [], "kept": []}


@pytest.mark.invariant("F11")
def test_two_machines_of_two_do_not_take_the_row_of_one_of_four(halma_rank_pools: RankPools) -> None:
    for why, key, tuning in halma_rank_pools[4].run(programs.on_two_machines):
        assert "2 machines" in why and key.startswith("2 x 2 ranks") and tuning == Tuning(2)


@pytest.mark.invariant("F11")
def test_a_row_that_cannot_be_is_told_to_all_ranks(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(programs.unlike_rows)
    assert "other launch numbers" in first and "parts 3: 1, 2, 4 or 8" in first
    assert "parts 3: 1, 2, 4 or 8" in second


def test_one_rank_alone(halma_rank_pools: RankPools) -> None:
    assert halma_rank_pools[1].run(programs.one_alone) == [True]


@pytest.mark.invariant("C2")
def test_stale_flags_are_scrubbed_long_before_the_epochs_wrap(halma_rank_pools: RankPools) -> None:
    for words, flags, right in halma_rank_pools[2].run(programs.stale_flags):
        assert words == [0, 1 << 20] and set(flags) <= {0, 1 << 20} and right


@pytest.mark.invariant("C7")
def test_a_dispatch_that_an_interrupt_left_is_a_fault(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(programs.interrupted, "waiting")
    assert first["left"] and second["fault"] == "TIMEOUT" and first["after"] and second["after"]


@pytest.mark.invariant("C7", control=True)
def test_without_an_interrupt_there_is_none(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[2].run(programs.interrupted, "never"):
        assert found == {"left": False, "fault": "", "after": True}


@pytest.mark.invariant("A7")
def test_a_guard_zone_that_was_written_to_is_told(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(programs.guard_zone)
    assert "a guard zone of the exchange was written to" in first
    assert "a guard zone" in second


@pytest.mark.invariant("F16")
def test_the_flag_that_is_missing_is_named(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(one_rank_stays_away, "cpu", 1, "combine")
    assert first["record"].algorithm == Stage.BACK and "waiting for a token's sum on its way back" in first["fault"]
    assert first["after"] and second["after"]
