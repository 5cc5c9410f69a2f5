"""The engine: whoever shares a batch, each request gets the tokens it gets alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halma.hal.errors import RequestError
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.profiling import profile
from halma.models.deepseek_v4.runner import RunnerOptions
from tests.cpu.model.small import alone, small_runner

LENGTHS = st.integers(1, 60)


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[Request, int]]:
    """Requests of unequal length with the step at which each arrives."""
    arrivals: list[tuple[Request, int]] = []
    for number in range(draw(st.integers(2, 4))):
        length, seed = draw(LENGTHS), draw(st.integers(0, 2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, 199, (length,), generator=generator).tolist()
        request = Request(
            tuple(prompt),
            max_tokens=draw(st.integers(1, 16)),
            temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            seed=seed,
        )
        arrivals.append((request, draw(st.integers(0, 12)) * (number > 0)))
    return arrivals


def serve(engine: Engine, arrivals: list[tuple[Request, int]]) -> list[list[int]]:
    pending = sorted(enumerate(arrivals), key=lambda item: item[1][1])
    generations: dict[int, object] = {}
    step = 0
    while pending or engine.busy:
        while pending and pending[0][1][1] <= step:
            number, (request, _) = pending.pop(0)
            generations[number] = engine.submit(request)
        engine.step()
        step += 1
    return [generations[number].tokens for number in range(len(arrivals))]  # type: ignore[attr-defined]


@pytest.mark.invariant("M7")
@pytest.mark.invariant("K7")
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(arrivals=traffic())
def test_neighbours_do_not_change_a_requests_tokens(arithmetic, arrivals):
    check_neighbours(arithmetic, arrivals)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=traffic())
def test_neighbours_do_not_change_a_requests_tokens_at_length(arithmetic, arrivals):
    check_neighbours(arithmetic, arrivals)


def check_neighbours(arithmetic: str, arrivals: list[tuple[Request, int]]) -> None:
    runner = small_runner(arithmetic, max_requests=3)
    found = serve(Engine(runner), arrivals)
    assert found == [alone(arithmetic, request) for request, _ in arrivals]


@pytest.mark.invariant("M7", control=True)
def test_a_request_alone_is_reproducible():
    request = Request((5, 9, 2), max_tokens=12)
    assert alone("exact", request) == alone("exact", request) and len(alone("exact", request)) == 12


@pytest.mark.invariant("M10")
def test_a_seed_gives_the_same_text_at_any_batch_size():
    request = Request((5, 9, 2), max_tokens=16, temperature=1.0, top_p=0.95, seed=7)
    crowd = [request, *(Request((3, n), 20, temperature=1.0, seed=n) for n in range(2))]
    found = Engine(small_runner("exact", max_requests=3)).run(crowd)
    assert found[0].tokens == alone("exact", request)
    assert found[0].tokens != alone("exact", Request((5, 9, 2), 16, temperature=1.0, top_p=0.95, seed=8))


@pytest.mark.invariant("M5")
def test_a_stop_token_ends_the_request_there():
    whole = alone("exact", Request((5, 9, 2), max_tokens=20))
    stop = whole[6]
    generation = Engine(small_runner("exact")).run([Request((5, 9, 2), 20, stop=frozenset({stop}))])[0]
    assert generation.tokens == whole[: whole.index(stop) + 1] and generation.finish == "stop"


@pytest.mark.invariant("M5", control=True)
def test_without_a_stop_token_the_request_runs_to_its_length():
    generation = Engine(small_runner("exact")).run([Request((5, 9, 2), 20)])[0]
    assert generation.tokens == alone("exact", Request((5, 9, 2), max_tokens=20)) and generation.finish == "length"


@pytest.mark.invariant("M9")
def test_a_request_without_pages_waits_with_its_reason_and_the_running_one_is_unharmed():
    first, second = Request((1, 2), max_tokens=300), Request((3, 4), max_tokens=5)
    runner = small_runner("exact", max_requests=2, max_context=512, pages=2)
    engine = Engine(runner)
    running, waiting = engine.submit(first), engine.submit(second)
    engine.step()
    assert engine.why_waiting() == "1 pages needed, 0 free" and not waiting.tokens
    while engine.busy:
        engine.step()
    assert running.tokens == alone("exact", first, max_context=512)
    assert waiting.tokens == alone("exact", second, max_context=512)


@pytest.mark.invariant("M9", control=True)
def test_with_pages_enough_both_run_at_once():
    engine = Engine(small_runner("exact", max_requests=2, max_context=512))
    engine.submit(Request((1, 2), max_tokens=300))
    engine.submit(Request((3, 4), max_tokens=5))
    engine.step()
    assert engine.why_waiting() == "" and len(engine.running) == 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request((), 4), "empty"),
        (Request((1,), 0), "nothing to generate"),
        (Request((10_000,), 4), "does not know"),
        (Request((-1,), 4), "does not know"),
        (Request(tuple(range(100)), 200), "longer than the context"),
        (Request((1,), 4, temperature=-1.0), "out of range"),
        (Request((1,), 4, temperature=float("nan")), "out of range"),
        (Request((1,), 4, top_p=0.0), "out of range"),
    ],
)
def test_a_request_that_could_never_run_is_refused_at_once(request_, words):
    engine = Engine(small_runner("exact"))
    with pytest.raises(RequestError, match=words):
        engine.submit(request_)
    assert not engine.busy


def test_more_pages_than_there_are_is_refused_at_once():
    engine = Engine(small_runner("exact", max_requests=2, max_context=512, pages=1))
    with pytest.raises(RequestError, match="more pages"):
        engine.submit(Request((1,), 400))


# In exact arithmetic the golden cases, replayed and eager, say nearly as much.
@pytest.mark.parametrize("arithmetic", [pytest.param("exact", marks=pytest.mark.nightly), "shipping"])
def test_replay_is_bit_identical_to_eager_over_a_whole_generation(arithmetic):
    """Checked mode: every freed block and every padding row is poison."""
    logits: dict[bool, list[torch.Tensor]] = {}
    tokens: dict[bool, list[list[int]]] = {}
    for graph in (True, False):
        runner = small_runner(arithmetic, max_requests=3, graph=graph, capture_prefill=True, checked=True, fresh=True)
        seen = logits[graph] = []
        plain = runner.step

        def step(descriptor, plain=plain, seen=seen, runner=runner):
            chosen, found = plain(descriptor)
            real = int((runner.inputs.count.prefix(descriptor.num_requests) > 0).sum())
            seen.append(found[:real].clone())
            return chosen, found

        runner.step = step
        engine = Engine(runner)
        requests = [Request((5, 9, 2), 30), Request(tuple(range(70)), 20), Request((7,), 9)]
        tokens[graph] = [generation.tokens for generation in engine.run(requests)]
        assert (engine.counters.eager == 0) == graph and engine.counters.decode_steps > 20
        runner.close()
    assert tokens[True] == tokens[False]
    assert len(logits[True]) == len(logits[False])
    for replayed, eager in zip(logits[True], logits[False], strict=True):
        assert torch.equal(replayed, eager) and replayed.isfinite().all()


def test_a_callback_that_raises_costs_no_request_a_token():
    requests, calls = [Request((1, 2, 3), 6), Request((4, 5), 6)], list[tuple[int, int]]()

    def tell(generation, token):
        calls.append((generation.id, token))
        if len(calls) == 3:
            raise BrokenPipeError("nobody listens")

    engine = Engine(small_runner("exact", max_requests=2), on_token=tell)
    generations = [engine.submit(request) for request in requests]
    with pytest.raises(BrokenPipeError):
        engine.run()
    for _ in range(20):
        engine.step()
    assert not engine.busy
    for generation, request in zip(generations, requests, strict=True):
        assert generation.tokens == alone("exact", request)
        assert [token for who, token in calls if who == generation.id] == generation.tokens


def test_a_request_whose_prefill_fails_gives_everything_back(monkeypatch):
    runner = small_runner("exact", max_requests=2)
    first, second = Request((1, 2, 3), 6), Request(tuple(range(40)), 6)
    engine, real = Engine(runner), runner.step
    kept = engine.submit(first)
    engine.step()
    free = engine._places.free

    def broken(descriptor):
        if descriptor.role == "prefill":
            raise MemoryError("no memory")
        return real(descriptor)

    monkeypatch.setattr(runner, "step", broken)
    lost = engine.submit(second)
    with pytest.raises(MemoryError):
        engine.step()
    assert lost.finish == "failed" and lost.tokens == []
    assert engine._places.free == free
    monkeypatch.undo()
    again = engine.submit(second)
    engine.run()
    assert kept.tokens == alone("exact", first) and again.tokens == alone("exact", second) and lost.tokens == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"counts": [1]}, "counts has 1"),
        ({"seed": [7]}, "seed has 1"),
        ({"temperature": [0.5] * 3}, "temperature has 3"),
        ({"tokens": [1, 2, 3]}, "tokens has 3"),
    ],
)
def test_rows_of_unequal_number_are_refused_before_any_is_taken(rows, words):
    inputs = small_runner("exact", max_requests=2).inputs
    inputs.fill([1, 2], [1, 1])
    before = inputs.slot.counters.host_refreshes
    with pytest.raises(RequestError, match=words):
        inputs.fill([1, 2], **{"counts": [1, 1], **rows})
    assert inputs.slot.counters.host_refreshes == before


@pytest.mark.invariant("G13")
def test_profiling_between_steps_sees_valid_work_and_changes_no_tokens(monkeypatch):
    runner, request = small_runner("exact", max_requests=2), Request((1, 2, 3), 8)
    engine, seen = Engine(runner), list[tuple[list[int], list[int]]]()
    generation = engine.submit(request)
    engine.step()
    engine.step()
    dry_run = runner.backend.graphs.dry_run

    def watched(program, workspace):
        seen.append((runner.inputs.slot.tensor.tolist(), runner.inputs.count.tensor.tolist()))
        dry_run(program, workspace)

    monkeypatch.setattr(runner.backend.graphs, "dry_run", watched)
    profile(runner, runner.descriptors()[:1])
    assert seen and all(rows == ([0, 0], [1, 1]) for rows in seen), "a warm-up feeds the null slot, not a request"
    engine.run()
    assert generation.tokens == alone("exact", request)


def test_options_that_exceed_the_model_are_refused():
    with pytest.raises(RequestError, match="longer than the model allows"):
        small_runner("exact", max_context=100_000)
    assert RunnerOptions().max_context == 1024


@pytest.mark.invariant("G27")
def test_the_host_decides_on_results_of_the_step_before_and_never_on_newer_ones():
    engine = Engine(small_runner("exact", max_requests=3))
    first = engine.submit(Request((5, 9, 2), 12))
    seen: list[int] = []
    while engine.busy:
        engine.step()
        if len(seen) == 3:
            engine.submit(Request(tuple(range(20)), 5))  # joins while the first is under way
        behind = {one.issued - len(one.tokens) for one in engine.running if not one.done}
        assert behind <= {1}, "one step behind for every request, whenever it came"
        seen.append(first.issued - len(first.tokens))
    assert seen[:11] == [1] * 11 and len(first.tokens) == 12


@pytest.mark.invariant("G27", control=True)
def test_at_the_end_the_host_has_seen_everything():
    engine = Engine(small_runner("exact", max_requests=3))
    found = [engine.submit(Request((5, 9, 2), n)) for n in (1, 7)]
    while engine.busy:
        engine.step()
    assert [(one.issued, len(one.tokens)) for one in found] == [(1, 1), (7, 7)]
