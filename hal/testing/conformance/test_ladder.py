"""Ladders: nothing that can be reached lies between two descriptors, and nothing is in them twice."""

from __future__ import annotations

from typing import Any

import pytest

from halma.hal.errors import CaptureError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import decode_ladder, doubling, fit, ladder, refuse_unfit
from halma.hal.graph.orders import ordered

OFF_GRID = (1, 2, 3, 5, 7, 31, 33, 97, 100, 255, 320)


@pytest.mark.invariant("G16")
@pytest.mark.parametrize("most", OFF_GRID)
@pytest.mark.parametrize("sizes", [None, (), (1, 2)], ids=["default", "none", "small"])
def test_the_exact_maximum_is_always_in_the_ladder(most: int, sizes: tuple[int, ...] | None) -> None:
    chosen = None if sizes is None else [size for size in sizes if size <= most]
    made = decode_ladder(most, sizes=chosen)
    assert max(one.num_requests for one in made) == most
    assert fit(made, role="decode", num_requests=most) == Descriptor("decode", most)


@pytest.mark.invariant("G16")
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_every_reachable_width_has_its_maximum(width: int) -> None:
    made = decode_ladder(97, query_lens=(1, 2, 3, 5), context_capacities=(256, 512), role="verify")
    for context in (256, 512):
        assert Descriptor("verify", 97, width, context) in made


@pytest.mark.invariant("G16", control=True)
def test_a_ladder_on_its_grid_gets_nothing_extra() -> None:
    assert [one.num_requests for one in decode_ladder(8)] == [1, 2, 4, 8]
    assert [one.num_requests for one in decode_ladder(8, sizes=[2, 8])] == [2, 8]


def test_ladders_of_several_roles() -> None:
    made = ladder(decode=[1, 2, 4, 8], verify=3, query_lens=(1, 2))
    assert {one.role for one in made} == {"decode", "verify"}
    assert Descriptor("decode", 8, 2) in made and Descriptor("verify", 3, 1) in made
    assert len(made) == len(set(made)) == 8 + 6
    with pytest.raises(CaptureError, match="ladder of draft is empty"):
        ladder(draft=[])


@pytest.mark.parametrize("step", [(1, 1, 0), (3, 1, 100), (4, 2, 256), (5, 3, 257), (97, 3, 512)])
def test_fit_pads_to_the_smallest_that_holds_the_step(step: tuple[int, int, int]) -> None:
    made = decode_ladder(97, query_lens=(1, 3), context_capacities=(256, 512), variants=("greedy", "sample"))
    requests, width, context = step
    found = fit(made, role="decode", num_requests=requests, query_len=width, context=context, variant="sample")
    assert found is not None and found.variant == "sample"
    assert (found.num_requests, found.query_len, found.context_capacity) >= (requests, width, context)
    smaller = [
        one
        for one in made
        if one.num_requests >= requests and one.query_len >= width and one.context_capacity >= context
    ]
    assert found.num_tokens == min(one.num_tokens for one in smaller)


def test_what_no_descriptor_holds_fits_nowhere() -> None:
    made = decode_ladder(8, context_capacities=(256,))
    assert fit(made, role="decode", num_requests=9) is None
    assert fit(made, role="decode", num_requests=1, context=257) is None
    assert fit(made, role="draft", num_requests=1) is None
    assert fit(made, role="decode", num_requests=1, variant="sample") is None


def test_a_ladder_wider_than_the_state_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"decode\(16 tokens, 16 requests\) is wider"):
        decode_ladder(16, limit=8)
    with pytest.raises(CaptureError, match=r"decode\(16 tokens, 16 requests\) is wider"):
        decode_ladder(8, sizes=[1, 16])
    with pytest.raises(CaptureError, match=r"decode\(4 tokens, 4 requests\) is wider"):
        refuse_unfit([Descriptor("decode", 2), Descriptor("decode", 4)], limit=2)


def test_duplicates_and_empty_shapes_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"decode\(2 tokens, 2 requests\) is in the ladder twice"):
        decode_ladder(4, sizes=[1, 2, 2])
    with pytest.raises(CaptureError, match=r"decode\(0 tokens, 0 requests\) holds nothing"):
        decode_ladder(4, sizes=[0, 1])


def test_orders_are_permutations_and_the_same_everywhere() -> None:
    made = decode_ladder(97, query_lens=(1, 3), context_capacities=(256, 512))
    down, up = ordered(made, "descending"), ordered(made, "ascending")
    assert down == up[::-1] and down[0].num_tokens == 97 * 3 and up[0].num_tokens == 1
    shuffled = ordered(made, "shuffled(7)")
    assert shuffled == ordered(reversed(made), "shuffled(7)") and shuffled not in (down, up)
    assert sorted(shuffled) == sorted(made) and ordered(made, "shuffled(8)") != shuffled


@pytest.mark.parametrize("order", ["", "random", "shuffled", "shuffled()", "shuffled(x)", "shuffled(-1)", "Descending"])
def test_an_unknown_order_is_refused_with_the_list(order: str) -> None:
    with pytest.raises(CaptureError, match=r"descending, ascending, shuffled\(SEED\)"):
        ordered(decode_ladder(2), order)


def test_doubling_ends_at_its_largest() -> None:
    assert doubling(1, 1) == (1,) and doubling(8, 100) == (8, 16, 32, 64, 100)


@pytest.mark.parametrize(("smallest", "largest"), [(0, 5), (-1, 4), (8, 4), (1, 0)])
def test_sizes_that_never_reach_their_end_are_refused(smallest: int, largest: int) -> None:
    with pytest.raises(CaptureError, match=f"sizes from {smallest} to {largest}"):
        doubling(smallest, largest)


@pytest.mark.parametrize("nothing", [{"query_lens": ()}, {"context_capacities": ()}, {"variants": ()}])
def test_a_ladder_of_nothing_is_refused_instead_of_leaving_every_step_eager(nothing: dict[str, Any]) -> None:
    for most, more in ((4, nothing), (0, {}), (-1, {})):
        with pytest.raises(CaptureError, match="ladder of verify is empty"):
            decode_ladder(most, role="verify", **more)
