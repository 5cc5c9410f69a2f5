"""MTP changes no token: whatever is drafted, however many, whoever shares the step, graph or no graph."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halma
from halma.hal.errors import ModelError, RequestError
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.state import LOG_STEPS, TOKEN_RING
from halma.models.deepseek_v4.stepper import Stepper, Text
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from tests.cpu.model.mtp import ANY, LENGTHS, RANDOM, TINY, again, forced, model, plain, run_with, runner, texts

UNEQUAL = (3, 37, 18, 1)


def assert_same(found: list[Text], name: str, arithmetic: str = "exact") -> None:
    assert [text.tokens for text in found] == [plain(name, text, arithmetic) for text in found]


# -- M1: the same tokens --------------------------------------------------------------------------------


# Pairwise over (drafts, requests, graph, heat); the full product is the nightly row's.
@pytest.mark.invariant("M1")
@pytest.mark.parametrize(
    ("drafts", "requests", "graph", "heat"),
    [(1, 1, False, 0.0), (4, 4, True, 0.0), (8, 4, False, 0.8), (2, 4, True, 0.8)],
)
def test_a_trained_model_gives_the_tokens_it_gives_without_drafts(drafts, requests, graph, heat):
    given = texts(TINY, UNEQUAL[:requests], 20, heat=heat)
    found = Stepper(runner(TINY, max_requests=requests, mtp=drafts, graph=graph), given).run(drafts)
    assert_same(found, TINY)
    assert sum(sum(text.accepted) for text in found) > 0, "some drafts were right, or nothing was tested"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("drafts", range(1, 9))
def test_a_trained_model_gives_the_tokens_it_gives_without_drafts_in_full(drafts, requests, graph):
    lengths = [UNEQUAL[number % 4] + number // 4 for number in range(requests)]
    given = texts(TINY, lengths, 12, heat=0.8)
    served = runner(TINY, max_requests=requests, mtp=drafts, graph=graph, fresh=True)
    assert_same(Stepper(served, given).run(drafts), TINY)
    served.close()


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Text], list[list[bool]], int]:
    """Unequal requests, which of their drafts are right, and how many drafts a step has."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    given = texts(
        RANDOM, lengths, draw(st.integers(3, 14)), heat=draw(st.sampled_from([0.0, 0.8])), seed=draw(st.integers(0, 9))
    )
    right = [draw(st.lists(st.booleans(), min_size=24, max_size=24)) for _ in given]
    return given, right, draw(st.sampled_from(LENGTHS))


@pytest.mark.invariant("M1")
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=requests())
def test_whatever_is_accepted_a_random_model_gives_the_same_tokens(arithmetic, case):
    check_random(arithmetic, *case)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=requests())
def test_whatever_is_accepted_a_random_model_gives_the_same_tokens_at_length(arithmetic, case):
    check_random(arithmetic, *case)


def check_random(arithmetic: str, given: list[Text], right: list[list[bool]], drafts: int) -> None:
    expected = [plain(RANDOM, text, arithmetic) for text in given]
    served = runner(RANDOM, arithmetic, **ANY)
    proposed = forced(expected, served.config.vocab_size, lambda number, place: right[number][place])
    found = run_with(Stepper(served, again(given)), drafts, proposed)
    assert [text.tokens for text in found] == expected
    for text, hits in zip(found, right, strict=True):  # it accepts what is right, no less
        have, steps = 1, []
        while have < text.max_tokens:
            room = min(drafts, text.max_tokens - have - 1)
            steps.append(next((n for n in range(room) if not hits[have + n]), room))
            have += steps[-1] + 1
        assert text.accepted == steps


@pytest.mark.invariant("M1")
def test_drafts_that_are_all_wrong_are_all_turned_down():
    given = texts(RANDOM, UNEQUAL[:2], 9)
    expected = [plain(RANDOM, text) for text in given]
    served = runner(RANDOM, **ANY)
    wrong = forced(expected, served.config.vocab_size, lambda *_: False)
    found = run_with(Stepper(served, given), 3, wrong)
    assert [text.tokens for text in found] == expected and all(not any(text.accepted) for text in found)


@pytest.mark.invariant("M1")
def test_the_number_of_drafts_may_change_from_step_to_step():
    given = texts(TINY, UNEQUAL[:3], 24)
    stepper = Stepper(runner(TINY, max_requests=3, mtp=4, mtp_lengths=(0, 2, 4), graph=False), given)
    stepper.prefill()
    lengths = [4, 0, 2, 4, 4, 0, 0, 2]
    for _ in stepper.unfinished():
        lengths.append(lengths.pop(0))
        stepper.step(lengths[-1])
    assert_same(given, TINY)


def test_in_checked_mode_poison_reaches_no_token():
    served = runner(TINY, max_requests=3, mtp=3, checked=True, graph=True, capture_prefill=True, fresh=True)
    found = Stepper(served, texts(TINY, UNEQUAL[:2], 16)).run(3)
    assert served.session.replays > 8
    assert_same(found, TINY)
    served.close()


# -- M2: what is accepted does not depend on the batch ---------------------------------------------------


@functools.cache
def accepted(copies: int, drafts: int) -> list[list[int]]:
    """What each of four texts accepts, step by step, each in the batch ``copies`` times."""
    given = texts(TINY, UNEQUAL, 20) * copies
    served = runner(TINY, max_requests=len(given), mtp=drafts, graph=False)
    found = Stepper(served, again(given)).run(drafts)
    runs = [text.accepted for text in found]
    assert all(runs[number] == runs[number % 4] for number in range(len(runs)))
    return runs[:4]


@pytest.mark.invariant("M2")
def test_acceptance_is_the_same_in_any_batch():
    alone = [
        Stepper(runner(TINY, max_requests=1, mtp=4, graph=True), [text]).run(4)[0].accepted
        for text in texts(TINY, UNEQUAL, 20)
    ]
    assert accepted(1, 4) == alone and accepted(4, 4) == alone and sum(map(sum, alone)) > 8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.invariant("M2")
@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_acceptance_is_the_same_in_a_batch_of_64(drafts):
    assert accepted(16, drafts) == accepted(1, drafts)


@pytest.mark.invariant("M2", control=True)
def test_other_texts_accept_other_runs():
    runs = accepted(1, 4)
    assert len({tuple(run) for run in runs}) == len(runs)


# -- M5: requests that end inside an accepted run --------------------------------------------------------


def all_right(given: list[Text], expected: list[list[int]], drafts: int) -> list[Text]:
    served = runner(RANDOM, **ANY)
    proposed = forced(expected, served.config.vocab_size, lambda *_: True)
    return run_with(Stepper(served, given), drafts, proposed)


@pytest.mark.invariant("M5")
@pytest.mark.parametrize("place", [0, 1, 4, 6])
def test_a_stop_token_ends_a_request_inside_an_accepted_run(place):
    whole = [plain(RANDOM, text) for text in texts(RANDOM, UNEQUAL[:3], 16)]
    stop = whole[1][place]
    ends = whole[1].index(stop) + 1
    given = texts(RANDOM, UNEQUAL[:3], 16)
    given[1].stop = [7, stop, 150]
    found = all_right(given, whole, 8)
    assert found[1].tokens == whole[1][:ends]
    assert [found[0].tokens, found[2].tokens] == [whole[0], whole[2]]
    state = runner(RANDOM, **ANY).model.state
    assert int(state.end[2]) == int(state.lengths[2]) + 1 == len(given[1].prompt) + ends


@pytest.mark.invariant("M5")
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_a_length_limit_ends_a_request_inside_an_accepted_run(drafts):
    longer = [plain(RANDOM, text) for text in texts(RANDOM, UNEQUAL[:3], 16)]
    given = texts(RANDOM, UNEQUAL[:3], 16)
    for text, limit in zip(given, (1, 6, 11), strict=True):
        text.max_tokens = limit
    found = all_right(given, longer, drafts)
    assert [text.tokens for text in found] == [
        tokens[: text.max_tokens] for tokens, text in zip(longer, given, strict=True)
    ]


@pytest.mark.invariant("M1", control=True)
@pytest.mark.invariant("M5", control=True)
def test_without_a_stop_token_an_accepted_run_goes_on():
    whole = [plain(RANDOM, text) for text in texts(RANDOM, UNEQUAL[:3], 16)]
    found = all_right(texts(RANDOM, UNEQUAL[:3], 16), whole, 8)
    assert [text.tokens for text in found] == whole and max(found[0].accepted) == 8


@pytest.mark.invariant("M5")
def test_a_request_that_is_over_on_the_device_makes_nothing_more():
    """The host, steps behind, still has it in the batch: nothing of it changes, and its neighbour goes on."""
    served = runner(RANDOM, max_requests=2, mtp=4, graph=False)
    first, second = texts(RANDOM, (3, 9), 24)
    first.max_tokens = 5
    stepper = Stepper(served, [first, second])
    stepper.prefill()
    while not first.done:
        stepper.step(4)
    state = served.model.state
    assert state.draft is not None
    kept = [t[1].clone() for t in (state.lengths, state.last_token, state.end, state.ring, state.draft.tokens)]
    first.max_tokens = 10  # as far as the host knows
    for _ in range(3):
        stepper.step(4)
        assert first.accepted[-1] == -1
    now = [t[1] for t in (state.lengths, state.last_token, state.end, state.ring, state.draft.tokens)]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True)) and len(first.tokens) == 5
    assert second.tokens == plain(RANDOM, second)[: len(second.tokens)] and len(second.tokens) > 3


@pytest.mark.invariant("M5")
def test_the_first_token_may_be_the_last():
    given = texts(RANDOM, (3, 9), 8)
    for text in given:
        text.stop = [plain(RANDOM, text)[0]]
    stepper = Stepper(runner(RANDOM, max_requests=2, mtp=4, graph=False), given)
    stepper.prefill()
    assert all(text.done for text in given)
    given[0].stop = given[1].stop = []
    stepper.step(4)
    assert [text.accepted for text in given] == [[-1], [-1]]


# -- what the host reads ---------------------------------------------------------------------------------


def test_ring_and_log_say_what_the_step_returned():
    served = runner(TINY, max_requests=3, mtp=4)
    given = texts(TINY, UNEQUAL[:3], 20)
    stepper = Stepper(served, given)
    stepper.prefill()
    before = [len(text.tokens) for text in given]
    choices, emitted = (one.clone() for one in stepper.step(4))
    for number, text in enumerate(given):
        made = choices[number, : emitted[number]].tolist()
        assert text.tokens[before[number] :] == made and made
        places = [(len(text.prompt) + before[number] + place) % TOKEN_RING for place in range(len(made))]
        assert served.ring[number + 1, places].tolist() == made
    assert served.log[(served.steps - 1) % LOG_STEPS].tolist() == emitted.tolist()
    assert int(served.model.state.step) == served.steps


def test_a_step_that_fails_is_not_counted_on_either_side(monkeypatch):
    served = runner(RANDOM, mtp=2, graph=False, fresh=True)
    stepper = Stepper(served, texts(RANDOM, (3,), 8))
    stepper.prefill()
    before, expand = served.steps, served.model.ops.drop_drafts

    def broken(*_):
        raise MemoryError("no memory")  # behind the commit

    monkeypatch.setitem(served.model.ops.__dict__, "drop_drafts", broken)
    with pytest.raises(MemoryError):
        stepper.step(2)
    assert served.steps == int(served.model.state.step) == before and expand is not broken


# -- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtp", "lengths"), [(9, ()), (-1, ()), (4, (5, 4)), (4, (-1, 4)), (4, (1, 2)), (0, (1,)), (0, (0, 1))]
)
def test_numbers_of_drafts_out_of_range_are_refused(mtp, lengths):
    config, weights = model(RANDOM, "exact")
    with pytest.raises(RequestError, match="out of range"):
        V4Runner(config, weights, halma.backend("cpu"), RunnerOptions(mtp=mtp, mtp_lengths=lengths))


def test_a_model_whose_module_was_not_loaded_is_refused():
    config = small_config()
    loaded = load_source(config, SyntheticSource(config), LoadOptions(drafter=False))
    with pytest.raises(ModelError, match="weights of one module"):
        V4Runner(loaded.config, loaded.weights, halma.backend("cpu"), RunnerOptions(mtp=1))


def test_a_model_without_a_module_is_refused_and_runs_alone():
    config = small_config(num_nextn_predict_layers=0, drafter=None, compress_ratios=(0, 4, 16, 4))
    loaded = load_source(config, SyntheticSource(config), LoadOptions())
    with pytest.raises(ModelError, match="MTP is not available"):
        V4Runner(loaded.config, loaded.weights, halma.backend("cpu"), RunnerOptions(mtp=1))
    V4Runner(loaded.config, loaded.weights, halma.backend("cpu"), RunnerOptions(graph=False))


def test_steps_of_another_shape_than_was_made_are_refused():
    served = runner(TINY, max_requests=3, mtp=4, mtp_lengths=(0, 2, 4), graph=False)
    for ask in (
        lambda: served.verify_descriptor(1, 3, 50, "greedy"),
        lambda: served.decode_descriptor(1, 50, "greedy"),
    ):
        with pytest.raises(RequestError, match="no shape of this runner"):
            ask()
    assert served.verify_descriptor(1, 2, 50, "greedy").query_len == 3


@pytest.mark.invariant("G16")
def test_the_ladder_has_every_number_of_requests_with_every_number_of_drafts():
    options = RunnerOptions(max_requests=4, batches=(1, 2), mtp=4, mtp_lengths=(0, 4), max_context=200)
    made = V4Runner(*model(RANDOM, "exact"), halma.backend("cpu"), options).descriptors()
    shapes = {(one.num_tokens, one.num_requests) for one in made if one.role == "verify"}
    assert shapes == {(1, 1), (2, 2), (4, 4), (5, 1), (10, 2), (20, 4)}
    assert {one.role for one in made} == {"verify", "prefill"} and options.most_rows == 64
