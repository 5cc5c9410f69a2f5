"""Arena plans are arithmetic: known ladders give known numbers, what does not fit has a reason, nothing overlaps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halma.hal.arena.coverage import check_ladder, coverage
from halma.hal.arena.layout import ALIGNMENT, GUARD_BYTES
from halma.hal.arena.plan import CHANNEL_LIMIT, ArenaPlan, plan_channels, plan_slots
from halma.hal.arena.slots import SlotTable
from halma.hal.capabilities import UNKNOWN
from halma.hal.collectives.contract import WORLD_SIZES
from halma.hal.collectives.control import CONTROL_BYTES
from halma.hal.decisions import decisions
from halma.hal.errors import ArenaError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import decode_ladder, doubling

MIB = 1 << 20
V4_FLASH = 320 * 4096 * 2
"""Bytes of the largest message of V4-Flash's ladder: 64 requests of one token and four drafts, in bf16."""
CALLS = 87
"""All-reduces of a step: two in each of 43 layers, and one at the end."""


def mtp(most: int) -> tuple[Descriptor, ...]:
    """1, 2, 4 .. ``most`` requests of five tokens."""
    return tuple(Descriptor("verify", requests, 5) for requests in doubling(1, most))


def v4_slots(most: int = 64, tokens: int = 8195, size: int = 8) -> ArenaPlan:
    """V4-Flash's ladder of verify steps, each call with a slot, and ``tokens`` in the largest eager step."""
    return plan_slots(
        mtp(most), calls_per_descriptor=CALLS, bytes_per_token=8192, max_batched_tokens=tokens, size=size
    )


def table(plan: ArenaPlan) -> SlotTable:
    assert plan.slots is not None
    return plan.slots


# -- known numbers ---------------------------------------------------------------------------------------------


@pytest.mark.invariant("A1")
@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("most", "tokens", "slots", "data", "meta", "needed", "mib"),
    [
        (16, 8195, 435, 110_469_120, 117_596_160, 188_915_712, 184),
        (64, 8195, 609, 452_567_040, 462_544_896, 533_864_448, 512),
        (64, 8192, 609, 452_567_040, 462_544_896, 529_670_144, 508),
    ],
)
def test_ladders_of_slots_that_were_measured_elsewhere(
    size: int, most: int, tokens: int, slots: int, data: int, meta: int, needed: int, mib: int
) -> None:
    plan = v4_slots(most, tokens, size).need()
    found = table(plan)
    assert (found.count, found.data_bytes, found.meta_bytes, found.needed_bytes) == (slots, data, meta, needed)
    assert plan.nbytes == found.buffer_bytes == mib * MIB
    assert [run.descriptor.num_tokens for run in found.runs.values()] == [one.num_tokens for one in mtp(most)]


@pytest.mark.invariant("A1")
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_one_descriptor_or_one_token_more_is_refused_with_the_reason(size: int) -> None:
    full = v4_slots(size=size)
    assert table(full).eager_bytes == 71_303_168 and table(full).headroom(512 * MIB) == 3_006_464
    assert v4_slots(tokens=8704, size=size).reason == ""
    over = v4_slots(tokens=8705, size=size)
    assert over.reason.startswith("538,058,752 bytes needed, 536,870,912 allowed")
    wider = plan_slots(
        (*mtp(64), Descriptor("verify", 3, 5)),
        calls_per_descriptor=CALLS,
        bytes_per_token=8192,
        max_batched_tokens=8195,
        size=size,
    )
    assert "first that does not fit: verify(320 tokens, 64 requests)" in wider.reason
    with pytest.raises(ArenaError, match="the capture ladder does not fit the arena plan") as caught:
        wider.need()
    message = str(caught.value)
    assert f"asked: 8 descriptors up to (320 tokens, 64 requests), 87 calls each, world {size}, slots" in message
    assert wider.reason in message and "plan_channels()" in message


@pytest.mark.invariant("A1")
@pytest.mark.parametrize("lanes", ["push", "staged", "both"])
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_channel_of_v4_flash_fits_32_mib_at_every_world_size(size: int, lanes: str) -> None:
    plan = plan_channels(largest=V4_FLASH, size=size, lanes=lanes, atomicity=8).need()
    layout = plan.layout("main")
    print(f"world {size}, {lanes}: {plan.nbytes:,} bytes = {plan.nbytes / MIB:.2f} MiB", end="")
    print(f", one-shot up to {layout.sentinel.largest:,} bytes" if layout.sentinel else "")
    assert plan.nbytes <= CHANNEL_LIMIT == 32 * MIB and layout.largest == V4_FLASH
    if lanes != "staged":
        assert layout.words and layout.words.largest == 64 * 1024
        assert layout.sentinel and layout.scatter and layout.gather and layout.chunk_flags
        assert size * layout.scatter.largest >= V4_FLASH <= size * layout.gather.largest
        assert MIB < layout.sentinel.largest <= V4_FLASH and layout.sentinel.fill == 0xFF
        assert size > 2 or layout.sentinel.largest == V4_FLASH
    if lanes != "push":
        assert layout.staging and layout.stage_sum and layout.stage_flags
        assert layout.staging.largest >= V4_FLASH and layout.stage_sum.largest * size >= V4_FLASH
        assert (layout.staging.buffers, layout.staging.senders) == (2, 1)


@pytest.mark.invariant("A1")
def test_a_channel_that_does_not_fit_has_a_reason_and_raises_only_when_it_is_needed() -> None:
    plan = plan_channels(largest=V4_FLASH, size=8, limit=4 * MIB, atomicity=8)
    assert plan.reason == f"{plan.nbytes:,} bytes needed (words and push), 4,194,304 allowed"
    with pytest.raises(ArenaError, match="the messages do not fit the arena plan") as caught:
        plan.need()
    assert "messages of up to 2,621,440 bytes on main, world 8, channel" in str(caught.value)
    assert f"limit={plan.nbytes}" in str(caught.value)
    assert plan_channels(largest=V4_FLASH, size=8, limit=plan.nbytes, atomicity=8).reason == ""


@pytest.mark.invariant("A1", control=True)
def test_a_plan_that_fits_is_its_own_answer() -> None:
    for plan in (v4_slots(16), plan_channels(largest=8192, size=2)):
        assert plan.reason == "" and plan.need() is plan


@pytest.mark.invariant("A1")
def test_a_size_that_is_left_open_is_bound_later_and_only_once() -> None:
    plan = plan_channels(largest=V4_FLASH)
    assert (plan.size, plan.nbytes, plan.reason) == (None, 0, "")
    with pytest.raises(ArenaError, match="no world size yet"):
        plan.need()
    bound = plan.bind(6, 8)
    assert bound == plan_channels(largest=V4_FLASH, size=6, atomicity=8).bind(6, 4)
    assert bound.bind(4).reason == "it was made for 6 ranks, and the group has 4"
    slots = plan_slots(mtp(16), calls_per_descriptor=CALLS, bytes_per_token=8192)
    assert slots.bind(4).nbytes == slots.bind(8).nbytes and slots.bind(4).channels != slots.bind(8).channels


@pytest.mark.invariant("A1")
def test_lanes_follow_from_what_is_known_of_stores_and_unknown_means_none_is_pushed() -> None:
    def lanes(atomicity: Any, **more: Any) -> set[str]:
        return set(plan_channels(largest=8192, size=2, atomicity=atomicity, **more).layout("main").lanes)

    push = {"headers", "sentinel", "scatter", "gather", "chunk_flags", "parts"}
    staged = {"headers", "staging", "stage_sum", "stage_flags"}
    assert lanes(8) == lanes(16) == lanes(128) == push | {"words"}
    assert lanes(4) == push and lanes(UNKNOWN) == lanes(1) == staged
    assert lanes(8, lanes="both") == push | staged | {"words"} and lanes(8, lanes="staged") == staged
    refused = plan_channels(largest=8192, size=2, atomicity=UNKNOWN, lanes="push")
    assert "remote_store_atomicity is unknown" in refused.reason


# -- whole ladders ---------------------------------------------------------------------------------------------


@pytest.mark.invariant("A2")
def test_what_a_plan_does_not_cover_is_listed_all_of_it_before_anything_is_captured() -> None:
    wanted = (*mtp(64), Descriptor("prefill", 1, 64))
    found = coverage(v4_slots(16), wanted)
    assert found.covered == mtp(16) and [one for one, _ in found.uncovered] == list(wanted[5:])
    with pytest.raises(ArenaError, match="does not cover the capture ladder") as caught:
        check_ladder(v4_slots(16), wanted)
    message = str(caught.value)
    for one in wanted[5:]:
        assert f"{one}: no slots are planned for it, but for 5 others" in message


@pytest.mark.invariant("A2")
def test_by_policy_what_is_not_covered_falls_back_and_each_is_a_decision() -> None:
    plan = plan_channels(largest=160 * 8192, size=2, bytes_per_token=8192)
    decisions.clear()
    found = check_ladder(plan, mtp(64), policy="fall back")
    assert [one.num_tokens for one, _ in found.uncovered] == [320]
    ((made, count),) = decisions.all("collective")
    assert (made.subject, made.chosen, count) == ("verify(320 tokens, 64 requests)", "vendor", 1)
    assert "its messages have 2,621,440 bytes, and the channel's largest has 1,310,720" in made.reason
    with pytest.raises(ArenaError, match="no policy called 'ignore'"):
        check_ladder(plan, mtp(64), policy="ignore")
    decisions.clear()


@pytest.mark.invariant("A2", control=True)
def test_a_ladder_that_is_covered_is_no_decision() -> None:
    decisions.clear()
    for plan in (v4_slots(), plan_channels(largest=V4_FLASH, size=8, bytes_per_token=8192)):
        assert check_ladder(plan, mtp(64)).covered == mtp(64)
    assert decisions.all("collective") == []


@pytest.mark.invariant("A2")
def test_a_refused_plan_covers_nothing() -> None:
    plan = v4_slots(128)
    assert [reason for _, reason in coverage(plan, mtp(2)).uncovered] == [plan.reason] * 2


# -- offsets ---------------------------------------------------------------------------------------------------


def pieces(plan: ArenaPlan) -> list[tuple[int, int]]:
    """Begin and end of everything that a plan places, guard zones included."""
    found = [(offset, offset + GUARD_BYTES) for offset in plan.guards]
    for channel in plan.channels:
        found.append((channel.control, channel.control + CONTROL_BYTES))
        for lane in channel.lanes.values():
            starts = [lane.at(buffer, sender) for buffer in range(lane.buffers) for sender in range(lane.senders)]
            boxes = [(start, start + lane.box) for start in starts]
            assert lane.largest <= lane.box and boxes[-1][1] == lane.offset + lane.nbytes
            found += boxes
    if plan.slots is not None:
        for run in plan.slots.runs.values():
            for call in range(run.calls):
                box = run.box(call)
                found += [(box.offset + half, box.offset + half + run.nbytes) for half in {0, box.stride}]
    return sorted(found)


def check_pieces(plan: ArenaPlan) -> None:
    found = pieces(plan)
    assert all(one[1] <= other[0] for one, other in pairwise(found)), "pieces overlap"
    assert found[-1][1] <= plan.nbytes and all(begin % 16 == 0 for begin, _ in found)
    starts = [lane.offset for channel in plan.channels for lane in channel.lanes.values()]
    starts += [channel.control for channel in plan.channels]
    if plan.slots is not None:
        starts += [run.box(call).offset for run in plan.slots.runs.values() for call in range(run.calls)]
    guards = set(plan.guards)
    assert all(start % ALIGNMENT == 0 and start - GUARD_BYTES in guards for start in starts)


LADDERS = st.lists(
    st.builds(Descriptor, st.just("verify"), st.integers(1, 64), st.integers(1, 8)), min_size=1, max_size=8, unique=True
)


@pytest.mark.invariant("A3")
@given(LADDERS, st.integers(1, 9), st.integers(1, 4000), st.integers(0, 4096), st.sampled_from(WORLD_SIZES))
def test_slots_of_any_ladder_are_disjoint_aligned_and_guarded(
    ladder: list[Descriptor], calls: int, half_bytes: int, eager: int, size: int
) -> None:
    def planned(descriptors: list[Descriptor]) -> ArenaPlan:
        return plan_slots(
            descriptors,
            calls_per_descriptor=calls,
            bytes_per_token=2 * half_bytes,
            max_batched_tokens=eager,
            size=size,
            limit=1 << 40,
        ).need()

    plan = planned(ladder)
    check_pieces(plan)
    found = table(plan)
    assert found.count == calls * len(ladder) and plan.nbytes % (4 * MIB) == 0
    for one in ladder:
        run = found.runs[one]
        assert run.nbytes >= one.num_tokens * 2 * half_bytes and found.channel.largest >= run.nbytes
        # A slot comes round again after one replay at the earliest: two other calls lie between, or it is doubled.
        assert run.stride == (0 if calls >= 3 else run.nbytes)
    assert planned(ladder[::-1]).terms() == plan.terms(), "the ladder's order changes an offset"


@pytest.mark.invariant("A3")
def test_a_slot_follows_from_the_place_of_its_call_and_not_from_what_others_took() -> None:
    run = table(v4_slots(16)).runs[mtp(16)[2]]
    boxes = [run.box(call) for call in range(CALLS)]
    assert len(set(boxes)) == CALLS and [run.box(call) for call in reversed(range(CALLS))] == boxes[::-1]
    for beyond in (-1, CALLS):
        with pytest.raises(ArenaError, match=r"the slots of verify\(20 tokens, 4 requests\) are used up"):
            run.box(beyond)


@pytest.mark.invariant("A3")
def test_a_slot_that_comes_back_after_two_other_calls_is_not_doubled() -> None:
    def strides(calls: int) -> set[int]:
        plan = plan_slots(mtp(2), calls_per_descriptor=calls, bytes_per_token=512, size=2)
        return {run.stride // run.nbytes for run in table(plan).runs.values()}

    assert [strides(calls) for calls in (1, 2, 3, 87)] == [{1}, {1}, {0}, {0}]


@pytest.mark.invariant("A4")
@given(
    st.integers(1, 1 << 24).map(lambda half: 2 * half),
    st.sampled_from(WORLD_SIZES),
    st.sampled_from([None, UNKNOWN, 1, 4, 8, 16]),
    st.integers(1, 3),
    st.integers(20, 40),
)
def test_lanes_of_any_channel_are_disjoint_aligned_and_guarded_and_a_message_fits(
    largest: int, size: int, atomicity: Any, channels: int, limit: int
) -> None:
    names = ("main", "side", "third")[:channels]
    plan = plan_channels(largest=largest, size=size, atomicity=atomicity, channels=names, limit=1 << limit)
    if plan.reason:
        assert plan.nbytes > plan.limit
        return
    check_pieces(plan)
    assert plan.nbytes <= plan.limit
    for layout in plan.channels:
        assert layout.scatter is None or layout.scatter.largest * size >= largest
        assert layout.staging is None or layout.staging.largest >= largest
        assert layout.sentinel is None or layout.sentinel.largest >= min(largest, 4096)
    assert plan == plan_channels(largest=largest, size=size, atomicity=atomicity, channels=names, limit=1 << limit)


@pytest.mark.invariant("A4", control=True)
@given(st.integers(1, 1 << 22), st.integers(1, 1 << 22), st.sampled_from(WORLD_SIZES))
def test_a_larger_capacity_never_needs_less(one: int, other: int, size: int) -> None:
    less, more = (
        plan_channels(largest=2 * half, size=size, atomicity=8, limit=1 << 40).nbytes for half in sorted((one, other))
    )
    assert less <= more


@pytest.mark.invariant("A4")
def test_offsets_of_a_rank_depend_on_no_message_and_a_fingerprint_on_every_one() -> None:
    plan = plan_channels(largest=V4_FLASH, size=4, atomicity=8)
    seen = {plan.fingerprint}
    for other in (
        plan_channels(largest=V4_FLASH + 2, size=4, atomicity=8),
        plan_channels(largest=V4_FLASH, size=6, atomicity=8),
        plan_channels(largest=V4_FLASH, size=4, atomicity=4),
        plan_channels(largest=V4_FLASH, size=4, atomicity=8, channels=("other",)),
        v4_slots(16, size=4),
        v4_slots(32, size=4),
    ):
        assert other.fingerprint not in seen
        seen.add(other.fingerprint)
    assert plan_channels(largest=V4_FLASH, size=4, atomicity=8).fingerprint == plan.fingerprint


# -- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant("A11")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"largest": True}, "largest cannot be True"),
        ({"largest": 0}, "it is below 1"),
        ({"largest": -2}, "it is below 1"),
        ({"largest": 4097}, "it is odd"),
        ({"largest": 4096.0}, "float, where an int is wanted"),
        ({"largest": "4096"}, "str, where an int is wanted"),
        ({"largest": 1 << 64}, "it does not fit 64 bits"),
        ({"largest": 4096, "size": True}, "size cannot be True"),
        ({"largest": 4096, "size": 0}, "size cannot be 0"),
        ({"largest": 4096, "size": -2}, "size cannot be -2"),
        ({"largest": 4096, "limit": False}, "limit cannot be False"),
        ({"largest": 4096, "atomicity": 0}, "atomicity cannot be 0"),
        ({"largest": 4096, "bytes_per_token": 3}, "bytes_per_token cannot be 3"),
        ({"largest": 4096, "channels": ()}, "channels need names"),
        ({"largest": 4096, "channels": ("a", "a")}, "channels need names"),
        ({"largest": 4096, "channels": "main"}, "channels need names"),
        ({"largest": 4096, "channels": (1,)}, "channels need names"),
        ({"largest": 4096, "lanes": "pull"}, "no lanes called 'pull'"),
    ],
)
def test_what_no_channel_can_have_is_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ArenaError, match="cannot be|channels need|no lanes") as caught:
        plan_channels(**arguments)
    assert says in str(caught.value)


@pytest.mark.invariant("A11")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"calls_per_descriptor": 0}, "calls_per_descriptor cannot be 0"),
        ({"calls_per_descriptor": True}, "calls_per_descriptor cannot be True"),
        ({"bytes_per_token": 8191}, "it is odd"),
        ({"max_batched_tokens": -1}, "it is below 0"),
        ({"max_batched_tokens": 1 << 60}, "max_batched_tokens x bytes_per_token"),
        ({"descriptors": ()}, "a plan of slots needs a descriptor"),
        ({"size": 2.0}, "size cannot be 2.0"),
    ],
)
def test_what_no_slots_can_have_is_refused_at_once(change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"descriptors": mtp(2), "calls_per_descriptor": 3, "bytes_per_token": 8192} | change
    with pytest.raises(ArenaError) as caught:
        plan_slots(arguments.pop("descriptors"), **arguments)
    assert says in str(caught.value)


@pytest.mark.invariant("A11")
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_what_does_not_fit_64_bits_is_refused_with_a_limit_that_would_allow_it(size: int) -> None:
    largest = (1 << 62) + 2
    plan = plan_channels(largest=largest, size=size, atomicity=8, limit=(1 << 63) - 1)
    assert plan.nbytes > (1 << 63) - 1 and "do not fit 64 bits" in plan.reason
    slots = plan_slots(
        mtp(64), calls_per_descriptor=CALLS, bytes_per_token=1 << 53, size=size, limit=(1 << 63) - 1
    )
    assert "do not fit 64 bits" in slots.reason


@pytest.mark.invariant("A11", control=True)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_what_fits_64_bits_and_not_32_is_planned(size: int) -> None:
    plan = plan_channels(largest=3 << 30, size=size, atomicity=8, limit=1 << 40, lanes="both").need()
    assert plan.nbytes > 1 << 33
    check_pieces(plan)
    slots = plan_slots(
        decode_ladder(4), calls_per_descriptor=3, bytes_per_token=2 << 30, size=size, limit=1 << 40
    ).need()
    check_pieces(slots)
    assert max(run.box(2).offset for run in table(slots).runs.values()) > 1 << 35
