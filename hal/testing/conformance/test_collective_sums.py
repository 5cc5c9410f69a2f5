"""Right sums, bit by bit: every way, size and dtype; graphs and eager calls mixed; late ranks; wrapped epochs."""

# pyright: basic
from __future__ import annotations

from collections import defaultdict

import pytest

from halma.hal.backend import Backend
from halma.hal.collectives.choice import ORDER, name_of
from halma.hal.testing.conformance import collective_sums as programs
from halma.hal.testing.ranks import RankPools

WORLDS = [2, 4]
LARGE_WORLDS = [pytest.param(size, marks=pytest.mark.nightly) for size in (6, 8)]
LAST = 0xFFFFFFFF
SECONDS = 200.0


@pytest.mark.invariant("C1")
@pytest.mark.parametrize("size", [*WORLDS, *LARGE_WORLDS])
def test_every_way_gives_the_same_bits_on_every_rank(all_ranks: RankPools, size: int) -> None:
    by_case: dict[tuple[str, int], set[str]] = defaultdict(set)
    ways: set[str] = set()
    for found in all_ranks[size].run(programs.all_reduce_every_way, all_ranks.backend, seconds=SECONDS):
        for way, dtype, numel, right, bits in found:
            assert right, (way, dtype, numel)
            by_case[dtype, numel].add(bits)
            ways.add(way)
    assert {len(bits) for bits in by_case.values()} == {1}
    assert len(ways) >= 2 and any("two_shot" in way for way in ways)


@pytest.mark.invariant("C1", control=True)
def test_the_messages_tell_orders_of_adding_apart() -> None:
    """A sum in another order, or rounded at each step, has other bits: equal ones above mean something."""
    from halma.hal.testing.conformance.collective_setup import bits, expected_sum, summed, values

    torch_dtype = programs.DTYPES[0]
    messages = [values(rank, 4097, torch_dtype) for rank in range(4)]
    rounded = (messages[0] + messages[1] + messages[2]) + messages[3]
    wanted = bits(expected_sum(4, 4097, torch_dtype))
    assert bits(summed(messages)) == wanted
    assert bits(rounded) != wanted and bits(summed([message.float() for message in messages[::-1]])) != wanted
    wide = [values(rank, 4097, programs.DTYPES[2]) for rank in range(4)]
    assert bits(summed(wide[::-1])) != bits(summed(wide))


@pytest.mark.parametrize("size", [*WORLDS, *LARGE_WORLDS])
def test_norms_gathers_and_broadcasts_are_right_every_way(all_ranks: RankPools, size: int) -> None:
    for found in all_ranks[size].run(programs.other_kinds_every_way, all_ranks.backend, seconds=SECONDS):
        assert [case for case in found if not case[2]] == []
        assert {kind for _, kind, _ in found} == {"norm", "gather", "broadcast"}


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("way", [None, 1, 2, 3, 4], ids=lambda way: "rule" if way is None else name_of(ORDER[way]))
def test_an_odd_number_of_calls_replayed_twice_is_right(ranks: RankPools, way: int | None) -> None:
    for right in ranks[2].run(programs.odd_graphs, ranks.backend, way, 4):
        assert len(right) == 20 and all(right)


@pytest.mark.invariant("C2")
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("way", [None, 4], ids=["rule", "staged"])
def test_epochs_wrap_without_losing_parity(ranks: RankPools, size: int, way: int | None) -> None:
    """15 calls before the end and as many behind it; 1 is skipped with 0."""
    found = ranks[size].run(programs.mixed_calls, ranks.backend, 30, 1, way, LAST - 15, 0.0, None)
    assert found == [(30, 30, 16)] * size


@pytest.mark.invariant("C2", control=True)
def test_the_same_calls_far_from_the_wrap(ranks: RankPools) -> None:
    assert ranks[2].run(programs.mixed_calls, ranks.backend, 30, 1, None, 100, 0.0, None) == [(30, 30, 130)] * 2


@pytest.mark.invariant("C3")
@pytest.mark.parametrize("size", [*WORLDS, *LARGE_WORLDS])
def test_graphs_of_several_sizes_and_eager_calls_interleave(ranks: RankPools, size: int) -> None:
    found = ranks[size].run(programs.mixed_calls, ranks.backend, 60, 2, None, 0, 0.0, None)
    assert found == [(60, 60, 60)] * size


@pytest.mark.invariant("C3", control=True)
@pytest.mark.invariant("C8", control=True)
def test_the_same_on_every_way_in_turn(ranks: RankPools) -> None:
    for way in range(len(ORDER)):
        assert ranks[2].run(programs.mixed_calls, ranks.backend, 20, 3, way, 0, 0.0, None) == [(20, 20, 20)] * 2


@pytest.mark.invariant("C8")
@pytest.mark.parametrize("size", [*WORLDS, *LARGE_WORLDS])
@pytest.mark.parametrize("way", [None, 3], ids=["rule", "staged"])
def test_ranks_that_enter_late_in_any_order_get_right_sums(ranks: RankPools, size: int, way: int | None) -> None:
    found = ranks[size].run(programs.mixed_calls, ranks.backend, 40, 4, way, 0, 0.004, None)
    assert found == [(40, 40, 40)] * size


@pytest.mark.invariant("C8")
@pytest.mark.parametrize("members", [(1, 3), (3, 2)], ids=str)
def test_ranks_of_a_group_need_not_start_at_0(ranks: RankPools, members: tuple[int, ...]) -> None:
    found = ranks[4].run(programs.mixed_calls, ranks.backend, 20, 5, None, 0, 0.001, members)
    assert [found[rank] for rank in members] == [(20, 20, 20)] * 2
    assert [found[rank] for rank in range(4) if rank not in members] == [None, None]


@pytest.mark.invariant("C9")
def test_no_value_is_taken_for_a_flag(all_ranks: RankPools) -> None:
    for found in all_ranks[2].run(programs.bit_patterns, all_ranks.backend):
        assert [what for what, right in found if not right] == []
        assert len(found) == 5 * len(ORDER)


@pytest.mark.invariant("C9", control=True)
@pytest.mark.invariant("C10", control=True)
def test_plain_operands_are_right(all_ranks: RankPools) -> None:
    for found in all_ranks[2].run(programs.all_reduce_every_way, all_ranks.backend, (8, 64)):
        assert found and all(case[3] for case in found)


@pytest.mark.invariant("C10")
def test_offsets_odd_sizes_and_zero_tokens(all_ranks: RankPools) -> None:
    for found in all_ranks[2].run(programs.odd_operands, all_ranks.backend):
        assert [what for what, right in found if not right] == []


@pytest.mark.invariant("C10")
def test_what_cannot_be_taken_is_refused_with_the_reason(all_ranks: RankPools) -> None:
    reasons = {
        "strided": "x.contiguous()",
        "shape": "bfloat16[4, 6]",
        "dtype": "float32[4, 6]",
        "overlap": "share memory",
        "no tensor": "list",
        "negative view": "resolve_neg()",
        "gradient": "torch.no_grad()",
        "subclass": "torch.ops.halma",
        "root": "no rank 2",
        "root of a half": "no rank 0.5",
        "root true": "no rank True",
        **{f"eps {eps}": f"found: {eps}" for eps in ("-1e-06", "nan", "inf", "None")},
        **{f"bound {bound}": "seconds above 0" for bound in ("0", "-1", "10000000000.0", "3")},
        "residual": "share memory",
        "weight": "bfloat16[5]",
        "gather": "bfloat16[2, 4, 6]",
        "closed": "is closed",
        "closed rearm": "is closed",
    }
    for found in all_ranks[2].run(programs.refused_operands, all_ranks.backend):
        assert found.pop("after") == ""
        assert {name: reasons[name] in text for name, text in found.items()} == dict.fromkeys(reasons, True)
        assert all(text.startswith("CollectiveError") for text in found.values())


@pytest.mark.invariant("C10", control=True)
def test_parameters_plain_numbers_and_the_last_rank_are_taken(all_ranks: RankPools) -> None:
    assert all_ranks[2].run(programs.good_operands, all_ranks.backend) == [[True] * 3] * 2


@pytest.mark.parametrize("size", [*WORLDS, *LARGE_WORLDS])
def test_integers_above_words_are_moved_by_the_channel(all_ranks: RankPools, size: int) -> None:
    for found in all_ranks[size].run(programs.large_moves, all_ranks.backend):
        assert "vendor" not in found
        assert [right for way in found.values() for right in way] == [True] * 4


@pytest.mark.invariant("K3")
def test_a_norm_as_fp8_is_the_norm_quantised(all_ranks: RankPools) -> None:
    refusals = {
        "no scale": "float32[2, 256]",
        "plain out": "float8_e4m3fn[2, 256]",
        "scale's shape": "float32[2, 2]",
        "rows of 192": "multiple of 128",
    }
    for found in all_ranks[2].run(programs.fp8_norms, all_ranks.backend):
        assert {name: text in found.pop(name) for name, text in refusals.items()} == dict.fromkeys(refusals, True)
        assert len(found) == 18 and [case for case, right in found.items() if not right] == []


def test_what_no_channel_does_goes_to_the_vendor_with_the_reason(all_ranks: RankPools, halma_backend: Backend) -> None:
    for found in all_ranks[2].run(programs.vendor_calls, all_ranks.backend):
        assert found["double"] and found["large"]
        reasons = found["reasons"]
        chosen, why, count = reasons["all_reduce of 32 bytes of float64"]
        assert (chosen, count) == ("vendor", 1) and "float64 is not added up" in why
        assert "16,384 bytes are more than its" in reasons["all_reduce of 16384 bytes of float32"][1]
