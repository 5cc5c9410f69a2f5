"""Geometry, sizes and launch numbers of an exchange: pure arithmetic, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exchange_tuning import Search, row_of
from halma.hal.collectives.common_terms import refuse_other_terms, split_experts
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_sizes import Sizes
from halma.hal.collectives.exchange_tuning import (
    FALLBACK,
    TABLE,
    Key,
    Measured,
    Tuning,
    choose_tuning,
    key_of,
    most_parts,
    parts_of,
)
from halma.hal.errors import CollectiveError

V4 = Geometry(8, 128, 4096, 6, 256, "fp8", 16)
SINGLE = Key(1, 8, "sm_90")
TWO_NODES = Key(2, 4, "sm_90")
ON = Measured(SINGLE, "2026-11-30", "NVIDIA H200")
MEASURED = {SINGLE: Tuning(24, 4, 777, measured=ON)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_k": 257}, "top_k 257 is more than the 256 experts"),
        ({"experts": 7, "top_k": 2}, "7 experts for 8 ranks"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"hidden": 4096.0}, "hidden is 4096.0"),
        ({"alignment": True}, "alignment is True"),
        ({"payload": "int8"}, "payload 'int8': one of bf16, fp8, fp32, fp64"),
        ({"top_k": 33}, "at most 32"),
        ({"experts": 8 * 513}, "513 experts a rank: at most 512"),
        ({"max_tokens": 1 << 26}, "do not fit int32"),
    ],
)
def test_what_no_exchange_can_be(fields: dict[str, object], said: str) -> None:
    with pytest.raises(CollectiveError, match="no exchange can be like this") as refused:
        replace(V4, **fields)  # pyright: ignore[reportArgumentType]
    assert said in str(refused.value)


@given(ranks=st.sampled_from((2, 4, 6, 8)), more=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_every_expert_has_one_rank(ranks: int, more: int) -> None:
    geometry = replace(V4, ranks=ranks, experts=ranks + more, top_k=1)
    shares = [geometry.local(rank) for rank in range(ranks)]
    assert sum(shares) == ranks + more and max(shares) - min(shares) <= 1 and min(shares) >= 1
    assert geometry.first(0) == 0 and geometry.first(ranks) == ranks + more
    assert geometry.capacity(128) % geometry.alignment == 0


@given(
    ranks=st.sampled_from((2, 8)),
    tokens=st.integers(1, 500),
    hidden=st.integers(1, 64),
    payload=st.sampled_from(("bf16", "fp8", "fp32", "fp64")),
)
@settings(max_examples=60, deadline=None)
def test_regions_lie_apart_and_rows_without_gaps(ranks: int, tokens: int, hidden: int, payload: str) -> None:
    geometry = Geometry(ranks, tokens, 16 * hidden, 2, 16, payload)
    places = geometry.places
    spans = sorted((region.offset, region.offset + region.nbytes) for region in places.regions.values())
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert spans[-1][1] <= places.end and spans[0][0] >= places.channel.headers.offset
    assert places.rows.nbytes == geometry.landing * geometry.row_bytes
    assert all(region.offset % 256 == 0 for region in places.regions.values())
    assert not any(start <= guard < end for guard in places.channel.guards for start, end in spans if start < end)


@pytest.mark.invariant("A4")
def test_offsets_do_not_depend_on_messages() -> None:
    """What a call's bound changes is slots alone."""
    assert V4.capacity(1) < V4.capacity(128) and V4.places == replace(V4).places
    assert V4.capacity(128) == -(-(8 * 128 * 6 + 32 * 15) // 16) * 16


def test_memory_has_a_limit_that_is_said() -> None:
    V4.need_within(V4.places.end)
    with pytest.raises(CollectiveError, match="does not fit its memory") as refused:
        V4.need_within(V4.places.end - 1)
    assert f"{V4.places.end:,} bytes needed" in str(refused.value)


@pytest.mark.invariant("F14")
def test_every_field_that_differs_is_named() -> None:
    other = replace(V4, hidden=7168, alignment=1)
    with pytest.raises(CollectiveError) as refused:
        compared(V4, V4, other)
    text = str(refused.value)
    assert "hidden: rank 0 (a) has 4096, rank 2 (c) has 7168" in text and "alignment: rank 0 (a) has 16" in text
    assert "top_k" not in text


@pytest.mark.invariant("F14", control=True)
def test_equal_geometries_pass() -> None:
    compared(V4, replace(V4))


def compared(*geometries: Geometry) -> None:
    refuse_other_terms("they differ", [dict(one.named()) for one in geometries], "abc", do="make them equal")


def test_experts_are_split_by_one_rule() -> None:
    """Uneven parts: the first ones have one more."""
    assert split_experts(16, 3) == (0, 6, 11, 16) and split_experts(8, 8) == tuple(range(9))
    assert [replace(V4, ranks=6, experts=16, top_k=1).first(rank) for rank in range(7)] == list(split_experts(16, 6))
    with pytest.raises(CollectiveError, match="more FFN ranks than experts"):
        split_experts(4, 5, "FFN ranks")


@pytest.mark.invariant("F11")
def test_two_nodes_of_four_never_get_the_row_of_one_node_of_eight() -> None:
    """Both have eight ranks; the row is for links that two nodes do not have."""
    hosts = ["one"] * 4 + ["two"] * 4
    assert key_of(hosts, "sm_90") == TWO_NODES
    assert choose_tuning(TWO_NODES, V4, 66, MEASURED) == Tuning(66)
    assert choose_tuning(Key(1, 8, "sm_100"), V4, 66, MEASURED) == Tuning(66)
    assert choose_tuning(Key(1, 4, "sm_90"), replace(V4, ranks=4), 132, MEASURED) == Tuning(132)
    assert TABLE.keys().isdisjoint({TWO_NODES})


@pytest.mark.invariant("F11", control=True)
def test_one_node_of_eight_gets_its_row() -> None:
    assert choose_tuning(key_of(["one"] * 8, "sm_90"), V4, 66, MEASURED) == MEASURED[SINGLE]


@pytest.mark.invariant("F11")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Tuning(67, 4, 777), "blocks 67: from 2 to 66"),
        (Tuning(1), "blocks 1: from 2"),
        (Tuning(24, 3), "parts 3: 1, 2, 4 or 8"),
        (Tuning(24, 16), "parts 16: 1, 2, 4 or 8"),
        (Tuning(24, 4, 0), "warps 0"),
        (Tuning(24, units=3), "units 3: 1, 2, 4"),
        (Tuning(24, measured=replace(ON, key=TWO_NODES)), "it was measured on 2 x 4 ranks of sm_90"),
        (Tuning(24, measured=replace(ON, day="last week")), "measured 'last week' on 'NVIDIA H200'"),
        (Tuning(24, measured=replace(ON, device="")), "a device's name"),
    ],
)
def test_a_row_that_the_device_cannot_have_is_refused_when_it_is_chosen(row: Tuning, said: str) -> None:
    with pytest.raises(CollectiveError, match="do not hold here") as refused:
        choose_tuning(SINGLE, V4, 66, {SINGLE: row})
    assert said in str(refused.value)


@pytest.mark.invariant("F11")
def test_a_key_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(CollectiveError, match="are 8 ranks, the geometry has 4"):
        choose_tuning(SINGLE, replace(V4, ranks=4), 66, MEASURED)


@pytest.mark.invariant("F11")
@given(
    ranks=st.sampled_from((2, 4, 6, 8)),
    machines=st.integers(1, 8),
    rows=st.dictionaries(
        st.builds(Key, st.integers(1, 8), st.integers(1, 8), st.sampled_from(("sm_90", "sm_100"))), st.integers(2, 66)
    ),
)
@settings(deadline=None)
def test_a_row_is_for_exactly_the_ranks_that_it_was_measured_on(
    ranks: int, machines: int, rows: dict[Key, int]
) -> None:
    """Whatever the table holds: a measured row of these very ranks, or the computed numbers, which say so."""
    key = key_of([f"machine {rank % machines}" for rank in range(ranks)], "sm_90")
    if key.scale_out * key.scale_up != ranks:
        return
    table = {one: Tuning(blocks, measured=Measured(one, "2026-11-30", "a device")) for one, blocks in rows.items()}
    chosen = choose_tuning(key, replace(V4, ranks=ranks), 66, table)
    if key in table:
        assert chosen == table[key] and str(key) in chosen.source and chosen.source.startswith("measured 2026-11-30")
    else:
        assert chosen.measured is None and chosen.source == FALLBACK
    for other in table.keys() - {key}:  # nor by a row that was copied under another key
        with pytest.raises(CollectiveError, match="it was measured on"):
            choose_tuning(key, replace(V4, ranks=ranks), 66, {key: table[other]})


@pytest.mark.invariant("F11", control=True)
def test_rows_of_the_table_say_where_they_come_from() -> None:
    for key, tuning in TABLE.items():
        ranks = replace(V4, ranks=key.scale_out * key.scale_up)
        assert choose_tuning(key, ranks, 1024, TABLE).source in (FALLBACK, str(tuning.measured))
    assert choose_tuning(SINGLE, V4, 66, MEASURED).source == "measured 2026-11-30 on NVIDIA H200, 1 x 8 ranks of sm_90"


def test_a_search_finds_the_best_of_what_can_be_chosen() -> None:
    """Of a made-up cost; the row that it prints is one that the table takes."""
    tried: list[Tuning] = []

    def cost(one: Tuning) -> dict[int, float]:
        tried.append(one)
        cost = 10 + abs(one.blocks - 33) / 10 + (one.units != 4) + (one.parts != 2) + abs(one.warps - 512) / 512
        return {8: cost, 4096: 10 * cost}

    search = Search(SINGLE, V4, 66, cost)
    best = search.run()
    assert (best.blocks, best.parts, best.warps, best.units) == (33, 2, 512, 4)
    assert tried[0] == Tuning(66) and search.trials[0].ratio == 1.0 and len(set(tried)) == len(tried) == 14
    names = {"Key": Key, "Tuning": Tuning, "Measured": Measured}
    table = eval(f"{{{row_of(SINGLE, best, '2026-11-30', 'a device')}}}", names)
    assert choose_tuning(SINGLE, V4, 66, table) == replace(best, measured=Measured(SINGLE, "2026-11-30", "a device"))


@given(
    tokens=st.integers(0, 5000),
    units=st.integers(1, 1024),
    parts=st.sampled_from((1, 2, 4, 8)),
    warps=st.integers(1, 4096),
)
@settings(max_examples=200, deadline=None)
def test_a_row_is_cut_into_equal_parts(tokens: int, units: int, parts: int, warps: int) -> None:
    most = most_parts(units, Tuning(8, parts, warps), 32)
    cut = parts_of(tokens, most, warps)
    assert 1 <= cut <= most <= parts and units % cut == 0 and (cut == 1 or units // cut % 32 == 0)
    assert cut == most or tokens * cut >= warps


@pytest.mark.invariant("F2")
@pytest.mark.parametrize(
    ("counts", "offsets", "total", "said"),
    [
        ([3, 0, 2], [0, 4, 4, 8], 6, "counts sum to 5, the total is 6"),
        ([3, 0, 2], [0, 3, 3, 5], 5, "from the counts [0, 4, 4, 8]"),
        ([3, -1, 2], [0, 4, 4, 8], 4, "counts below 0"),
        ([3, 0, 9], [0, 4, 4, 16], 12, "ends at slot 16 of 8"),
    ],
)
def test_counts_that_do_not_sum_are_refused(counts: list[int], offsets: list[int], total: int, said: str) -> None:
    with pytest.raises(CollectiveError, match="do not belong together") as refused:
        Sizes.checked(counts, offsets, total, 4, 8)
    assert said in str(refused.value)


@pytest.mark.invariant("F2", control=True)
def test_counts_that_sum_are_taken() -> None:
    assert Sizes.checked([3, 0, 2], [0, 4, 4, 8], 5, 4, 8).total == 5
