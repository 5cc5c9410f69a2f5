"""Attention ranks that share a model in groups: the tokens of one process, and who hears of a rank that ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from halma.hal.errors import RankError, RequestError
from halma.hal.testing.ranks import Lost, RankPools
from halma.models.deepseek_v4.engine import Request
from halma.models.deepseek_v4.role_groups import _known_better
from halma.models.deepseek_v4.role_ranks import RoleRanks
from tests.role_group_processes import grouped_until, play_grouped
from tests.role_processes import Job, Served, attend, prompts

SECONDS = 300.0
BOUND = 4.0
pytestmark = pytest.mark.timeout(600)


def job(count: int = 3, most: int = 4, **changes: Any) -> Job:
    given = {"requests": tuple(Request(prompt, most) for prompt in prompts(count, 20)), **changes}
    return Job(**given)


@functools.cache
def alone(count: int = 3) -> Served:
    return attend(job(count))


@pytest.mark.invariant("F16", control=True)
def test_a_group_gives_the_tokens_of_one_process(all_ranks: RankPools):
    first, second, counters = all_ranks[3].run(play_grouped, [job(1)], 1, 2, seconds=SECONDS)
    expected = alone(1)
    assert first.tokens == second.tokens == expected.tokens
    assert (first.replayed, first.eager) == (expected.replayed, expected.eager) and first.replayed > 0
    # One item a layer and step, whoever shares the step.
    assert counters["items"] == 4 * (first.replayed + first.eager)
    assert first.weights == second.weights < expected.weights / 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{}, {"graph": False, "ffn_graph": False}, {"arithmetic": "shipping"}, {"options": {"mtp": 2}}],
    ids=["graph", "eager", "shipping", "drafts"],
)
def test_two_groups_and_two_ffn_ranks(all_ranks: RankPools, changes: dict[str, Any]):
    jobs = [job(**changes), job(2, **changes)]
    found = all_ranks[6].run(play_grouped, jobs, 2, 2, seconds=SECONDS)
    for group, wanted in enumerate(jobs):
        one, two = found[2 * group : 2 * group + 2]
        assert one.tokens == two.tokens
        assert "arithmetic" in changes or one.tokens == attend(wanted).tokens
    steps = sum(one.replayed + one.eager for one in found[0:4:2])
    assert all(one["items"] == 4 * steps or "options" in changes for one in found[4:])


@pytest.mark.nightly
def test_a_group_without_requests_blocks_nobody(all_ranks: RankPools):
    found = all_ranks[5].run(play_grouped, [job(), job(0)], 1, 2, seconds=SECONDS)
    assert found[0].tokens == found[1].tokens == alone().tokens and found[2].tokens == []


@pytest.mark.invariant("F16")
@pytest.mark.parametrize(
    ("victim", "name"),
    [
        pytest.param(2, "rank 1 (FFN 0, global rank 2 on ", id="ffn"),
        pytest.param(1, "global rank 1 on ", id="attention", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_dies_ends_its_group_with_its_name(all_ranks: RankPools, victim: int, name: str):
    found = all_ranks[3].run(grouped_until, [job(most=60)], 1, 2, victim, BOUND, seconds=90.0, lost=[victim])
    assert isinstance(found[victim], Lost) and "exit status 9" in found[victim].why
    for rank in {0, 1, 2} - {victim}:
        said, _ = found[rank]
        assert said.startswith("RankError: ") and name in said and "ended without a word" in said, (rank, said)


class Says:
    """Rings or peers that know of ``what``, or of nothing."""

    def __init__(self, what: str = "") -> None:
        self.what = what

    def poll(self) -> None:
        if self.what:
            raise RankError(self.what)

    check = poll


@pytest.mark.invariant("F16")
def test_what_rings_know_goes_before_what_ranks_say_that_waited() -> None:
    found: Any = _known_better(Says("FFN 0 ended"), Says("rank 1 left"))  # type: ignore[arg-type]
    assert "FFN 0 ended" in str(found)


@pytest.mark.invariant("F16", control=True)
def test_where_rings_know_nothing_a_rank_of_the_group_is_named() -> None:
    found: Any = _known_better(Says(), Says("rank 1 left"))  # type: ignore[arg-type]
    assert "rank 1 left" in str(found) and _known_better(Says(), Says()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("attention", "tp", "legal"), [(4, 3, "--tp 1, 2, 4"), (3, 2, "--tp 1, 3"), (2, 0, "1, 2")])
def test_attention_ranks_that_make_no_whole_groups_are_refused(attention: int, tp: int, legal: str):
    with pytest.raises(RequestError, match=legal):
        RoleRanks(attention, 1, tp)
    assert RoleRanks(4, 2, 2).groups == ((0, 1), (2, 3)) and RoleRanks(4, 2, 2).rings == (0, 2, 4, 5)
