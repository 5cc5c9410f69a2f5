"""Dispatch and combine: slots, sums, order, faults and refusals of an exchange, on backends whose ranks share memory.

Programs run on rank processes (:mod:`halma.hal.testing.conformance.exchange_programs`); the oracle goes token by token.
"""

# pyright: basic
from __future__ import annotations

import re

import pytest

from halma.hal.backend import Backend
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.control import EPOCH_LAST
from halma.hal.collectives.exchange_contract import NOT_HERE, GivesExchange, Stage
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.testing.conformance import exchange_kept_programs as kept_programs
from halma.hal.testing.conformance import exchange_programs as programs
from halma.hal.testing.ranks import Lost, RankPools

WORLDS = (2, 4)
SECONDS = 240.0
SHORT = ("random", "holes", "one rank")


@pytest.fixture
def all_ranks(all_ranks: RankPools, halma_backend: Backend) -> RankPools:
    """As in conftest.py, where the backend exchanges by itself. Else torch.distributed does, which is not looked at
    here: over gloo, as in these processes, no capture admits it, and it has neither flags nor epochs."""
    gives, geometry = halma_backend.collectives, Geometry(2, max_tokens=24, hidden=512, top_k=4, experts=20)
    if not isinstance(gives, GivesExchange):
        pytest.skip(f"the backend {halma_backend.name} has no exchange over shared memory")
    reason = gives.no_exchange(geometry)
    if reason is not None:
        pytest.skip(reason)
    return all_ranks


@pytest.mark.invariant("F2")
@pytest.mark.invariant("F4")
@pytest.mark.invariant("F12")
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(("payload", "alignment"), [("bf16", 1), ("fp8", 16), ("fp32", 128)])
def test_slots_and_sums_are_those_of_the_definition(
    all_ranks: RankPools, size: int, payload: str, alignment: int
) -> None:
    """Random routing, nobody, one expert, the last expert, one rank; ragged tokens, none at all; both modes."""
    found = all_ranks[size].run(programs.slots_and_sums, all_ranks.backend, payload, alignment, seconds=SECONDS)
    assert found == [[]] * size


@pytest.mark.invariant("F4")
@pytest.mark.invariant("F12")
def test_eight_ranks_with_uneven_experts(all_ranks: RankPools) -> None:
    found = all_ranks[8].run(programs.slots_and_sums, all_ranks.backend, "bf16", 1, SHORT, seconds=SECONDS)
    assert found == [[]] * 8


@pytest.mark.invariant("F2", control=True)
@pytest.mark.invariant("F4", control=True)
@pytest.mark.invariant("F12", control=True)
def test_as_many_experts_for_every_rank(all_ranks: RankPools) -> None:
    found = all_ranks[2].run(programs.even_step, all_ranks.backend, seconds=SECONDS)
    assert found == [[]] * 2


@pytest.mark.invariant("F12")
def test_the_oracle_sees_a_swap_of_two_tokens(all_ranks: RankPools) -> None:
    """Two tokens with equal choices that change places, and a weight that changes its choice, show."""
    assert all_ranks[2].run(programs.swaps_are_seen, all_ranks.backend) == [[True] * 3] * 2


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_what_stands_in_rows_and_slots_that_nobody_has_changes_no_bit(all_ranks: RankPools, payload: str) -> None:
    """NaN, infinities and huge numbers in landing rows, scales, gaps and tail."""
    for found in all_ranks[2].run(programs.poisoned, all_ranks.backend, payload):
        assert len(found) == 4 and all(found.values()), found


@pytest.mark.invariant("F3", control=True)
def test_poison_in_a_row_that_counts_is_seen(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.poison_is_seen, all_ranks.backend) == [True] * 2


@pytest.mark.invariant("F13")
@pytest.mark.parametrize(("size", "replays"), [(2, 200), (4, 24)])
def test_replays_with_fresh_routing_each_followed_by_an_eager_step(ranks: RankPools, size: int, replays: int) -> None:
    """No sync between replay and step; a rank without tokens; host-synced and worst-token steps in turn."""
    found = ranks[size].run(programs.replays_and_eager, ranks.backend, "bf16", replays, (6, 0, 3), seconds=SECONDS)
    assert found == [[]] * size


@pytest.mark.invariant("F13")
def test_replays_of_a_ragged_list_on_eight_ranks(ranks: RankPools) -> None:
    found = ranks[8].run(programs.replays_and_eager, ranks.backend, "fp8", 6, programs.RAGGED, seconds=SECONDS)
    assert found == [[]] * 8


@pytest.mark.invariant("F13", control=True)
def test_one_replay(ranks: RankPools) -> None:
    assert ranks[2].run(programs.replays_and_eager, ranks.backend, "bf16", 1, (6,)) == [[]] * 2


@pytest.mark.invariant("F13")
@pytest.mark.parametrize("size", WORLDS)
def test_graphs_of_three_sizes_in_a_shuffled_order(ranks: RankPools, size: int) -> None:
    """With idle steps, where no token has an expert."""
    found = ranks[size].run(programs.shuffled_graphs, ranks.backend, 20, 0, seconds=SECONDS)
    assert found == [[]] * size


@pytest.mark.invariant("C2")
def test_epochs_of_an_exchange_wrap(ranks: RankPools) -> None:
    found = ranks[2].run(programs.shuffled_graphs, ranks.backend, 16, EPOCH_LAST - 16, seconds=SECONDS)
    assert found == [[]] * 2


@pytest.mark.invariant("C2", control=True)
def test_the_same_far_from_the_wrap(ranks: RankPools) -> None:
    assert ranks[2].run(programs.shuffled_graphs, ranks.backend, 4, 1000, seconds=SECONDS) == [[]] * 2


@pytest.mark.invariant("F1")
def test_worst_token_mode_waits_for_nothing_and_shares_no_counter(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.host_reads, all_ranks.backend) == [{"worst": 0, "host": 1, "shared": 0}] * 2


@pytest.mark.invariant("F1")
@pytest.mark.invariant("F2")
def test_what_cannot_be_captured_says_so(ranks: RankPools) -> None:
    reasons = {"half": "no combine", "host": "cannot be captured", "between": "no combine yet"}
    for found in ranks[2].run(programs.captured_wrong, ranks.backend):
        assert found.pop("good") == "True"
        assert {name: reasons[name] in text for name, text in found.items()} == dict.fromkeys(reasons, True)


@pytest.mark.invariant("F1", control=True)
def test_host_synced_steps_are_right_eagerly(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.slots_and_sums, all_ranks.backend, "bf16", 4, ("random",)) == [[]] * 2


@pytest.mark.invariant("F16")
@pytest.mark.parametrize(("where", "stages"), [("dispatch", {0}), ("combine", {0, Stage.BACK})])
def test_a_rank_that_stays_away_is_named_with_the_flag(all_ranks: RankPools, where: str, stages: set[int]) -> None:
    first, second = all_ranks[2].run(programs.one_rank_stays_away, all_ranks.backend, 1, where)
    record = first["record"]
    assert record.fault is Fault.TIMEOUT and record.peer == 1 and record.algorithm in stages
    # A flag that never came is 0; a sum has none, and its words stay as they were.
    assert record.expected == (1 if where == "dispatch" else 2)
    assert record.seen == (NOT_HERE if record.algorithm == Stage.BACK else 0)
    assert "rank 1" in first["fault"] and "within 0.4" in first["fault"] and f"{where} of" in first["fault"]
    assert first["stragglers"] == [1] and first.get("nan", True)
    assert first["after"] and second["after"]


@pytest.mark.invariant("F16", control=True)
def test_nobody_stays_away(all_ranks: RankPools) -> None:
    for found in all_ranks[2].run(programs.one_rank_stays_away, all_ranks.backend, 1, "nowhere"):
        assert (found["fault"], found["nan"], found["after"]) == ("", False, True)


@pytest.mark.invariant("F16")
def test_a_rank_that_dies_ends_the_others_with_its_name(all_ranks: RankPools) -> None:
    found = all_ranks[4].run(programs.one_rank_dies, all_ranks.backend, 2, lost=[2], seconds=60.0)
    assert isinstance(found.pop(2), Lost)
    assert all("rank 2" in text and "did not do its part" in text for text in found), found


@pytest.mark.invariant("C12")
def test_ranks_whose_bounds_differ_are_told(all_ranks: RankPools) -> None:
    for text, after in all_ranks[2].run(programs.other_calls, all_ranks.backend):
        assert text.startswith("MISMATCH") and "makes another call" in text and after == "True"


@pytest.mark.invariant("F2")
def test_bad_calls_are_refused_before_anything_is_sent(all_ranks: RankPools) -> None:
    reasons = {
        "too many": "25 tokens",
        "above the bound": "this call's bound is 3",
        "no bound": "1 to 24 tokens",
        "a bound above": "1 to 24 tokens",
        "dtype": "float32[4, 256]",
        "hidden": "bfloat16[4, 8]",
        "choices": "int64[4, 1]",
        "strided": "not contiguous",
        "ids outside": "ids from 20 to 20",
        "ids below": "experts 0..19",
        "twice": "no combine yet",
        "short": "combine cannot take parts",
        "wrong out": "combine cannot take out",
        "parts dtype": "float16",
        "no struct": "Tensor",
        "again": "not handed out last",
        "closed": "is closed",
    }
    for found in all_ranks[2].run(programs.refusals, all_ranks.backend):
        assert found.pop("good") == "True"
        assert {name: reasons[name] in text for name, text in found.items()} == dict.fromkeys(reasons, True)
        assert all(text.startswith("CollectiveError") for text in found.values())


@pytest.mark.invariant("F2")
@pytest.mark.invariant("F3")
@pytest.mark.parametrize(("size", "payload", "alignment"), [(2, "bf16", 1), (2, "fp8", 16), (4, "fp32", 1)])
def test_a_kept_layout_gives_the_bits_of_a_dispatch_that_sorts(
    all_ranks: RankPools, size: int, payload: str, alignment: int
) -> None:
    """With another routing in between, and NaN in every row that nobody sent."""
    found = all_ranks[size].run(kept_programs.old_against_kept, all_ranks.backend, payload, alignment, seconds=SECONDS)
    assert found == [[]] * size


@pytest.mark.invariant("F2")
def test_a_kept_layout_serves_another_exchange_of_the_same_routing(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(kept_programs.another_exchange, all_ranks.backend) == [[]] * 2


@pytest.mark.invariant("F13")
def test_replays_that_sort_once_and_dispatch_twice(ranks: RankPools) -> None:
    """And replays by a layout that is declared stable, with steps of other routing in between."""
    assert ranks[2].run(kept_programs.replays, ranks.backend, 9, seconds=SECONDS) == [[]] * 2


@pytest.mark.invariant("F2")
def test_a_layout_that_cannot_be_used_is_refused(ranks: RankPools) -> None:
    reasons = {
        "tokens": "another number of tokens",
        "empty": "no dispatch has filled",
        "freed": "it was freed",
        "fill freed": "it was freed",
        "geometry": "top_k: 3 of the layout, 4 of the exchange",
        "ids": "takes x alone",
        "bound": "takes x alone",
        "host": "takes x alone",
        "keep host": "worst-token mode",
        "nothing": "needs ids and weights",
        "captured": "this graph cannot use it",
        "eager of a graph": "an eager dispatch cannot use it",
        "other graph": "this graph cannot use it",
        "fill of a graph": "an eager dispatch cannot fill it",
        "fill stable": "a kept layout: it cannot be filled",
        "stable of a graph": "cannot be declared stable",
        "free": "cannot be freed",
        "dtype": "float32[4, 256]",
        "turn": "no combine yet",
    }
    for found in ranks[2].run(kept_programs.refusals, ranks.backend):
        assert found.pop("good") == "True"
        assert {name: text for name, text in found.items() if reasons[name] not in text} == {}
        assert set(found) == set(reasons) and all(text.startswith("CollectiveError") for text in found.values())


@pytest.mark.invariant("C12")
@pytest.mark.invariant("F2")
def test_ranks_that_use_layouts_of_different_dispatches_are_told(all_ranks: RankPools) -> None:
    for text, forgotten, kept, after in all_ranks[2].run(kept_programs.other_layouts, all_ranks.backend):
        assert text.startswith("MISMATCH") and "by kept layout" in text
        assert "no dispatch has filled" in forgotten and "of 4 tokens" in kept and after


@pytest.mark.invariant("F14")
@pytest.mark.parametrize(
    ("field", "values", "said"),
    [
        ("max_tokens", (8, 9), r"max_tokens: rank 0 \(.*\) has 8, rank 1 \(.*\) has 9"),
        ("hidden", (256, 512), r"hidden: rank 0 \(.*\) has 256, rank 1 \(.*\) has 512"),
        ("top_k", (2, 3), r"top_k: rank 0 \(.*\) has 2, rank 1 \(.*\) has 3"),
        ("experts", (20, 22), r"experts: rank 0 \(.*\) has 20, rank 1 \(.*\) has 22"),
        ("payload", ("bf16", "fp8"), r"payload: rank 0 \(.*\) has 'bf16', rank 1 \(.*\) has 'fp8'"),
        ("alignment", (1, 8), r"alignment: rank 0 \(.*\) has 1, rank 1 \(.*\) has 8"),
        ("top_k", (4, 21), "top_k 21 is more than the 20 experts"),
        ("experts", (1, 1), "1 experts for 2 ranks"),
    ],
)
def test_ranks_of_another_geometry_are_told_the_field(
    all_ranks: RankPools, halma_backend: Backend, field: str, values: tuple[object, object], said: str
) -> None:
    for text in all_ranks[2].run(programs.unlike, all_ranks.backend, field, values):
        assert re.search(said, text), text


@pytest.mark.invariant("F14", control=True)
def test_ranks_of_one_geometry_are_told_nothing(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.unlike, all_ranks.backend, "hidden", (512, 512)) == [""] * 2
