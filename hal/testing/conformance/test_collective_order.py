"""Order around calls: kernels loaded before the first, headers of every kind, one path in a graph, sessions."""

from __future__ import annotations

import pytest

from halma.hal.backend import GraphNode
from halma.hal.collectives.order import prove_path
from halma.hal.errors import CollectiveError
from halma.hal.testing.conformance import collective_faults
from halma.hal.testing.conformance import collective_order as programs
from halma.hal.testing.ranks import RankPools

NODES = [GraphNode(name, (("call", f"call {position}"),), f"line {position}") for position, name in enumerate(
    ["collective:main", "aten.add", "collective:main", "collective:other", "collective:main"]
)]  # fmt: skip


@pytest.mark.invariant("C4")
@pytest.mark.parametrize(
    "edges",
    [[(0, 1), (1, 3), (3, 4), (0, 2)], [(0, 1), (1, 2), (0, 4)], [], [(2, 0), (2, 4)]],
    ids=["fork", "no join", "none", "backwards"],
)
def test_two_calls_that_no_path_joins_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(CollectiveError, match="may run in any order") as caught:
        prove_path(NODES, edges, "main")
    assert any("line" in fact for fact in caught.value.found)


@pytest.mark.invariant("C4", control=True)
def test_a_path_over_other_nodes_is_one() -> None:
    assert prove_path(NODES, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], "main") == 3
    assert prove_path(NODES, [], "other") == 1 and prove_path(NODES, [], "nobody") == 0


@pytest.mark.invariant("C4")
def test_unordered_calls_end_a_capture(ranks: RankPools) -> None:
    """Where a backend gives edges or clocks; elsewhere a capture admits one stream, which is shown above."""
    if ranks.backend != "cpu":
        pytest.skip("edges are read by the cpu's tape; here a capture admits one stream")
    for said in ranks[2].run(collective_faults.unordered_calls, ranks.backend):
        assert "in no order" in said or "may run in any order" in said


@pytest.mark.invariant("C11")
def test_warm_up_in_a_capture_context_gives_real_sums(ranks: RankPools) -> None:
    assert ranks[2].run(programs.warm_up_in_a_capture_context, ranks.backend) == [[True, True]] * 2


@pytest.mark.invariant("C11", control=True)
@pytest.mark.parametrize("slots", [False, True], ids=["channel", "slots"])
def test_a_ladder_captured_in_a_session_replays_right(ranks: RankPools, slots: bool) -> None:
    for found in ranks[2].run(programs.captured_ladder, ranks.backend, slots, None):
        assert found["refused"] == "" and len(found["right"]) == 12 and all(found["right"])
        assert found["slots"] == (9 if slots else 0)


@pytest.mark.invariant("C12")
@pytest.mark.parametrize("slots", [False, True], ids=["channel", "slots"])
def test_a_rank_that_captures_another_shape_is_found_before_any_replay(ranks: RankPools, slots: bool) -> None:
    for found in ranks[2].run(programs.captured_ladder, ranks.backend, slots, 1):
        by_ledger = "all_reduce of 384 bytes" in found["refused"] and "all_reduce of 512 bytes" in found["refused"]
        # where a warm-up runs for real, its header words tell first
        assert by_ledger or (ranks.backend != "cpu" and "makes another call" in found["refused"])


@pytest.mark.invariant("C15")
@pytest.mark.parametrize("size", [2, 4])
def test_every_call_brings_a_header_from_every_peer(all_ranks: RankPools, size: int) -> None:
    kinds = ["broadcast", "nothing", "barrier", "broadcast"]
    for found in all_ranks[size].run(programs.headers_after, all_ranks.backend, kinds):
        assert found == [(kind, [(0, 0, 0)] * (size - 1)) for kind in kinds]


@pytest.mark.invariant("C15", control=True)
def test_a_sum_brings_one_too(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.headers_after, all_ranks.backend, ["sum"]) == [[("sum", [(0, 0, 0)])]] * 2


@pytest.mark.invariant("C18")
def test_every_rank_has_loaded_before_the_first_call(all_ranks: RankPools) -> None:
    for events in all_ranks[2].run(programs.loaded_before_the_first_call, all_ranks.backend):
        assert events.index("load") < events.index("all have") < events.index("launch")


@pytest.mark.invariant("C18", control=True)
def test_loading_happens_once(all_ranks: RankPools) -> None:
    for events in all_ranks[2].run(programs.loaded_before_the_first_call, all_ranks.backend):
        assert events == ["load", "all have", "launch"]
