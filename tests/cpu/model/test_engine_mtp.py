"""The engine with MTP: whatever is drafted, each request gets the tokens that it gets alone and without drafts."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings

from halma.hal.errors import RequestError
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.engine_drafts import StepCosts
from halma.models.deepseek_v4.runner import V4Runner
from tests.cpu.model.drafting import Rigged, always, drafting_runner, often
from tests.cpu.model.small import alone, small_runner
from tests.cpu.model.test_engine import traffic

LONG = tuple((37 * place + 11) % 199 for place in range(246))
"""Ten tokens short of the smallest captured context and of a page."""
COSTS = StepCosts({(size, k): (10 + k) * 1e-3 for size in (1, 3) for k in (1, 4)})


@functools.cache
def shared_runner() -> V4Runner:
    return drafting_runner(mtp_lengths=(1, 4))


@functools.cache
def runner_of_every_length() -> V4Runner:
    """With graphs, for the night."""
    return drafting_runner(graph=True, mtp=8, mtp_lengths=tuple(range(1, 9)))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> V4Runner:
    """One runner for all tests; what a test puts over its step goes with the test."""
    runner = shared_runner()
    monkeypatch.setattr(runner, "step", runner.step)
    return runner


def text(tokens: list[int] | tuple[int, ...]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


# -- the same tokens ------------------------------------------------------------------------------------


@pytest.mark.invariant("M1")
@pytest.mark.invariant("M7")
@pytest.mark.parametrize(("ahead", "drafts"), [(1, 4), (4, 4), (3, "auto")])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(arrivals=traffic())
def test_requests_that_come_and_go_get_the_tokens_that_they_get_alone_without_drafts(ahead, drafts, arrivals):
    check_traffic(shared_runner(), ahead, drafts, arrivals)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("ahead", "drafts"), [*((1 + k % 4, k) for k in range(1, 9)), (2, "auto")])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=traffic())
def test_requests_that_come_and_go_get_the_tokens_that_they_get_alone_at_length(ahead, drafts, arrivals):
    runner = shared_runner() if drafts == "auto" else runner_of_every_length()
    check_traffic(runner, ahead, drafts, arrivals)


def check_traffic(runner: V4Runner, ahead: int, drafts: int | str, arrivals: list[tuple[Request, int]]) -> None:
    plain = runner.step
    try:
        rigged = Rigged(runner, often, ahead=ahead, drafts=drafts, costs=COSTS)
        pending, found, step = sorted(enumerate(arrivals), key=lambda item: item[1][1]), {}, 0
        while pending or rigged.engine.busy:
            while pending and pending[0][1][1] <= step:
                number, (request, _) = pending.pop(0)
                found[number] = rigged.submit(request)
            rigged.engine.step()
            step += 1
    finally:
        runner.step = plain  # type: ignore[method-assign]
    expected = [alone("exact", request) for request, _ in arrivals]
    assert [found[number].tokens for number in range(len(arrivals))] == expected


@pytest.mark.invariant("M1", control=True)
def test_right_drafts_are_taken_and_wrong_ones_are_not(runner):
    requests = [Request((5, 9, 2), 30), Request((7,), 30)]
    rigged = Rigged(runner, lambda id, position: id == 0, drafts=4)
    first, second = rigged.run(requests)
    assert (first.accepted, second.accepted) == ([4, 4, 4, 4, 4, 3], [0] * 29)
    assert first.tokens == alone("exact", requests[0]) and second.tokens == alone("exact", requests[1])


@pytest.mark.invariant("M7")
def test_a_prompt_between_a_verify_and_its_reading_changes_no_others_tokens(runner):
    """Joins at every one of the steps of a run, each time before what was verified last is read."""
    first, joins = Request((5, 9, 2), 14), Request(tuple(range(20)), 4)
    for at in range(4):
        rigged = Rigged(runner, often, ahead=2, drafts=4)
        kept = rigged.submit(first)
        for _ in range(at + 1):
            rigged.engine.step()
        unread = len(rigged.engine._flight.steps)
        other = rigged.submit(joins)
        while rigged.engine.busy:
            rigged.engine.step()
        assert unread > 0 and kept.tokens == alone("exact", first) and other.tokens == alone("exact", joins)
        runner.step = rigged._step  # type: ignore[method-assign]


@pytest.mark.invariant("M7")
def test_a_prompt_of_several_chunks_gives_no_token_before_its_end(runner):
    """Each piece is followed by the prompt's own token, and the module is told so."""
    request = Request(tuple(range(45)), 6)
    (generation,) = Rigged(runner, always, drafts=4).run([request])
    assert generation.tokens == alone("exact", request)
    seen: list[tuple[list[int], int]] = []
    step = runner.step

    def watched(descriptor):
        step(descriptor)
        seen.append((runner.inputs.after.tensor[:1].tolist(), int(runner.log[(runner.steps - 1) % 64, 0])))

    runner.step = watched  # type: ignore[method-assign]
    Engine(runner, drafts=4).run([Request(tuple(range(45)), 1)])
    assert seen == [([16], 0), ([32], 0), ([-1], 1)]


@pytest.mark.invariant("M7", control=True)
def test_a_prompt_of_one_chunk_gives_one(runner):
    request = Request(tuple(range(16)), 6)
    (generation,) = Rigged(runner, always, drafts=4).run([request])
    assert generation.tokens == alone("exact", request) and generation.accepted == [4]


@pytest.mark.invariant("M1")
def test_a_step_has_room_for_what_the_host_does_not_know_yet():
    """25 tokens are in flight when the first context is outgrown: scores and gathers are as wide as the context."""
    request, runner = Request(LONG, max_tokens=36), drafting_runner(max_requests=1, max_context=512)
    rigged, room = Rigged(runner, always, ahead=4, drafts=4), list[tuple[int, int]]()
    step = runner.step

    def watched(descriptor):
        step(descriptor)
        room.append((descriptor.context_capacity, int(runner.model.state.lengths[1])))

    runner.step = watched  # type: ignore[method-assign]
    generation = rigged.engine.submit(request)
    expected = alone("exact", request, max_context=512)
    rigged.texts[0] = (*LONG, *expected)
    rigged.engine.run()
    assert generation.tokens == expected and generation.accepted == [4] * 7
    assert all(fed <= capacity for capacity, fed in room) and {capacity for capacity, _ in room} == {256, 512}


@pytest.mark.invariant("M7")
def test_a_prompt_of_more_chunks_than_the_log_has_steps_loses_nobody_a_token():
    """70 steps between a verify and the next one: what was in flight must be read before its place is written anew."""
    first, joins = Request((5, 9, 2), 12), Request(LONG[:140], 4)
    rigged = Rigged(drafting_runner(chunk=2), often, ahead=4, drafts=4)
    kept = rigged.submit(first)
    rigged.engine.step()
    other = rigged.submit(joins)
    while rigged.engine.busy:
        rigged.engine.step()
    assert rigged.engine.counters.prefill_steps == 72
    assert kept.tokens == alone("exact", first) and other.tokens == alone("exact", joins)


# -- where a request ends -------------------------------------------------------------------------------


@pytest.mark.invariant("M5")
@pytest.mark.parametrize("way", ["device", "host", "text"])
def test_a_stop_inside_an_accepted_run_ends_the_request_there(runner, way):
    """By one of the tokens that the device knows, by one more than it knows, by text: none behind it is reported."""
    prompt, other = (5, 9, 2), Request((7,), 25)
    whole = alone("exact", Request(prompt, 20))
    stop = whole[7]  # the third of the second run of five
    place = whole.index(stop)
    assert place % 5 not in (0, 4), "inside a run"
    decoys = frozenset(token for token in range(199) if token < stop and token not in whole)
    request = {
        "device": Request(prompt, 20, stop=frozenset({stop})),
        "host": Request(prompt, 20, stop=frozenset({stop, *sorted(decoys)[:8]})),
        "text": Request(prompt, 20, stop_text=("nowhere", text(whole[place - 1 : place + 1]))),
    }[way]
    assert way != "host" or len(request.stop) == 9
    rigged = Rigged(runner, always, ahead=2, drafts=4, decoder=text)
    generation, beside = rigged.run([request, other])
    assert generation.tokens == whole[: place + 1] and generation.finish == "stop"
    assert beside.tokens == alone("exact", other) and beside.finish == "length"


@pytest.mark.invariant("M5", control=True)
def test_without_a_stop_runs_go_on_to_the_length(runner):
    whole = alone("exact", Request((5, 9, 2), 20))
    unused = next(token for token in range(199) if token not in whole)
    request = Request((5, 9, 2), 20, stop=frozenset({unused}), stop_text=("nowhere",))
    (generation,) = Rigged(runner, always, drafts=4, decoder=text).run([request])
    assert generation.tokens == whole and generation.finish == "length"


@pytest.mark.invariant("M5")
@pytest.mark.parametrize("ahead", [1, 4])
def test_requests_end_at_their_own_step_whatever_was_accepted(runner, ahead):
    """The last step of each has fewer tokens left than drafts; the device feeds none behind the end."""
    lengths, fed = [1, 2, 6, 13], list[int]()
    requests = [Request((3, 1, number), length) for number, length in enumerate(lengths)]
    rigged = Rigged(runner, always, ahead=ahead, drafts=4)
    generations = [rigged.submit(request) for request in requests]
    while rigged.engine.busy:
        rigged.engine.step()
        state = runner.model.state
        fed += [int(state.end[one.slot] - state.lengths[one.slot]) for one in rigged.engine.running]
    assert [len(one.tokens) for one in generations] == lengths
    assert [one.tokens for one in generations] == [alone("exact", request) for request in requests]
    assert min(fed) == 1, "a request holds its newest token unfed, and nothing behind it"


def test_a_cancelled_request_leaves_the_others_alone(runner):
    kept, gone = Request((5, 9, 2), 24), Request((7,), 24)
    rigged = Rigged(runner, often, ahead=3, drafts=4)
    first, second = rigged.submit(kept), rigged.submit(gone)
    for _ in range(4):
        rigged.engine.step()
    seen = list(second.tokens)
    rigged.engine.cancel(second)
    while rigged.engine.busy:
        rigged.engine.step()
    assert first.tokens == alone("exact", kept) and second.tokens == seen and second.finish == "cancelled"
    assert rigged.engine._places.free == (3, runner.plan.pages)


@pytest.mark.invariant("M9")
def test_a_full_page_pool_in_the_middle_of_a_verify_queues_with_its_reason_and_harms_nobody():
    runner = drafting_runner(max_requests=2, max_context=512, pages=2)
    first, second = Request(LONG, max_tokens=24), Request((3, 4), max_tokens=6)
    rigged = Rigged(runner, always, ahead=2, drafts=4)
    rigged.texts[0] = (*first.prompt, *alone("exact", first, max_context=512))
    rigged.texts[1] = (*second.prompt, *alone("exact", second, max_context=512))
    running = rigged.engine.submit(first)
    for _ in range(3):
        rigged.engine.step()
    waiting = rigged.engine.submit(second)
    rigged.engine.step()
    assert rigged.engine.why_waiting() == "1 pages needed, 0 free" and not waiting.tokens
    while rigged.engine.busy:
        rigged.engine.step()
    assert running.tokens == list(rigged.texts[0][len(LONG) :]) and waiting.tokens == list(rigged.texts[1][2:])
    assert rigged.engine._places.free == (2, 2)


@pytest.mark.invariant("M9", control=True)
def test_with_pages_enough_both_verify_at_once(runner):
    rigged = Rigged(runner, always, drafts=4)
    generations = rigged.run([Request((1, 2), 8), Request((3, 4), 8)])  # and a step that finds both at their end
    assert rigged.engine.counters.verify_steps == 3 and all(one.accepted == [4, 1] for one in generations)


# -- what is counted ------------------------------------------------------------------------------------


def test_acceptance_is_counted_where_drafts_could_have_been_accepted(runner):
    """Two of four drafts right in each step; a request of 9 tokens has 2 left for its last step."""
    rigged = Rigged(runner, lambda id, position: (position - 3) % 3 != 0, drafts=4)
    (generation,) = rigged.run([Request((5, 9, 2), 9)])
    assert generation.accepted == [2, 2, 1]
    found = rigged.engine.drafting()
    assert found is not None and found["asked"] == 4 and found["lengths"] == [1, 4]
    assert (found["judged"], found["accepted"]) == ([3, 2, 2, 2], [3, 2, 0, 0])
    assert found["acceptance"] == [1.0, 1.0, 0.0, 0.0]
    assert found["mean_accepted_length"] == 3.0 and found["tokens_per_step"] == pytest.approx(8 / 3)


def test_a_longer_step_judges_the_drafts_that_were_made_for_it(runner):
    """auto goes from 1 draft to 4: the first step of 4 has one draft to judge."""
    dear_then_cheap = StepCosts({(1, 1): 1.0, (1, 4): 9.0, (3, 1): 9.0, (3, 4): 1.0})
    rigged = Rigged(runner, always, drafts="auto", costs=dear_then_cheap)
    first = rigged.submit(Request((5, 9, 2), 25))
    rigged.engine.step()
    rigged.submit(Request((7,), 5))
    while rigged.engine.busy:
        rigged.engine.step()
    assert first.accepted[:3] == [1, 1, 4] and first.tokens == alone("exact", first.request)
    assert [(c["requests"], c["drafts"]) for c in rigged.engine.drafting()["choices"]][:2] == [(1, 1), (3, 4)]


def test_without_mtp_there_is_nothing_to_report():
    engine = Engine(small_runner("exact"))
    engine.run([Request((5, 9, 2), 3)])
    assert engine.drafting() is None and engine.counters.verify_steps == 0


@pytest.mark.parametrize(("ahead", "drafts", "words"), [(0, 4, "ahead=0"), (5, 4, "ahead=5"), (1, 3, "drafts=3")])
def test_what_an_engine_cannot_do_is_refused(runner, ahead, drafts, words):
    with pytest.raises(RequestError, match=words):
        Engine(runner, ahead=ahead, drafts=drafts)


@pytest.mark.parametrize("decoder", [None, text])
def test_a_stop_text_that_nobody_can_look_for_is_refused(runner, decoder):
    wanted = ("",) if decoder else ("end",)
    with pytest.raises(RequestError, match="stop text"):
        Engine(runner, decoder=decoder).submit(Request((1,), 4, stop_text=wanted))
