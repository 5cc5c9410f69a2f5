"""The tiny checkpoint's ladder in three orders: same results, same memory, and no tensor but the workspace's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import halma
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import PersistentInput
from halma.models.deepseek_v4.load import Loaded, load_v4
from halma.models.deepseek_v4.profiling import profile, unshared
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner

OPTIONS = RunnerOptions(max_requests=3, batches=(1,), max_context=200, chunk=16, capture_prefill=True)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_v4("tiny-v4", halma.backend("cpu"), OPTIONS)


def captured(loaded: Loaded, order: str) -> V4Runner:
    first = loaded.runner
    runner = V4Runner(first.config, first.model.weights, first.backend, OPTIONS)
    runner.prepare(order=order)
    return runner


def results(runner: V4Runner) -> dict[Descriptor, list[torch.Tensor]]:
    """Tokens and logits of every descriptor, all started from the same state."""
    found: dict[Descriptor, list[torch.Tensor]] = {}
    state, width = runner.model.state, runner.plan.pages_per_slot
    slots = runner.options.max_requests
    for descriptor in runner.descriptors():
        state.lengths.zero_()
        state.last_token.fill_(7)
        state.page_table[1 : slots + 1].copy_(torch.arange(1, slots * width + 1).view(slots, width))
        rows = descriptor.num_requests
        runner.inputs.fill(
            range(1, rows + 1), [descriptor.query_len] * rows, tokens=torch.arange(descriptor.num_tokens) + 11
        )
        replays = runner.session.replays
        found[descriptor] = [one.clone() for one in runner.step(descriptor)]
        assert runner.session.replays == replays + 1
    return found


def owned(runner: V4Runner) -> set[int]:
    """Addresses of every storage that the model, its state and its inputs own."""
    found: set[int] = set()
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                walk(inner)
        elif type(value).__module__.startswith("halma.models") or type(value).__module__.startswith("halma.ops"):
            walk(vars(value) if hasattr(value, "__dict__") else [getattr(value, n) for n in value.__slots__])

    model = runner.model
    walk(
        [
            model.weights,
            model.state,
            model.inv_freq,
            [one.tensor for one in vars(runner.inputs).values() if isinstance(one, PersistentInput)],
        ]
    )
    return found


@pytest.mark.invariant("G17")
@pytest.mark.parametrize("order", ["ascending", "shuffled(7)"])
def test_no_order_changes_results_or_memory(loaded: Loaded, order: str) -> None:
    reference, other = captured(loaded, "descending"), captured(loaded, order)
    a, b = reference.session.report(), other.session.report()
    assert a.captured == b.captured == len(reference.descriptors()) and b.order == order
    assert abs(a.total_bytes - b.total_bytes) <= 0.01 * a.total_bytes
    expected, found = results(reference), results(other)
    for descriptor, tensors in expected.items():
        assert all(torch.equal(x, y) for x, y in zip(tensors, found[descriptor], strict=True)), descriptor
        assert bool(torch.isfinite(tensors[1]).all())
    reference.close()
    other.close()


@pytest.mark.invariant("G17", control=True)
def test_a_graph_holds_no_tensor_of_its_own(loaded: Loaded) -> None:
    runner = captured(loaded, "shuffled(3)")
    known, workspace = owned(runner), runner.workspace.report().total
    for descriptor in runner.descriptors():
        graph = runner.session.find(descriptor)
        assert graph is not None and graph.counts().allocations == 0 and graph.counts().fallback_bytes == 0
        for segment in graph.segments:
            held = graph.backend.graphs.held(segment.template)  # type: ignore[attr-defined]
            assert held.workspace == workspace and set(held.external_addresses) <= known
    runner.close()


def test_what_one_workspace_saves_is_measured(loaded: Loaded, record_property: Callable[[str, object], None]) -> None:
    descriptors = loaded.runner.descriptors()
    shared = profile(loaded.runner, descriptors)
    apart = unshared(loaded.runner, descriptors)
    total = sum(one.total_bytes for one in apart)
    record_property("shared_bytes", shared.total_bytes)
    record_property("unshared_bytes", total)
    assert all(one.captured == 1 and one.total_bytes <= shared.total_bytes for one in apart)
    assert total > 1.5 * shared.total_bytes > 0
    assert not loaded.runner.workspace.sealed  # profiling prepared nothing
