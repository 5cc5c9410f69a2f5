"""How ranks come by an arena, and how they leave it: one plan, memory of all or of none, a barrier before every end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from halma.hal.arena.arena import Arena
from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES
from halma.hal.arena.plan import ArenaPlan, plan_channels, plan_slots
from halma.hal.backend import Backend
from halma.hal.errors import ArenaError, CollectiveError, RankError
from halma.hal.graph.ladder import decode_ladder
from halma.hal.testing.conformance.sharing import Ended, Machine, MirrorRanks, ThreadGroup, ThreadRanks

PLAN = plan_channels(largest=8192, lanes="both", atomicity=8)
SLOTS = plan_slots(decode_ladder(2), calls_per_descriptor=3, bytes_per_token=512)
NAMES = ("rank 5 on alpha", "rank 2 on beta", "rank 9 on alpha", "rank 4 on beta")
"""Ranks of a group as they are called outside of it: no order, no 0."""


@pytest.fixture
def machine(halma_backend: Backend) -> Machine:
    return Machine(halma_backend)


def on_ranks(work: Callable[[ThreadRanks], Any], size: int = 2) -> list[Ended[Any]]:
    return ThreadGroup(NAMES[:size]).run(work)


def made(machine: Machine, ranks: ThreadRanks, plan: ArenaPlan = PLAN, checked: bool = False, **faults: Any) -> Arena:
    return Arena.create(machine.on(ranks.rank, **faults), ranks, plan, checked=checked)


# -- one plan on all ranks -------------------------------------------------------------------------------------


@pytest.mark.invariant("A4")
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (plan_channels(largest=8448, lanes="both", atomicity=8), "messages of up to 8,448 bytes"),
        (plan_channels(largest=8192, lanes="both", atomicity=4), "channel main, words"),
        (plan_channels(largest=8192, lanes="both", atomicity=8, limit=1 << 20), "limit: 1048576"),
        (SLOTS, "slots"),
    ],
    ids=["largest", "lanes", "limit", "kind"],
)
def test_ranks_with_different_plans_allocate_nothing(machine: Machine, other: ArenaPlan, says: str) -> None:
    ended = on_ranks(lambda ranks: made(machine, ranks, PLAN if ranks.rank == 0 else other))
    for one in ended:
        assert isinstance(one.error, ArenaError) and "ranks do not agree on the arena's plan" in one.message
        assert says in one.message and "rank 5 on alpha: " in one.message and "rank 2 on beta: " in one.message
    assert not machine.when("allocate")


@pytest.mark.invariant("A4")
def test_a_plan_that_does_not_fit_on_one_rank_is_no_plan_on_any(machine: Machine) -> None:
    tight = plan_channels(largest=8192, lanes="both", atomicity=8, limit=65536)
    ended = on_ranks(lambda ranks: made(machine, ranks, PLAN if ranks.rank else tight))
    assert "the messages do not fit the arena plan" in ended[0].message
    assert "rank 5 on alpha failed at \"the arena's plan\"" in ended[1].message
    assert "65,536 allowed" in ended[1].message and not machine.when("allocate")


@pytest.mark.invariant("A4", control=True)
@pytest.mark.parametrize("plan", [PLAN, SLOTS], ids=["channel", "slots"])
def test_ranks_with_one_plan_have_the_same_offsets(machine: Machine, plan: ArenaPlan) -> None:
    def work(ranks: ThreadRanks) -> tuple[str, int]:
        arena = made(machine, ranks, plan)
        found = arena.plan.fingerprint, arena.own.tensor.numel()
        arena.close()
        return found

    found = {one.get() for one in on_ranks(work, size=4)}
    assert len(found) == 1 and found.pop()[1] == plan.bind(4, 8).nbytes and machine.held == 0


# -- memory that cannot be shared ------------------------------------------------------------------------------


@pytest.mark.invariant("A8")
def test_memory_that_cannot_be_exported_is_refused_on_all_ranks_before_anything_is_allocated(machine: Machine) -> None:
    reason = "expandable segments are on"
    ended = on_ranks(lambda ranks: made(machine, ranks, not_exportable=reason if ranks.rank else None))
    for one in ended:
        assert isinstance(one.error, ArenaError) and reason in one.message
    assert "rank 2 on beta failed" in ended[0].message and not machine.when("allocate")


@pytest.mark.invariant("A8", control=True)
def test_memory_that_can_be_exported_is_asked_about_and_used(machine: Machine) -> None:
    for one in on_ranks(lambda ranks: made(machine, ranks).close() or "closed"):
        assert one.get() == "closed"
    assert max(machine.when("ask")) < min(machine.when("allocate"))


# -- zero, fill, barrier, first use ----------------------------------------------------------------------------


@pytest.mark.invariant("A10")
@pytest.mark.parametrize("plan", [PLAN, SLOTS], ids=["channel", "slots"])
def test_every_rank_finds_every_memory_as_the_plan_says_at_its_first_use(machine: Machine, plan: ArenaPlan) -> None:
    def work(ranks: ThreadRanks) -> list[bool]:
        arena = made(machine, ranks, plan)
        found = [bool((peer.tensor.cpu() == expected(arena.plan)).all()) for peer in arena.peers]
        ranks.exchange("looked", None)
        arena.peers[1 - ranks.rank].tensor[arena.layout().control] = 1
        arena.close()
        return found

    for one in on_ranks(work):
        assert one.get() == [True, True]


def expected(plan: ArenaPlan) -> torch.Tensor:
    """Zeros, but for lanes with a fill and guard zones."""
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    for lane in plan.channels[0].lanes.values():
        memory[lane.offset : lane.offset + lane.nbytes] = lane.fill
    for offset in plan.guards:
        memory[offset : offset + GUARD_BYTES] = GUARD_BYTE
    return memory


@pytest.mark.invariant("A10")
def test_no_rank_has_an_arena_before_all_have_filled_and_mapped_theirs(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> Arena:
        arena = made(machine, ranks)
        machine.note("use", ranks.rank)
        return arena

    arenas = [one.get() for one in on_ranks(work, size=4)]
    assert min(machine.when("use")) > max(machine.when("map")) and len(machine.when("map")) == 12
    assert min(machine.when("map")) > max(machine.when("allocate")) and len(arenas) == 4


@pytest.mark.invariant("A10", control=True)
def test_what_a_rank_writes_its_peers_read(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> list[int]:
        arena = made(machine, ranks)
        at = arena.layout().headers.offset
        for peer in arena.peers:
            peer.tensor[at + ranks.rank] = 10 + ranks.rank
        ranks.exchange("written", None)
        found = [int(arena.own.tensor[at + rank]) for rank in range(2)]
        arena.close()
        return found

    for one in on_ranks(work):
        assert one.get() == [10, 11]


@pytest.mark.invariant("A10")
def test_a_channel_that_starts_again_is_as_before_its_first_use(machine: Machine) -> None:
    arena = Arena.create(machine.on(0), MirrorRanks(), PLAN)
    for lane in arena.layout().lanes.values():
        arena.own.tensor[lane.offset : lane.offset + lane.nbytes] = 0x11
    arena.refill("main")
    assert bool((arena.own.tensor.cpu() == expected(arena.plan)).all())
    arena.close()


# -- failures --------------------------------------------------------------------------------------------------


@pytest.mark.invariant("A4")
@pytest.mark.parametrize(
    ("fault", "error", "kind"),
    [
        ("exportable", MemoryError("out of memory: 12 bytes are free"), ArenaError),
        ("open", CollectiveError("the handle's owner is gone"), CollectiveError),
    ],
)
def test_one_ranks_failure_is_seen_by_all_and_leaves_nothing_allocated(
    machine: Machine, fault: str, error: Exception, kind: type[Exception]
) -> None:
    faults: dict[str, Any] = {fault: error}
    ended = on_ranks(lambda ranks: made(machine, ranks, **(faults if ranks.rank == 2 else {})), size=4)
    for rank, one in enumerate(ended):
        assert isinstance(one.error, kind if rank == 2 else ArenaError) and str(error) in one.message
        assert rank == 2 or "rank 9 on alpha failed at" in one.message
    assert machine.held == 0
    if machine.when("unmap"):
        assert min(machine.when("free")) > max(machine.when("unmap"))


STAGES = {"memory": "exportable", "peers": "open"}


@pytest.mark.parametrize("stage", ["plan", *STAGES])
def test_a_rank_that_ends_during_start_up_is_named_and_nothing_stays_allocated(machine: Machine, stage: str) -> None:
    class Gone(BaseException):
        pass

    def work(ranks: ThreadRanks) -> Any:
        if ranks.rank == 0:
            return made(machine, ranks)
        faults: dict[str, Any] = {STAGES.get(stage, ""): Gone()}
        try:
            return "gone" if stage == "plan" else made(machine, ranks, **faults)
        except Gone:
            return "gone"

    first, second = on_ranks(work)
    assert second.get() == "gone"
    assert isinstance(first.error, RankError) and "rank 2 on beta did not come" in first.message
    assert machine.held == 0


# -- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.invariant("A9")
def test_nobody_unmaps_before_all_are_at_the_end_or_frees_before_all_have_unmapped(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> bool:
        arena = made(machine, ranks)
        machine.note("end", ranks.rank)
        arena.close()
        return arena.closed

    assert all(one.get() for one in on_ranks(work, size=4))
    assert min(machine.when("unmap")) > max(machine.when("end"))
    assert min(machine.when("free")) > max(machine.when("unmap"))
    assert machine.held == 0


@pytest.mark.invariant("A9", control=True)
def test_an_arena_can_be_made_again_after_all_have_left_it(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> list[int]:
        sizes: list[int] = []
        for plan in (PLAN, SLOTS, PLAN):
            arena = made(machine, ranks, plan)
            sizes.append(arena.own.tensor.numel())
            arena.close()
        return sizes

    first, second = (one.get() for one in on_ranks(work))
    assert first == second and first[0] == first[2] != first[1] and machine.held == 0


@pytest.mark.invariant("A9")
def test_closing_twice_is_closing_once(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> int:
        arena = made(machine, ranks)
        arena.close()
        before = ranks.exchanges
        arena.close()
        with pytest.raises(ArenaError, match="the arena is closed"):
            _ = arena.own
        return ranks.exchanges - before

    assert [one.get() for one in on_ranks(work)] == [0, 0] and machine.held == 0


@pytest.mark.invariant("A9")
def test_a_rank_that_never_comes_to_the_end_is_named_and_the_memory_is_freed(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> str:
        arena = made(machine, ranks)
        if ranks.rank == 0:
            arena.close()
        return "left"

    first, second = on_ranks(work)
    assert isinstance(first.error, RankError) and "rank 2 on beta did not come" in first.message
    assert second.get() == "left" and machine.held == 2  # what the rank that left still holds


# -- guard zones -----------------------------------------------------------------------------------------------


def places(plan: ArenaPlan) -> list[tuple[int, str]]:
    """A byte right behind each lane or slot, and how the message names what stands before it."""
    found = [(lane.offset + lane.nbytes, f"main.{name}") for name, lane in plan.channels[0].lanes.items()]
    if plan.slots is not None:
        for run in plan.slots.runs.values():
            found += [(run.box(call).offset + run.nbytes, str(run.descriptor)) for call in range(run.calls)]
    return found


@pytest.mark.invariant("A7")
@pytest.mark.parametrize("plan", [PLAN, SLOTS], ids=["channel", "slots"])
def test_a_write_past_any_lane_or_slot_is_found_and_placed(machine: Machine, plan: ArenaPlan) -> None:
    arena = Arena.create(machine.on(0), MirrorRanks(), plan)
    for offset, name in places(arena.plan):
        # Lanes end where 256 bytes do not: the zone begins at the next such place.
        offset = -(-offset // 256) * 256
        arena.own.tensor[offset] = 7
        with pytest.raises(ArenaError, match=f"byte {offset}, behind .*0x07 where 0xa5") as caught:
            arena.check_guards()
        assert name in str(caught.value)
        arena.own.tensor[offset] = GUARD_BYTE
    arena.close()


@pytest.mark.invariant("A7")
def test_a_damaged_zone_of_one_rank_is_told_to_all_at_the_end_and_nothing_stays_allocated(machine: Machine) -> None:
    def work(ranks: ThreadRanks) -> None:
        arena = made(machine, ranks, checked=True)
        if ranks.rank == 1:
            arena.own.tensor[arena.plan.guards[3] + 5] = 0
        arena.close()

    first, second = on_ranks(work)
    assert "a guard zone of the arena was written to" in second.message
    assert "rank 2 on beta failed at \"the arena's end\"" in first.message and "0x00 where 0xa5 was" in first.message
    assert machine.held == 0


@pytest.mark.invariant("A7", control=True)
def test_writes_that_fill_every_lane_and_slot_leave_the_zones_alone(machine: Machine) -> None:
    for plan in (PLAN, SLOTS):
        arena = Arena.create(machine.on(0), MirrorRanks(), plan, checked=True)
        for lane in arena.layout().lanes.values():
            arena.own.tensor[lane.offset : lane.offset + lane.nbytes] = 1
        if arena.plan.slots is not None:
            for run in arena.plan.slots.runs.values():
                for call in range(run.calls):
                    offset = run.box(call).offset
                    arena.own.tensor[offset : offset + run.nbytes + run.stride] = 1
        arena.check_guards()
        arena.close()
    assert machine.held == 0


# -- whatever ranks are called ---------------------------------------------------------------------------------


@pytest.mark.invariant("A13")
def test_ranks_are_those_of_the_group_whatever_they_are_called_outside(machine: Machine) -> None:
    assert _who_writes_where(machine, NAMES) == [([1, 2, 3, 4], True)] * 4


@pytest.mark.invariant("A13", control=True)
def test_a_group_that_is_the_world_is_no_different(machine: Machine) -> None:
    assert _who_writes_where(machine, [f"rank {rank}" for rank in range(4)]) == [([1, 2, 3, 4], True)] * 4


def _who_writes_where(machine: Machine, names: Sequence[str]) -> list[tuple[list[int], bool]]:
    """On each rank: what its peers wrote into the boxes that are theirs, and whether it is its own peer."""

    def work(ranks: ThreadRanks) -> tuple[list[int], bool]:
        arena = made(machine, ranks)
        at = arena.layout().headers
        for peer in arena.peers:
            peer.tensor[at.at(0, ranks.rank)] = ranks.rank + 1
        ranks.exchange("written", None)
        found = [int(arena.own.tensor[at.at(0, rank)]) for rank in range(ranks.size)]
        same = arena.peers[ranks.rank] is arena.own
        arena.close()
        return found, same

    return [one.get() for one in ThreadGroup(names).run(work)]


@pytest.mark.invariant("A1")
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_sizes_without_kernels_are_refused_with_the_path_that_is_left(machine: Machine, size: int) -> None:
    with pytest.raises(ArenaError, match=f"not for {size}: collectives take the vendor's library"):
        Arena.create(machine.on(0), MirrorRanks(size), PLAN)
    assert not machine.log
