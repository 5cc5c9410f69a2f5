"""MTP with a model divided among ranks, in real processes: tokens and acceptance as on one rank without ranks."""

from __future__ import annotations

import pytest

from halma.hal.testing.ranks import RankPools
from halma.models.deepseek_v4.stepper import Text
from tests.cpu.model.mtp import TINY, again, plain, texts
from tests.cpu.model.parallel import EIGHT_GROUPS, Job, draft_on_ranks, drafted, plan_too_little

SECONDS = 300.0


def given() -> list[Text]:
    return texts(TINY, (3, 19, 9), 10, heat=0.8)


@pytest.mark.invariant("M11")
@pytest.mark.invariant("M1")
@pytest.mark.timeout(600)
def test_two_ranks_draft_and_accept_what_one_rank_does(all_ranks: RankPools):
    """Greedy and drawn requests in one batch; the model's own drafts, every rank with its part of the vocabulary."""
    job = Job((), None, options={"mtp": 4, "max_context": 256})
    expected = drafted(job, given())
    assert expected[0] == [plain(TINY, text) for text in given()] and sum(map(sum, expected[1])) > 0
    assert all_ranks[2].run(draft_on_ranks, job, again(given()), seconds=SECONDS) == [expected] * 2


@pytest.mark.invariant("A2")
@pytest.mark.timeout(300)
def test_a_step_that_verifies_more_rows_than_were_planned_is_refused_at_start_up(all_ranks: RankPools):
    job = Job((), EIGHT_GROUPS, options={"mtp": 8, "batches": (1,)})  # 3 requests of 9 tokens: 27 rows
    for message in all_ranks[2].run(plan_too_little, job, seconds=SECONDS):
        assert "does not cover the capture ladder" in message
        assert "verify(27 tokens, 3 requests" in message and "verify(9 tokens" not in message


@pytest.mark.invariant("A2", control=True)
@pytest.mark.timeout(300)
def test_a_ladder_that_fits_is_captured(all_ranks: RankPools):
    job = Job((), EIGHT_GROUPS, options={"mtp": 4, "batches": (1,)})  # 15 rows
    assert all_ranks[2].run(plan_too_little, job, seconds=SECONDS) == ["", ""]
