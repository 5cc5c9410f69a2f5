"""The choice of a way: pure, within declared ranges, and never on stores that nobody vouches for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.arena.layout import MAX_BLOCKS, ChannelLayout
from halma.hal.arena.plan import plan_channels
from halma.hal.backend import Backend
from halma.hal.capabilities import UNKNOWN, Unknown
from halma.hal.collectives.choice import (
    ORDER,
    THREADS,
    Measured,
    choose,
    fingerprint,
    most_blocks,
    name_of,
    shard,
    why_not,
)
from halma.hal.collectives.contract import WORLD_SIZES, Algorithm, Call, Choice, Kind, Refusal, Wire
from halma.hal.collectives.deciding import Deciding
from halma.hal.errors import CollectiveError

LARGEST = 320 * 4096 * 2


def layout(size: int, lanes: str = "both", largest: int = LARGEST) -> ChannelLayout:
    return plan_channels(largest=largest, size=size, atomicity=8, lanes=lanes, limit=1 << 30).layout("main")


LAYOUTS = {(size, lanes): layout(size, lanes) for size in WORLD_SIZES for lanes in ("push", "staged", "both")}
PLAIN = [kind for kind in Kind if kind is not Kind.ALL_REDUCE_STREAMS]
"""That some way does everywhere; mixing streams is a capability of its own (tests/cpu/collectives/test_mixing.py)."""
calls = st.builds(
    Call,
    kind=st.sampled_from(PLAIN),
    nbytes=st.one_of(st.integers(0, 4096), st.integers(0, 2 * LARGEST)),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64", "int32", "uint8"]),
)
sizes = st.integers(1, 9)
atomicities: st.SearchStrategy[Any] = st.sampled_from([UNKNOWN, 4, 8, 16, 128])
tables = st.lists(
    st.builds(
        Measured,
        kind=st.sampled_from(Kind),
        size=st.sampled_from(WORLD_SIZES),
        up_to=st.integers(0, 2 * LARGEST),
        algorithm=st.sampled_from(Algorithm),
        wire=st.sampled_from(Wire),
        blocks=st.integers(0, 2 * MAX_BLOCKS),
        threads=st.sampled_from([0, 128, 512, 1024]),
    ),
    max_size=4,
)


@pytest.mark.invariant("C5")
@settings(max_examples=300, deadline=None)
@given(calls, sizes, st.sampled_from(["push", "staged", "both"]), atomicities, tables)
def test_a_choice_is_a_function_of_agreed_values_and_keeps_to_declared_ranges(
    call: Call, size: int, lanes: str, atomicity: int | Unknown, table: list[Measured]
) -> None:
    where = LAYOUTS.get((size, lanes), LAYOUTS[2, lanes])
    choice = choose(call, where, size, atomicity, table=table)
    other = replace(call, descriptor="another step")
    assert choose(other, replace(where), size, atomicity, table=list(table)) == choice
    if isinstance(choice, Refusal):
        assert choice.why and (size not in WORLD_SIZES or all(why_not(w, call, where, atomicity) for w in ORDER)
                               or "not added up" in choice.why)  # fmt: skip
        return
    way = (choice.algorithm, choice.wire)
    assert way in ORDER and why_not(way, call, where, atomicity) is None and size in WORLD_SIZES
    assert 1 <= choice.blocks <= MAX_BLOCKS and 1 <= choice.threads <= THREADS
    assert call.dtype in ("bfloat16", "float16", "float32") or call.kind not in (Kind.ALL_REDUCE, Kind.ALL_REDUCE_NORM)


@pytest.mark.invariant("C5", control=True)
@pytest.mark.parametrize(
    ("nbytes", "lanes", "atomicity", "way"),
    [
        (0, "both", 8, "one_shot/words"),
        (8 * 1024 - 2, "both", 8, "one_shot/words"),
        (8 * 1024, "both", 8, "one_shot/sentinel"),
        (LARGEST, "both", 8, "one_shot/sentinel"),
        (8192, "both", 4, "one_shot/sentinel"),
        (8192, "both", UNKNOWN, "staged/flags"),
        (256 * 1024 + 2, "both", UNKNOWN, "staged_two_shot/flags"),
        (8192, "staged", 8, "staged/flags"),
    ],
)
def test_the_rule_by_size(nbytes: int, lanes: str, atomicity: int | Unknown, way: str) -> None:
    choice = choose(Call(Kind.ALL_REDUCE, nbytes, "bfloat16"), LAYOUTS[2, lanes], 2, atomicity)
    assert isinstance(choice, Choice) and name_of((choice.algorithm, choice.wire)) == way


@pytest.mark.parametrize(
    ("kind", "nbytes", "dtype", "way"),
    [
        (Kind.ALL_GATHER, 64 << 10, "int32", "one_shot/words"),
        (Kind.ALL_GATHER, (64 << 10) + 4, "int32", "one_shot/chunks"),
        (Kind.BROADCAST, LARGEST // 2, "uint8", "one_shot/chunks"),
        (Kind.BROADCAST, LARGEST // 2 + 256, "uint8", "staged/flags"),
        (Kind.ALL_GATHER, 128 << 10, "bfloat16", "one_shot/sentinel"),
        (Kind.ALL_GATHER, 128 << 10, "float64", "one_shot/chunks"),
    ],
)
def test_bytes_that_are_no_numbers_go_in_chunks_where_words_end(kind: Kind, nbytes: int, dtype: str, way: str) -> None:
    choice = choose(Call(kind, nbytes, dtype), LAYOUTS[2, "both"], 2, 8)
    assert isinstance(choice, Choice) and name_of((choice.algorithm, choice.wire)) == way
    sums = why_not((Algorithm.ONE_SHOT, Wire.CHUNKS), Call(Kind.ALL_REDUCE, 64, "bfloat16"), LAYOUTS[2, "both"], 8)
    assert sums is not None and "made in two" in sums


def test_a_norm_as_fp8_is_made_in_one_kernel_or_not_on_a_channel() -> None:
    """The sum has no place to be between two: the norm's memory is half as large, and the residual is needed."""
    call = Call(Kind.ALL_REDUCE_NORM, 8192, "bfloat16", detail="rows of 4096, eps 1e-06, weight bfloat16")
    fp8 = replace(call, detail=call.detail + ", norm float8_e4m3fn")
    assert fp8.gives_fp8 and not call.gives_fp8 and fp8.digest != call.digest
    assert choose(fp8, LAYOUTS[2, "both"], 2, 8) == choose(call, LAYOUTS[2, "both"], 2, 8)
    refused, plain = (choose(one, LAYOUTS[2, "staged"], 2, 8) for one in (fp8, call))
    assert isinstance(refused, Refusal) and "memory of its own before the norm" in refused.why
    assert isinstance(plain, Choice) and plain.wire is Wire.FLAGS


@pytest.mark.invariant("C5")
def test_a_capped_sentinel_gives_way_to_two_shot() -> None:
    """At 8 ranks one-shot of the largest message does not fit 32 MiB; each rank then adds up its own part."""
    capped = plan_channels(largest=LARGEST, size=8, atomicity=8).layout("main")
    assert capped.sentinel is not None and capped.sentinel.largest < LARGEST
    choice = choose(Call(Kind.ALL_REDUCE, LARGEST, "bfloat16"), capped, 8, 8)
    assert isinstance(choice, Choice) and (choice.algorithm, choice.wire) == (Algorithm.TWO_SHOT, Wire.CHUNKS)


@pytest.mark.parametrize("size", [1, 3, 5, 7, 9])
def test_other_world_sizes_are_refused_with_the_reason(size: int) -> None:
    refused = choose(Call(Kind.ALL_REDUCE, 8, "bfloat16"), LAYOUTS[2, "both"], size, 8)
    assert isinstance(refused, Refusal) and refused.why == f"{size} ranks: channels are made for 2, 4, 6, 8"


def test_a_measured_row_wins_where_it_can_be_used_and_ranks_can_compare_tables() -> None:
    row = Measured(Kind.ALL_REDUCE, 2, 1024, Algorithm.TWO_SHOT, Wire.CHUNKS, blocks=3, threads=256)
    call = Call(Kind.ALL_REDUCE, 1024, "bfloat16")
    choice = choose(call, LAYOUTS[2, "both"], 2, 8, table=[row])
    assert choice == Choice(Algorithm.TWO_SHOT, Wire.CHUNKS, 3, 256, "measured table")
    mixed = replace(row, wire=Wire.WORDS)
    assert "does not travel by words" in str(why_not((mixed.algorithm, mixed.wire), call, LAYOUTS[2, "both"], 8))
    assert choose(call, LAYOUTS[2, "both"], 2, 8, table=[mixed]) == choose(call, LAYOUTS[2, "both"], 2, 8)
    by_rule = choose(call, LAYOUTS[2, "staged"], 2, 8, table=[row])
    assert isinstance(by_rule, Choice) and by_rule.why.startswith("rule"), "there is no lane for the row's way"
    assert fingerprint([row]) != fingerprint([]) and fingerprint([row, row]) == fingerprint((row, row))


@pytest.mark.invariant("C16")
@settings(max_examples=200, deadline=None)
@given(calls, st.sampled_from(WORLD_SIZES), st.integers(1, 6), st.integers(THREADS, 400_000), tables)
def test_grids_that_spin_at_once_fit_the_device(
    call: Call, size: int, channels: int, threads: int, table: list[Measured]
) -> None:
    choice = choose(call, LAYOUTS[size, "both"], size, 8, table=table, threads_there=threads, channels=channels)
    if isinstance(choice, Choice):
        assert channels * choice.blocks * choice.threads <= threads
    elif channels * THREADS > threads:
        assert "do not fit" in choice.why or "not added up" in choice.why


@pytest.mark.invariant("C16")
def test_channels_that_cannot_fit_are_refused_when_they_are_made(halma_backend: Backend) -> None:
    capabilities = replace(halma_backend.capabilities, resident_threads=3 * THREADS)
    more: dict[str, Any] = {"table": (), "strict": False, "why_vendor": ""}
    with pytest.raises(CollectiveError, match="do not fit the device together"):
        Deciding("main", 2, LAYOUTS[2, "both"], capabilities, channels=4, **more)
    Deciding("main", 2, LAYOUTS[2, "both"], capabilities, channels=3, **more)


@pytest.mark.invariant("C16", control=True)
def test_without_a_known_limit_a_row_of_the_table_is_taken_as_it_is() -> None:
    assert most_blocks(None, 5) == MAX_BLOCKS and most_blocks(4 * THREADS, 2) == 2 and most_blocks(THREADS, 2) == 0
    row = Measured(Kind.ALL_REDUCE, 2, 1024, Algorithm.TWO_SHOT, Wire.CHUNKS, blocks=64, threads=256)
    call = Call(Kind.ALL_REDUCE, 1024, "bfloat16")
    free, tight = (choose(call, LAYOUTS[2, "both"], 2, 8, table=[row], threads_there=n) for n in (None, 4 * THREADS))
    assert isinstance(free, Choice) and (free.blocks, free.threads) == (64, 256)
    assert isinstance(tight, Choice) and (tight.blocks, tight.threads) == (4, 256)


@pytest.mark.invariant("C19")
@settings(max_examples=200, deadline=None)
@given(calls, st.sampled_from(WORLD_SIZES), atomicities, tables)
def test_no_flag_lies_inside_data_on_stores_that_may_be_seen_in_part(
    call: Call, size: int, atomicity: int | Unknown, table: list[Measured]
) -> None:
    choice = choose(call, LAYOUTS[size, "both"], size, atomicity, table=table)
    if isinstance(choice, Choice) and isinstance(atomicity, Unknown):
        assert choice.wire is Wire.FLAGS
    elif isinstance(choice, Choice) and choice.wire is Wire.WORDS:
        assert not isinstance(atomicity, Unknown) and atomicity >= 8
    if isinstance(choice, Choice) and choice.wire is Wire.SENTINEL:
        assert call.dtype in ("bfloat16", "float16", "float32"), "half of a float64 may be all ones"


@pytest.mark.invariant("C19", control=True)
def test_the_backends_own_capability_decides(halma_backend: Backend) -> None:
    atomicity = halma_backend.capabilities.remote_store_atomicity
    choice = choose(Call(Kind.ALL_REDUCE, 64, "bfloat16"), LAYOUTS[2, "both"], 2, atomicity)
    assert isinstance(choice, Choice)
    assert choice.wire is (Wire.FLAGS if isinstance(atomicity, Unknown) else choice.wire)
    assert isinstance(atomicity, Unknown) or atomicity in (4, 8, 16, 128)


@given(st.integers(0, LARGEST), st.sampled_from(WORLD_SIZES))
def test_parts_of_a_two_shot_cover_a_message_once(nbytes: int, size: int) -> None:
    cuts = [shard(nbytes, size, rank) for rank in range(size)]
    assert cuts[0][0] == 0 and cuts[-1][1] == nbytes
    assert all(one[1] == two[0] for one, two in pairwise(cuts))
    boxes = LAYOUTS[size, "both"].scatter
    assert boxes is not None and all(end - start <= boxes.largest for start, end in cuts)
    assert all(start % 16 == 0 or start == nbytes for start, _ in cuts)
