"""What steps cost, measured before requests are served: real rows in real slots, on the graphs to be replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from halma.hal.errors import HalmaError
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.engine_drafts import StepCosts
from halma.models.deepseek_v4.profiling import scratch
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.steps import verify

ROUNDS, STEPS = 3, 4
"""A cost is the median over rounds of so many steps each; the round before them is for warming up."""


@dataclass(frozen=True)
class Arm:
    """A step to measure: ``run`` runs one of ``descriptor`` for so many requests."""

    requests: int
    descriptor: Descriptor
    run: Callable[[], object]


def measured_costs(runner: V4Runner) -> StepCosts:
    """Seconds of a verify step for every captured draft length and number of requests, in the smallest context.

    No request may be in flight. Of several ranks all come, and all get what rank 0 measured: their clocks differ, and
    choices that follow from them would too (G27).
    """
    options = runner.options
    sizes = sorted({*(size for size in options.batches if size < options.max_requests), options.max_requests})
    keys = [(requests, drafts) for requests in sizes for drafts in options.draft_lengths]
    with slots_in_use(runner, options.max_requests):
        seconds = step_seconds(runner, [_whole(runner, *key) for key in keys])
    return StepCosts(runner.model.ranks.from_first("step costs", dict(zip(keys, seconds, strict=True))))


def time_share(runner: V4Runner, requests: int, drafts: int) -> dict[str, Any]:
    """How the time of a verify step divides into the target's part and the drafting: for reports.

    A step is one graph, which nobody can look into. So the target's part is captured alone, over the same rows, and
    what the whole step takes longer is the drafting. No request may be in flight; of several ranks all come.

    Returns ``verify`` and ``draft`` (parts of 1), ``verify_ms``, ``step_ms`` and ``reason``: where the measurement was
    refused the numbers are None and the reason says why, else it is how they were found.
    """
    whole = _whole(runner, requests, drafts)
    try:
        with slots_in_use(runner, requests):
            seconds, target = _with_target(runner, whole)
    except HalmaError as error:
        nothing: dict[str, Any] = dict.fromkeys(("verify", "draft", "verify_ms", "step_ms"))
        return {**nothing, "reason": f"not measured: {error.what}"}
    share = min(target / seconds, 1.0)
    found = {
        "verify": share,
        "draft": 1.0 - share,
        "verify_ms": target * 1e3,
        "step_ms": seconds * 1e3,
        "reason": f"the target's part alone against the whole step, {requests} requests with {drafts} drafts",
    }
    return runner.model.ranks.from_first("the parts of a step", found)


def _whole(runner: V4Runner, requests: int, drafts: int) -> Arm:
    descriptor = captured_verify(runner, requests, drafts)
    return Arm(requests, descriptor, lambda: runner.step(descriptor))


def _with_target(runner: V4Runner, whole: Arm) -> list[float]:
    """Seconds of a whole step and of the target's part of it."""
    descriptor, model = whole.descriptor, runner.model
    inputs = runner.inputs.views(descriptor)
    with scratch(runner) as session, torch.no_grad():
        alone = replace(model, workspace=session.workspace, ops=runner.ops_on(session.workspace), tap=None)
        session.capture_all([descriptor], lambda _: lambda: verify(alone, inputs, descriptor)[:2])
        part = Arm(whole.requests, descriptor, lambda: session.replay(descriptor))
        return step_seconds(runner, [whole, part])


def captured_verify(runner: V4Runner, requests: int, drafts: int, context: int = 1) -> Descriptor:
    """The verify descriptor to measure: of the variant that was captured, greedy where both were or none."""
    found = [runner.verify_descriptor(requests, drafts, context, variant) for variant in ("greedy", "sample")]
    return next((one for one in found if one in runner.session.descriptors), found[0])


def step_seconds(runner: V4Runner, arms: Sequence[Arm]) -> list[float]:
    """Seconds of a step of each arm, on the slots of :func:`slots_in_use`, while the device is kept busy.

    The arms take turns round by round, so that noise of the machine falls on all alike.
    """
    found: list[list[float]] = [[] for _ in arms]
    for _ in range(ROUNDS + 1):
        for arm, spent in zip(arms, found, strict=True):
            spent.append(_round(runner, arm))
    return [statistics.median(spent[1:]) for spent in found]


def _round(runner: V4Runner, arm: Arm) -> float:
    device, lengths = runner.backend.device, runner.model.state.lengths
    runner.inputs.fill(list(range(1, arm.requests + 1)), [arm.descriptor.query_len] * arm.requests)
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        lengths[1 : arm.requests + 1].zero_()
        runner.inputs.keep()
        arm.run()
    device.synchronize()
    return (time.perf_counter() - begin) / STEPS


@contextmanager
def slots_in_use(runner: V4Runner, requests: int) -> Iterator[None]:
    """Slots 1.. as of requests at their beginning, all of them with the null page, which takes any write.

    What the steps leave in a slot is what an earlier request would leave: the next one overwrites it before it reads.
    """
    state = runner.model.state
    own = slice(1, requests + 1)
    with torch.no_grad():
        state.page_table[own].zero_()
        state.stops[own].fill_(-1)
        state.last_token[own].zero_()
        state.end[own].fill_(runner.plan.max_context)
        try:
            yield
        finally:
            state.lengths[own].zero_()
            state.last_token[own].zero_()
            state.step.fill_(runner.steps)  # a part of a step commits too, and is none of the runner's steps
