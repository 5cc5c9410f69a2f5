"""The model on the GPU: golden cases with graphs on and off, the same text either way, the same bytes in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halma.hal.backend import Backend
from halma.hal.graph.breakable import Outcome
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.golden import verify
from halma.models.deepseek_v4.golden_models import loader_for
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.runner import RunnerOptions

CASES = ("all_layers", "hash_only", "tiny_v4_exact", "tiny_v4_quant")


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_golden_case_holds(backend: Backend, cases: Path, name: str, graph: bool) -> None:
    path = cases / f"{name}.safetensors"
    report = verify(path, loader_for(path, "tiny-v4", backend), backend, graph=graph)
    assert report.checks and [check for check in report.checks if not check.passed] == []


def generated(backend: Backend, arithmetic: str, *, graph: bool, requests: int = 3) -> list[list[int]]:
    options = RunnerOptions(
        max_requests=requests, max_context=96, graph=graph, batches=(1, 2), capture_prefill=True, arithmetic=arithmetic
    )
    runner = load_v4("tiny-v4", backend, options).runner
    try:
        prompts = [(0, 17, 42, 99)[: 2 + n % 3] for n in range(requests)]
        sampled = [Request(p, 24, temperature=0.8 * (n % 2), seed=n) for n, p in enumerate(prompts)]
        engine = Engine(runner)
        runner.prepare(runner.descriptors(("greedy", "sample")))
        found = [generation.tokens for generation in engine.run(sampled)]
        assert (engine.counters.replayed > 0) == graph and (not graph or engine.counters.eager == 0)
        if graph:
            report = runner.session.report()
            assert report.pool_growth == 0 and {row.outcome for row in report.rows} == {Outcome.CAPTURED}
        return found
    finally:
        runner.close()


@pytest.mark.invariant("G4")
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
def test_a_graph_gives_the_tokens_of_the_eager_run(backend: Backend, arithmetic: str) -> None:
    with_graphs = generated(backend, arithmetic, graph=True)
    assert with_graphs == generated(backend, arithmetic, graph=False)
    assert all(len(tokens) == 24 for tokens in with_graphs)


def ladder_bytes(backend: Backend, order: str) -> tuple[int, dict[str, Any]]:
    options = RunnerOptions(max_requests=4, max_context=512, batches=(1, 2, 4), capture_prefill=True)
    runner = load_v4("tiny-v4", backend, options).runner
    try:
        runner.prepare(order=order)
        report = runner.session.report()
        assert report.captured == len(report.rows) and report.pool_growth == 0
        return report.total_bytes, dict(report.allocating)
    finally:
        runner.close()


@pytest.mark.invariant("G17")
def test_no_order_of_capture_changes_the_models_memory(backend: Backend) -> None:
    sizes = {order: ladder_bytes(backend, order) for order in ("descending", "ascending", "shuffled(7)")}
    assert len({size for size, _ in sizes.values()}) == 1, sizes
    assert all(made == {} for _, made in sizes.values()), "every result of a reference route has its place"
