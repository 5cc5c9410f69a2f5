"""Groups of ranks: one alone, a size without channels, ranks that differ; and the op that can be traced."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch

import halma
from halma.hal.arena.plan import plan_channels
from halma.hal.collectives.group import Group, NoArena
from halma.hal.collectives.remembered import MOST
from halma.hal.decisions import decisions
from halma.hal.errors import CollectiveError
from halma.hal.testing.conformance.capturing import captured
from halma.hal.testing.ranks import RankPools
from tests.cpu.collectives import programs


def test_one_rank_alone_needs_nobody() -> None:
    group = halma.collectives(world=None, backend="cpu")
    arena = group.arena(plan_channels(largest=1024))
    assert isinstance(arena, NoArena) and (group.rank, group.size) == (0, 1)
    comm = group.communicator(arena)
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_reduce(x) is x and x.tolist() == [[0, 1, 2], [3, 4, 5]]
    out, residual = torch.empty_like(x), torch.ones_like(x)
    comm.all_reduce_rmsnorm(x, residual, torch.ones(3), out=out)
    assert residual.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert torch.allclose(out, residual / residual.square().mean(-1, keepdim=True).add(1e-6).sqrt())
    gathered = torch.empty((1, 2, 3))
    assert comm.all_gather(x, out=gathered)[0].tolist() == x.tolist()
    comm.broadcast(x, root=0)
    comm.barrier()
    comm.poll()
    comm.rearm()
    with torch.no_grad():
        step = captured(group.backend, lambda _: comm.all_reduce(x, out))
        x.fill_(4.0)
        step.replay()
    assert out.tolist() == [[4.0] * 3] * 2 and comm.flight() == []


def test_a_size_without_channels_works_by_the_vendor_with_the_reason(halma_rank_pools: RankPools) -> None:
    why = "3 ranks: channels are made for 2, 4, 6, 8"
    for found in halma_rank_pools[3].run(programs.three_ranks):
        assert found["no arena"] == why and found["reasons"] == [why] and found["chosen"] == ["vendor"]
        assert (found["sum"], found["replayed"], found["residual"], found["norm"]) == (6.0, 18.0, 7.0, 1.0)
        assert found["gathered"] == [[0, 7], [1, 7], [2, 7]] and found["told"] == [2]
        assert "HALMA_STRICT forbids it" in found["strict"] and why in found["strict"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("setting", "differ in HALMA_CHECKED"),
        ("plan", "ranks do not agree on the arena's plan"),
        ("epoch", "ranks do not agree on the channel"),
        ("member", "no member of the group"),
        ("host", "the ranks are on 2 machines"),
    ],
)
def test_ranks_that_differ_are_told_before_anything_is_made(halma_rank_pools: RankPools, how: str, says: str) -> None:
    for said in halma_rank_pools[2].run(programs.unlike_ranks, how):
        assert says in said
    assert halma_rank_pools[2].run(programs.unlike_ranks, "alike") == ["", ""]


def test_without_torch_distributed_a_group_says_how_to_start() -> None:
    with pytest.raises(CollectiveError, match="torchrun"):
        halma.collectives(world=object(), backend="cpu")


def test_what_is_no_group_is_refused(halma_rank_pools: RankPools) -> None:
    for said in halma_rank_pools[2].run(programs.unlike_ranks, "no group"):
        assert "that is no group of ranks" in said and "'x'" in said


def test_none_is_no_group_among_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed.group.WORLD is None before init_process_group(): every rank would add up its own alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CollectiveError, match="init_process_group"):
        halma.collectives(world=None, backend="cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert halma.collectives(world=None, backend="cpu").size == 1


@pytest.mark.parametrize("arena", [None, object()], ids=["none", "other"])
def test_a_communicator_needs_an_arena_or_the_reason_why_there_is_none(arena: Any) -> None:
    group = halma.collectives(world=None, backend="cpu")
    with pytest.raises(CollectiveError, match="needs an arena"):
        group.communicator(arena)
    group.communicator(group.arena(plan_channels(largest=64))).barrier()


def test_a_session_takes_what_stands_for_an_arena(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[3].run(programs.session_without_an_arena):
        assert found["replayed"] == [13.0, 13.0]
        assert "ranks do not agree on what to capture" in found["differs"]


@pytest.mark.invariant("C7")
def test_a_call_that_an_interrupt_left_is_a_fault_and_not_an_answer_to_the_next(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(programs.interrupted, "waiting")
    assert first["left"] and first["fault"].startswith("LEFT") and "an exception on rank 0" in first["fault"]
    assert second["fault"].startswith("TIMEOUT") and "rank 0" in second["fault"]
    assert first["after"] == second["after"] == 21.0


@pytest.mark.invariant("C7", control=True)
def test_without_an_interrupt_the_next_call_is_right(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[2].run(programs.interrupted, "never"):
        assert (found["left"], found["fault"], found["next"], found["after"]) == (False, "", 21.0, 21.0)


@pytest.mark.invariant("G26")
@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "ValueError: layer 3 is missing"), ("closes", "it closed its session before sealing it")],
    ids=["raises", "closes"],
)
def test_a_rank_that_leaves_before_the_seal_is_named_to_those_who_wait(
    halma_rank_pools: RankPools, how: str, says: str
) -> None:
    waited, left = halma_rank_pools[2].run(programs.left_before_the_seal, how)
    assert waited["kind"] == "RankLeft" and "rank 1 (global rank 1" in waited["said"] and says in waited["said"]
    assert waited["seconds"] < 45  # at once, and not by the bound, 50, on a machine however busy
    assert left["said"] == ("layer 3 is missing" if how == "raises" else "")
    assert waited["next"] == left["next"] == 7.0


@pytest.mark.invariant("G26", control=True)
def test_ranks_that_stay_seal_and_replay(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[2].run(programs.left_before_the_seal, "never"):
        assert (found["said"], found["next"]) == ("", 7.0)


def test_ten_thousand_shapes_take_no_more_memory_than_a_thousand() -> None:
    """One rank alone, so that what grows is what is kept of calls."""
    comm = Group(None, halma.backend("cpu")).communicator(NoArena("one rank"))
    x = torch.zeros(3)

    def grown(steps: range) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for step in steps:
            decisions.clear()  # a log of its own, with a bound of its own
            with comm.step(step):
                comm.all_reduce(x[: step % 4])
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        first, later = grown(range(2 * MOST)), grown(range(2 * MOST, 10_000))
    finally:
        tracemalloc.stop()
        comm.close()
    assert first > 100 * MOST  # so it would be seen
    assert later < first / 10


def test_a_graph_among_many_shapes_stays_right_and_named(halma_rank_pools: RankPools) -> None:
    first, second = halma_rank_pools[2].run(programs.many_shapes)
    assert first["sum"] == second["sum"] == 3.0
    assert first["fault"] == "TIMEOUT" and "all_reduce of 20 bytes of float32 (the graph's)" in first["text"]


FORKED = ("call", "replay", "rearm", "set_bound", "own", "exchange", "arena")


def test_a_forked_child_is_refused_whatever_it_asks_for(halma_rank_pools: RankPools) -> None:
    first, _ = halma_rank_pools[2].run(programs.forked)
    for what in FORKED:
        assert "belongs to the process that made it, and this is a fork of it" in first[what], (what, first[what])


def test_the_parent_of_a_fork_goes_on(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[2].run(programs.forked):
        assert (found["first"], found["after"]) == (3.0, 3.0)


@pytest.mark.invariant("C6")
def test_checked_mode_compares_calls_of_the_vendor_too(halma_rank_pools: RankPools) -> None:
    for said in halma_rank_pools[2].run(programs.vendor_calls_that_differ):
        assert "of float64, by vendor" in said and "of int64, by vendor" in said


def test_the_op_can_be_traced_and_captured(halma_rank_pools: RankPools) -> None:
    for found in halma_rank_pools[2].run(programs.traced):
        assert found["fake"] == ("FakeTensor", (4, 8), "torch.float32")
        assert found["traced"][1] == "halma.all_reduce.default" and found["made"] <= 1
        assert (found["sum"], found["out"], found["replayed"]) == (7.0, 3.0, 3.0)
        assert found["node"] == ["collective:main"]
        assert "is gone" in found["dead"] and found["forgotten"]


@pytest.mark.nightly
def test_plain_calls_can_be_compiled(halma_rank_pools: RankPools) -> None:
    for rank, found in enumerate(halma_rank_pools[2].run(programs.compiled_calls, seconds=200.0)):
        barrier = found.pop("waits")
        assert found == {
            "in_place": [12.0, 12.0],
            "apart": [7.0 + rank, 7.0 + rank],
            "gathered": [10.0, 10.0],
            "sent": [8.0, 8.0],
            "normed": [4.0, 4.0],
            "x": 1.0 + rank,
        }
        assert "Communicator.barrier() cannot be part" in barrier and "torch.ops.halma.all_reduce" in barrier


@pytest.mark.nightly
def test_the_op_compiles_into_one_graph(halma_rank_pools: RankPools) -> None:
    assert halma_rank_pools[2].run(programs.compiled, seconds=200.0) == [9.0, 9.0]


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("flags", [False, True], ids=["words", "flags"])
def test_stale_flags_are_scrubbed_long_before_the_epochs_wrap(halma_rank_pools: RankPools, flags: bool) -> None:
    for found in halma_rank_pools[2].run(programs.scrubbed, flags):
        stale = dict(found)
        assert list(stale) == [(1 << 20) - 3 + step for step in range(6)]
        assert stale[1 << 20] == stale[(1 << 20) + 1] == 0, "of this call's own buffer nothing older is left"
        assert sum(stale.values()) > 0, "there was something to scrub"
