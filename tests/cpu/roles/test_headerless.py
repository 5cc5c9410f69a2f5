"""FFN ranks whose one graph serves whichever item comes: no header is read, and everything else is as with headers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.hal.errors import CaptureError, RequestError
from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from halma.models.deepseek_v4.ffn.costs import CostTable, Span
from halma.models.deepseek_v4.headerless import without_headers
from halma.models.deepseek_v4.role_ranks import check_items
from tests.role_processes import Job, Served, attend, play, play_until, prompts, serve_refused

SECONDS = 300.0
BOUND = 3.0
MARGIN = 20.0
pytestmark = pytest.mark.timeout(600)


def job(count: int = 3, most: int = 4, **changes: Any) -> Job:
    given = {"requests": tuple(Request(prompt, most) for prompt in prompts(count, 20)), "items": "worst-case"}
    return Job(**{**given, **changes})


@functools.cache
def alone(count: int = 3) -> Served:
    return attend(job(count))


def served_all(counters: dict[str, Any], steps: int) -> None:
    assert counters["way"] == {"chosen": "worst-case", "why": "asked for"} and "program" not in counters
    assert counters["items"] == 4 * steps <= counters["looks"]


@pytest.mark.nightly  # with headers it is a pull request's
@pytest.mark.invariant("F15")
def test_an_idle_attention_rank_blocks_nobody(all_ranks: RankPools):
    served, nothing, counters = all_ranks[3].run(play, [job(1), job(0)], 1, seconds=90.0)
    assert served.tokens == alone(1).tokens and nothing is None
    served_all(counters, served.replayed + served.eager)
    assert counters["shared"] == counters["rows"] and counters["pairs"] == 4 * counters["rows"]


@pytest.mark.invariant("F15", control=True)
@pytest.mark.nightly
def test_whoever_sends_an_item_gets_the_reply(all_ranks: RankPools):
    """Ranks 0 and 1 have requests of their own, rank 2 has none."""
    jobs = [job(), job(2), job(0)]
    one, two, nothing, counters = all_ranks[4].run(play, jobs, 1, seconds=SECONDS)
    assert one.tokens == alone().tokens and two.tokens == alone(2).tokens and nothing is None
    served_all(counters, sum(served.replayed + served.eager for served in (one, two)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{"carrier": torch.float64}, {"carrier": torch.float64, "options": {"mtp": 2}}],
    ids=["uneven", "drafts"],
)
def test_two_ffn_ranks_with_uneven_parts(all_ranks: RankPools, changes: dict[str, Any]):
    """The shared expert's rows are a part of an item's, added on the device."""
    wide = job(**changes)
    served, few, many = all_ranks[3].run(play, [wide], 2, seconds=SECONDS, each=[((0, 3, 16),)] * 3)
    assert served.tokens == attend(wide).tokens
    assert few["items"] == many["items"] and 0 < few["pairs"] < many["pairs"]
    assert few["pairs"] + many["pairs"] == 4 * (few["shared"] + many["shared"])


@pytest.mark.nightly
def test_a_rank_that_pauses_is_waited_for_by_looks_that_end(all_ranks: RankPools):
    served, counters = all_ranks[2].run(play, [job()], 1, seconds=SECONDS, each=[((), {0: 1.0}, (1.0,))] * 2)
    assert served.tokens == alone().tokens
    served_all(counters, served.replayed + served.eager)
    assert counters["looks"] > counters["items"] + 5


@pytest.mark.invariant("F16")
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["attention", "ffn"])
def test_a_rank_that_dies_ends_the_other_with_its_name(all_ranks: RankPools, victim: int):
    long = job(most=60)
    how = [long], 1, victim, "dies", BOUND
    found = all_ranks[2].run(play_until, *how, seconds=60.0, lost=[victim])
    assert isinstance(found[victim], Lost) and "exit status 9" in found[victim].why
    said, seconds = found[1 - victim]
    role = ("attention 0", "FFN 0")[victim]
    assert said.startswith(f"RankError: rank {victim} ({role}, ") and "ended" in said and seconds < BOUND + MARGIN


def program_that(costs: dict[int, tuple[float, float]], *, off: str | None = None, by_layer: str = "") -> Any:
    """Buckets by size, seconds of each and of the worst case; the last one is the worst case."""
    last = max(costs, default=0)
    spans = {
        size: Span(size, size, {way: (seconds, seconds) for way, seconds in found})
        for size, (bucket, worst) in costs.items()
        for found in [[("worst case", worst)] if size == last else [("bucket", bucket), ("worst case", worst)]]
    }
    session = SimpleNamespace(off_reason=lambda _role: off)
    return SimpleNamespace(session=session, by_layer=by_layer, costs=CostTable(spans))  # pyright: ignore


def test_auto_goes_without_headers_where_the_worst_case_costs_no_more():
    even, dear = {64: (2e-5, 2e-5), 512: (0.0, 2e-5)}, {64: (2e-5, 9e-5), 128: (5e-5, 9e-5), 512: (0.0, 9e-5)}
    assert without_headers(program_that(even), "auto") == (
        True,
        "the worst case was measured to cost no more at any size",
    )
    chosen, why = without_headers(program_that(dear), "auto")
    assert not chosen and why == "64 routed rows cost 20.0 us by bucket, 90.0 in the worst case"
    assert without_headers(program_that({}), "auto") == (False, "nothing was measured")
    assert without_headers(program_that(even, by_layer="other formats"), "auto") == (False, "other formats")
    assert without_headers(program_that(even), "headers") == (False, "asked for")
    assert without_headers(program_that(dear), "worst-case") == (True, "asked for")
    for program in (program_that(even, off="HALMA_GRAPH=0"), program_that(even, by_layer="other formats")):
        with pytest.raises(CaptureError, match="cannot serve every item here"):
            without_headers(program, "worst-case")


def test_what_cannot_serve_without_headers_is_refused(all_ranks: RankPools):
    said = all_ranks[2].run(serve_refused, job(ffn_graph=False))[1]
    assert said.startswith("CaptureError: one graph of the worst case needs graphs") and "--items headers" in said
    with pytest.raises(RequestError, match="one of headers, worst-case, auto"):
        check_items("by post")
