"""The engine with MTP on the GPU: the tokens of a run without, and a host that waits for nothing but its limit."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from halma.hal.backend import Backend
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner

STEPS = 12


def requests(number: int, tokens: int) -> list[Request]:
    prompts = [tuple((7 * n + 13 * place) % 1024 for place in range(3 + 5 * n % 40)) for n in range(number)]
    return [Request(p, tokens, temperature=0.8 * (n % 2), top_p=0.9, seed=n) for n, p in enumerate(prompts)]


def made(backend: Backend, *, batch: int = 4, graph: bool = True, **options: object) -> V4Runner:
    given = RunnerOptions(
        max_requests=batch, max_context=256, batches=(1, batch), graph=graph, arithmetic="exact", **options
    )
    runner = load_v4("tiny-v4", backend, given).runner
    runner.prepare(runner.descriptors(("greedy", "sample")))
    return runner


@pytest.mark.invariant("M1")
@pytest.mark.parametrize(
    ("drafts", "ahead", "graph"), [(1, 1, True), (4, 4, True), (4, 1, False), (8, 2, True), ("auto", 4, True)]
)
def test_drafts_change_no_token(backend: Backend, drafts: int | str, ahead: int, graph: bool) -> None:
    """Six requests in four slots: some join while the others are in the middle of verifying."""
    plain = made(backend)
    expected = [one.tokens for one in Engine(plain).run(requests(6, 40))]
    plain.close()
    lengths = (1, 2, 4, 8) if drafts == "auto" else (int(drafts),)
    runner = made(backend, graph=graph, mtp=lengths[-1], mtp_lengths=lengths)
    try:
        engine = Engine(runner, ahead=ahead, drafts=drafts)
        assert [one.tokens for one in engine.run(requests(6, 40))] == expected
        report = engine.drafting()
        assert report is not None and report["tokens_per_step"] > 1.2 and (drafts != "auto" or report["choices"])
        assert (engine.counters.replayed >= engine.counters.verify_steps) == graph
    finally:
        runner.close()


def waits(trace: profile) -> Counter[str]:
    """Calls of the driver that wait for the device, inside the span ``steady``; the trace's own come behind it."""
    events = trace.events()
    span = next(event.time_range for event in events if event.name == "steady")
    inside = (e.name for e in events if span.start <= e.time_range.start <= span.end)
    return Counter(name for name in inside if name.startswith("cu") and "synchronize" in name.lower())


def traced(backend: Backend, *, look: bool) -> tuple[Counter[str], int, int]:
    """Steady steps of four requests, the host four steps ahead. ``look``: read a length after each, which waits."""
    runner = made(backend, mtp=4)
    engine = Engine(runner, ahead=4, drafts=4)
    for request in requests(4, 150):
        engine.submit(request)
    for _ in range(8):
        engine.step()
    pressure, host = engine.counters.back_pressure, engine.host_waits
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("steady"):
            for _ in range(STEPS):
                engine.step()
                if look:
                    int(runner.model.state.lengths[1])
    found = (waits(trace), engine.counters.back_pressure - pressure, engine.host_waits - host)
    for one in engine.running:
        engine.cancel(one)
    engine.run()
    runner.close()
    return found


@pytest.mark.invariant("M8")
def test_in_steady_state_the_host_waits_at_its_limit_alone(backend: Backend) -> None:
    seen, pressure, host = traced(backend, look=False)
    assert host == 0
    assert sum(seen.values()) == pressure <= STEPS and all("EventSynchronize" in name for name in seen), seen


@pytest.mark.invariant("M8", control=True)
def test_the_trace_sees_a_host_that_looks(backend: Backend) -> None:
    seen, _, _ = traced(backend, look=True)
    assert seen["cudaStreamSynchronize"] >= STEPS, seen
