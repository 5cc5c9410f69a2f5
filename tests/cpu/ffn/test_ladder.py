"""The ladder's arithmetic: exact bound, small steps near clusters, smallest fit, refit from recorded items."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.errors import CaptureError
from halma.models.deepseek_v4.ffn.costs import CostTable, Span
from halma.models.deepseek_v4.ffn.ladder import SPREAD, Bucket, Ladder, last_of_each
from halma.models.deepseek_v4.ffn.statistics import FfnStatistics

GATE = 1.05


def sizes(ladder: Ladder) -> list[int]:
    return [bucket.routed for bucket in ladder.buckets]


@pytest.mark.parametrize(
    ("tokens", "ranks", "routed", "shared"),
    [(8, 2, 48, 4), (2048, 2, 12288, 1024), (8192, 2, 49152, 4096), (7, 2, 42, 4)],
)
def test_the_bound_is_a_bucket(tokens: int, ranks: int, routed: int, shared: int) -> None:
    ladder = Ladder.fit(tokens, 6, ranks, 256)
    assert ladder.buckets[-1] == Bucket(routed, shared)
    assert (ladder.max_routed, ladder.max_shared) == (routed, shared)
    assert Ladder.fit(tokens, 6, ranks, 256, shared=False).max_shared == 0


def test_a_rank_with_fewer_experts_than_choices_gets_no_more_pairs_than_experts() -> None:
    assert Ladder.fit(10, 6, 4, 8).max_routed == 20


@pytest.mark.invariant("F5")
@pytest.mark.parametrize(("tokens", "expected"), [(2048, 6144), (8192, 24576)])
def test_items_near_the_expected_size_replay(tokens: int, expected: int) -> None:
    """The published ladder of bound 12288 replays 5852..6144 and 6461..6784: nothing just above the expected size."""
    ladder = Ladder.fit(tokens, 6, 2, 256)
    for cluster in (expected, expected // 2):
        assert ladder.pick(cluster) == Bucket(cluster, ladder.max_shared * cluster // ladder.max_routed)
        for rows in range(int(cluster * (1 - SPREAD)) + 1, int(cluster * (1 + SPREAD)), 7):
            bucket = ladder.pick(rows)
            assert bucket is not None
            assert bucket.routed <= rows * GATE, f"{rows} pads to {bucket.routed}"
    assert len(ladder.buckets) <= 48


@pytest.mark.invariant("F5", control=True)
def test_the_published_multiples_leave_a_hole_above_the_expected_size() -> None:
    published = (1536, 3072, 3456, 4352, 6144, 6784, 7680, 9216)
    assert sum(published) == 42240
    ladder = Ladder(tuple(map(Bucket, published)), 12288, 0, GATE, (6144,))
    hole = [rows for rows in range(6145, 6784) if (bucket := ladder.pick(rows)) and bucket.routed > rows * GATE]
    assert (min(hole), max(hole)) == (6145, 6460)
    assert ladder.charged({6200: 3, 6700: 5}) == (5, 5 * 6784, 5 * 6700)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20000),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from((8, 64, 256, 384)),
    st.floats(1.01, 1.3),
)
def test_any_ladder_holds_everything_and_steps_little_near_clusters(
    tokens: int, top_k: int, ranks: int, experts: int, gate: float
) -> None:
    ladder = Ladder.fit(tokens, top_k, ranks, experts, gate=gate)
    found = sizes(ladder)
    assert found == sorted(set(found))
    assert found[-1] == ladder.max_routed
    assert all(0 < bucket.shared <= ladder.max_shared for bucket in ladder.buckets)
    for below, above in pairwise(found):
        near = any(c * (1 - SPREAD) <= below and above <= c * (1 + SPREAD) for c in ladder.clusters)
        if near:
            assert above <= max(below * gate, below + 1)
        assert above <= max(below * 2, below + 1)


@pytest.mark.invariant("F6")
def test_the_smallest_bucket_that_holds_both_kinds_of_rows() -> None:
    ladder = Ladder((Bucket(48, 4), Bucket(96, 8), Bucket(192, 16)), 192, 16, GATE, ())
    assert ladder.pick(48, 4) == Bucket(48, 4)
    assert ladder.pick(49, 1) == Bucket(96, 8)
    assert ladder.pick(10, 9) == Bucket(192, 16), "the shared rows do not fit before"
    assert ladder.pick(0, 3) == Bucket(48, 4)
    assert ladder.pick(48, 17) is None


@pytest.mark.invariant("F6", control=True)
def test_nothing_holds_an_empty_item_or_one_beyond_the_bound() -> None:
    ladder = Ladder.fit(32, 6, 2, 64)
    for routed, shared, why in ((0, 0, "empty"), (193, 1, "beyond"), (-1, 4, "beyond")):
        assert ladder.pick(routed, shared) is None
        assert why in ladder.why_none(routed, shared)


def test_doubling_the_bound_doubles_the_top() -> None:
    one, two = Ladder.fit(2048, 6, 2, 256), Ladder.fit(4096, 6, 2, 256)
    assert sizes(two)[-1] == 2 * sizes(one)[-1]


@pytest.mark.invariant("F5")
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(1, 12288), st.integers(1, 1000), min_size=1, max_size=300), st.integers(2, 400))
def test_a_refit_covers_what_was_recorded(histogram: dict[int, int], most: int) -> None:
    ladder = Ladder.fit(2048, 6, 2, 256).refit(histogram, most=most)
    assert ladder.max_routed == 12288 == sizes(ladder)[-1]
    within, charged, real = ladder.charged(histogram)
    assert charged <= real * GATE
    assert len(ladder.buckets) <= most
    assert within <= sum(histogram.values())
    assert ladder.refit(histogram, most=1000).charged(histogram)[0] == sum(histogram.values())
    assert Ladder.fit(2048, 6, 2, 256, histogram=histogram, most=most) == ladder


@pytest.mark.invariant("F5")
def test_a_refit_with_few_buckets_keeps_the_busiest() -> None:
    ladder = Ladder.fit(2048, 6, 2, 256).refit({100: 1, 1000: 50, 6000: 900}, most=3)
    assert sizes(ladder) == [1000, 6000, 12288]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((0, 6, 2, 256), "at least 1"),
        ((8, 0, 2, 256), "at least 1"),
        ((8, 6, 0, 256), "at least 1"),
        ((8, 6, 2, 4), "6 different experts of 4"),
        ((8, 1, 5, 4), "1 ranks would have no expert"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int, int, int], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        Ladder.fit(*sizes)
    with pytest.raises(CaptureError, match="gate of 1"):
        Ladder.fit(8, 6, 2, 256, gate=1.0)
    with pytest.raises(CaptureError, match="50000 rows, the bound is 12288"):
        Ladder.fit(2048, 6, 2, 256, histogram={50000: 1})
    with pytest.raises(CaptureError, match="no item with a row"):
        Ladder.fit(2048, 6, 2, 256).refit({0: 7})


@pytest.mark.invariant("F5")
def test_the_cheapest_way_by_what_was_measured() -> None:
    span = Span(101, 200, {"bucket": (9e-6, 10e-6), "worst case": (12e-6, 12e-6), "eager": (5e-6, 15e-6)})
    table = CostTable({200: span})
    assert [table.choose(200, rows) for rows in (101, 120, 180, 200)] == ["eager", "eager", "bucket", "bucket"]
    assert table.choose(400, 300) is None
    assert not table.worst_case_pays


@pytest.mark.invariant("F5", control=True)
def test_one_worst_case_graph_is_taken_where_it_costs_no_more() -> None:
    span = Span(101, 200, {"bucket": (10e-6, 10e-6), "worst case": (10.05e-6, 10e-6), "eager": (15e-6, 15e-6)})
    assert CostTable({200: span}).worst_case_pays
    assert not CostTable({}).worst_case_pays


def test_statistics_count_both_ways_and_say_why() -> None:
    counted = FfnStatistics()
    counted.replayed(6000, 6144)
    counted.eager(0, "the item is empty")
    counted.eager(5, "eager is cheaper")
    assert (counted.replays, counted.eager_items, counted.real_rows, counted.charged_rows) == (1, 2, 6000, 6144)
    assert counted.histogram == {6000: 1, 0: 1, 5: 1}
    assert "1 x eager is cheaper" in str(counted)
    assert counted.as_json()["charged_over_real"] == 1.024


@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=8, unique=True),
    st.lists(st.integers(2, 400), max_size=4, unique=True),
)
def test_the_last_size_of_every_kind_between_two_planned_ones_is_found(sizes: list[int], starts: list[int]) -> None:
    """As a route that ends at 35 rows between buckets of 32 and 64: 33 rows take scratch that neither planned."""
    sizes.sort()

    def kind(size: int) -> int:
        return sum(size >= start for start in starts)

    found = {*sizes, *last_of_each(sizes, kind)}
    for size in range(sizes[0], sizes[-1] + 1):
        assert any(other >= size and kind(other) == kind(size) for other in found)
