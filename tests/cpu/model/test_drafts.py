"""How many tokens to draft: acceptance counted, and the choice that follows from it and from step costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.decisions import decisions
from halma.hal.errors import RequestError
from halma.models.deepseek_v4.engine_drafts import (
    DECIDE_EVERY,
    MEMORY,
    Acceptance,
    AdaptiveDrafts,
    FixedDrafts,
    StepCosts,
    auto_lengths,
    check_costs,
    check_drafts,
)

LENGTHS = (1, 2, 4, 8)


def costs(per_draft: float, *, sizes: tuple[int, ...] = (1, 4)) -> StepCosts:
    """A step of k drafts takes 1 + k * per_draft milliseconds."""
    return StepCosts({(size, k): (1 + k * per_draft) * 1e-3 for size in sizes for k in LENGTHS})


@pytest.mark.parametrize(("most", "lengths"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (5, (1, 2, 4, 5)), (8, LENGTHS)])
def test_at_most_four_lengths_are_captured_up_to_the_most(most, lengths):
    assert auto_lengths(most) == lengths and len(auto_lengths(most)) <= 4


def test_acceptance_counts_what_could_have_been_accepted():
    found = Acceptance()
    found.count(verified=4, judged=4, accepted=2)
    found.count(verified=4, judged=4, accepted=4)
    found.count(verified=4, judged=1, accepted=1)  # one token was left to the request
    assert found.as_json() == {
        "acceptance": [1.0, 1.0, 0.5, 0.5],
        "judged": [3, 2, 2, 2],
        "accepted": [3, 2, 1, 1],
        "mean_accepted_length": 4.0,
        "tokens_per_step": 10 / 3,
        "verified": 3,
    }


def test_acceptance_of_nothing_is_null():
    found = Acceptance().as_json()
    assert found["acceptance"] == [] and found["mean_accepted_length"] is None and found["tokens_per_step"] is None


@pytest.mark.parametrize(("per_draft", "expected"), [(0.01, 8), (2.0, 1)])
def test_cheap_drafts_are_many_and_dear_ones_few(per_draft, expected):
    chooser = AdaptiveDrafts(costs(per_draft))
    for _ in range(4 * DECIDE_EVERY):
        drafts = chooser.choose(1)
        chooser.seen(drafts, drafts)
    assert chooser.choose(1) == expected


def test_the_choice_follows_acceptance():
    """The same costs: drafts that are always right make it the longest, drafts that are always wrong the shortest."""
    right, wrong = AdaptiveDrafts(costs(0.2)), AdaptiveDrafts(costs(0.2))
    for _ in range(4 * DECIDE_EVERY):
        drafts = right.choose(1)
        right.seen(drafts, drafts)
        wrong.seen(wrong.choose(1), 0)
    assert (right.choose(1), wrong.choose(1)) == (8, 1)


def test_what_was_never_tried_is_expected_from_the_draft_before_it():
    chooser = AdaptiveDrafts(costs(0.2))
    chooser.seen(1, 1)
    for _ in range(200):
        chooser.seen(1, 1)
    assert chooser.expected(4) > 4.5  # one-draft steps alone made longer ones worth a try
    for _ in range(200):
        chooser.seen(4, 1)
    assert 1.9 < chooser.expected(4) < 2.3


def test_old_text_fades():
    chooser = AdaptiveDrafts(costs(0.2))
    for _ in range(int(10 * MEMORY)):
        chooser.seen(1, 1)
    for _ in range(int(2 * MEMORY)):
        chooser.seen(1, 0)
    assert chooser.expected(1) < 1.25


@pytest.mark.invariant("G27")
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=120))
def test_the_length_changes_at_fixed_steps_alone(story):
    """Whatever was seen in between: every 16th step, or where the number of requests moves to another captured size."""
    chooser, last, since = AdaptiveDrafts(costs(0.2)), (0, 0), 0
    for requests, accepted, reads in story:
        rung = chooser.costs.rung(requests)
        drafts = chooser.choose(requests)
        since = 0 if rung != last[0] or since + 1 == DECIDE_EVERY else since + 1
        assert drafts == last[1] or since == 0
        last = (rung, drafts)
        for _ in range(reads):
            chooser.seen(drafts, min(accepted, drafts))


@pytest.mark.invariant("G27", control=True)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), max_size=120))
def test_the_same_story_and_costs_give_the_same_choices(story):
    one, two = AdaptiveDrafts(costs(0.2)), AdaptiveDrafts(costs(0.2))
    for requests, accepted in story:
        drafts = one.choose(requests)
        assert two.choose(requests) == drafts
        for chooser in (one, two):
            chooser.seen(drafts, min(accepted, drafts))
    assert one.as_json() == two.as_json()


def test_a_choice_says_why_in_the_report_and_among_the_layers_decisions():
    decisions.clear()
    chooser = AdaptiveDrafts(costs(0.01))
    chooser.choose(3)
    report = chooser.as_json()
    assert report["asked"] == "auto" and report["choices"][0]["requests"] == 4 and report["choices"][0]["drafts"] == 8
    assert set(report["choices"][0]["tokens_per_second"]) == {"1", "2", "4", "8"}
    assert {"requests": 4, "drafts": 8, "milliseconds": pytest.approx(1.08)} in report["step_costs"]
    ((decision, count),) = decisions.all("drafts")
    assert decision.chosen == "8 drafts" and decision.subject == "4 requests" and count == 1
    assert "tokens expected in 1.080 ms" in decision.reason and len(decision.candidates) == 4


def test_a_fixed_length_stays():
    fixed = FixedDrafts(3)
    assert fixed.choose(1) == fixed.choose(64) == 3 and fixed.as_json() == {"asked": 3, "choices": []}


@pytest.mark.parametrize(
    ("asked", "captured", "words"),
    [
        (4, (), ("made without MTP", "RunnerOptions(mtp=")),
        ("auto", (), ("made without MTP",)),
        (3, (4,), ("made for 4 drafts", "drafts=4")),
        (True, (1,), ("made for 1 drafts",)),
        ("some", (1, 2), ("made for 1, 2 drafts", '"auto"')),
    ],
)
def test_drafts_that_a_runner_has_no_steps_for_are_refused(asked, captured, words):
    with pytest.raises(RequestError) as refusal:
        check_drafts(asked, captured)
    for word in words:
        assert word in str(refusal.value)


def test_drafts_that_it_has_are_not():
    check_drafts(4, (1, 4))
    check_drafts("auto", (4,))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({}, "cannot be compared"),
        ({(1, 1): 1e-3, (4, 2): 1e-3}, "(1, 2), (4, 1)"),
        ({(1, 1): 0.0}, "(1, 1)"),
        ({(1, 1): float("nan")}, "(1, 1)"),
    ],
)
def test_costs_that_no_choice_can_follow_from_are_refused(seconds, words):
    with pytest.raises(RequestError, match="cannot be compared") as refusal:
        check_costs(StepCosts(seconds))
    assert words in str(refusal.value)
