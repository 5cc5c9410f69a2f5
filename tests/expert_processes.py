"""Expert parallelism with MTP and tensor parallelism inside, on the ranks of a pool, as values to compare with one
process; shared by tests on the CPU and on GPUs."""

# pyright: basic
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as distributed

import halma
from halma.hal.collectives.contract import Kind
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.checkpoint import load_source
from halma.models.deepseek_v4.engine import Engine
from halma.models.deepseek_v4.experts import OWN_EXPERTS, Experts
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.parted import PartedExperts
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks, divided
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.spread import spread
from halma.models.deepseek_v4.stepper import occupy
from halma.models.deepseek_v4.synthetic import SyntheticSource
from tests.role_processes import Job


@dataclass(frozen=True)
class Shared:
    """What one rank served, and with how many experts; ``drafted``: drafts of it that were accepted."""

    tokens: list[list[int]]
    finish: list[str]
    replayed: int
    drafted: int
    experts: Any


def runner_of(job: Job, ranks: Ranks = ONE_RANK, experts: Experts = OWN_EXPERTS) -> V4Runner:
    backend, options = halma.backend(job.backend), job.run_options()
    if job.changes is None:
        return load_v4(job.source, backend, options, carrier=job.carrier, ranks=ranks, experts=experts).runner
    device = backend.device.torch_device
    load = replace(job.load_options(experts.held), rank=ranks.rank, world=ranks.size, device=device)
    loaded = load_source(job.config(), SyntheticSource(job.config(), seed=3), load)
    carrier = job.carrier_on(backend)
    return V4Runner(loaded.config, loaded.weights, backend, options, carrier=carrier, ranks=ranks, experts=experts)


def served(job: Job, ranks: Ranks = ONE_RANK, experts: Experts = OWN_EXPERTS, jobs: Sequence[Job] = ()) -> Shared:
    """The job's requests, by this rank's part of the model; it goes along with others until all are done.

    Args:
        jobs: of all ranks that exchange rows: warm-ups of a GPU do so too, so all capture the same ladder.
    """
    runner = runner_of(job, ranks, experts)
    sampled = any(request.temperature > 0 for one in (job, *jobs) for request in one.requests)
    runner.prepare(runner.descriptors(("greedy", "sample") if sampled else ("greedy",)))
    engine = Engine(runner)
    found = engine.run(job.requests)
    ranks.require_same("tokens", [one.tokens for one in found])
    go_along: Any = getattr(experts, "go_along", None)
    if go_along is not None:
        go_along(runner)
    runner.close()
    accepted = sum(sum(one.accepted) for one in found)
    tokens, finish = [one.tokens for one in found], [one.finish for one in found]
    return Shared(tokens, finish, engine.counters.replayed, accepted, experts.held)


def play(jobs: Sequence[Job], tp: int) -> Shared:
    """One rank's part: ``tp`` ranks share the attention for each of ``jobs``, and all ranks the experts."""
    job = jobs[distributed.get_rank() // tp]
    backend = halma.backend(job.backend)
    config, tokens, carrier = job.config(), job.run_options().most_rows, job.carrier_on(backend)
    with contextlib.ExitStack() as held:
        ranks: Ranks = ONE_RANK
        if tp > 1:
            members = halma.collectives(world=_members(tp), backend=backend)
            ranks = held.enter_context(divided(config, members, tokens=tokens, carrier=carrier))
        if len(jobs) == 1:
            return served(job, ranks, PartedExperts(config, ranks))
        group = halma.collectives(world=distributed.group.WORLD, backend=backend)
        experts = held.enter_context(spread(config, group, tokens=tokens, carrier=carrier, ranks=ranks))
        # A rank that is done early looks at how far the others are: all must be there before one begins.
        group.ranks.exchange("all are there", None)
        return served(job, ranks, experts, jobs)


def _members(tp: int) -> Any:
    size = distributed.get_world_size()
    if tp == size:
        return distributed.group.WORLD
    made = [distributed.new_group(list(range(first, first + tp))) for first in range(0, size, tp)]
    return made[distributed.get_rank() // tp]


def count_calls(job: Job) -> list[tuple[str, int]]:
    """What one eager decode step of three requests sends where ranks have the same rows, by the flight recorder."""
    config, carrier = job.config(), job.carrier_on(halma.backend(job.backend))
    members = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    with divided(config, members, tokens=16, carrier=carrier) as ranks:
        runner = runner_of(job, ranks, PartedExperts(config, ranks))
        shapes = [Descriptor("decode", 3, 1, capacity, "greedy") for capacity in runner.capacities]
        runner.prepare(shapes)
        occupy(runner, 3)
        runner.inputs.fill([1, 2, 3], [1, 1, 1])
        runner.step(shapes[0])
        made = [(Kind(entry.kind).name.lower(), entry.nbytes) for entry in ranks._communicator.flight()]
        runner.close()
    return made
