"""What rank processes do in tests of attention ranks that share a model; functions go there by name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as distributed

import halma
from halma.hal.collectives.group import Group
from halma.models.deepseek_v4.engine import Engine
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.role_groups import attending
from halma.models.deepseek_v4.role_ranks import RoleRanks
from halma.models.deepseek_v4.roles import expert_server, opened
from tests.role_processes import Job, Served, geometry, held, refusal, serving


def _groups(job: Job, roles: RoleRanks, rank: int) -> tuple[Group | None, Group | None]:
    """The rank's group of attention ranks, and its rings' group."""
    made = [(ranks, distributed.new_group(ranks)) for ranks in (*roles.groups, roles.rings)]
    *shared, rings = [
        halma.collectives(world=world, backend=job.backend) if rank in ranks else None for ranks, world in made
    ]
    return next((one for one in shared if one is not None), None), rings


def play_grouped(
    jobs: Sequence[Job], ffn: int, tp: int, victim: int = -1, bound: float = 0.0
) -> Served | dict[str, Any] | None:
    """One rank's part: group g of ``tp`` attention ranks serves ``jobs[g]``.

    Args:
        victim: the rank that ends without a word: an FFN rank behind 40 looks for items, another in its sixth step.
        bound: of all waits, where one is to be seen.
    """
    backend, rank = halma.backend(jobs[0].backend), distributed.get_rank()
    roles = RoleRanks(tp * len(jobs), ffn, tp)
    group, rings_of = _groups(jobs[0], roles, rank)
    with opened(rings_of, geometry(jobs[0], len(jobs), ffn)) if rings_of is not None else nullcontext() as rings:
        if group is None:
            assert rings is not None
            first, last = rings.geometry.experts[rings.number : rings.number + 2]
            server = expert_server(rings, held(jobs[0], (first, last)), backend, serving(jobs[0]))
            if rank == victim:
                _end(rings, "take")
            _ready(bound, rings)
            return server.serve()
        job = jobs[rank // tp]
        tokens = job.run_options().most_rows
        with attending(job.config(), group, rings, tokens=tokens, carrier=job.carrier_on(backend)) as mine:
            loaded = load_v4(job.source, backend, job.run_options(), ranks=mine.ranks, experts=mine.experts)
            runner = loaded.runner
            runner.prepare(runner.descriptors())
            if rank == victim:
                _end(mine.experts, "begin_step")
            _ready(bound, rings, mine.ranks._communicator)
            engine = Engine(runner)
            found = engine.run(job.requests)
            mine.finish()
            runner.close()
            c = engine.counters
            return Served(
                [g.tokens for g in found], [g.finish for g in found], c.replayed, c.eager, loaded.weight_bytes
            )


def _ready(bound: float, *waiting: Any) -> None:
    """From here on waits have the bound; nobody is still loading, which can take longer on a busy machine."""
    if bound:
        distributed.barrier()
        for one in waiting:
            if one is not None:
                one.set_bound(bound)


def _end(owner: Any, name: str) -> None:
    right, calls = getattr(owner, name), 0

    def wrong(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            os._exit(9)
        return right(*given)

    owner.__dict__[name] = wrong


def grouped_until(jobs: Sequence[Job], ffn: int, tp: int, victim: int, bound: float) -> tuple[str, float]:
    """As :func:`play_grouped` with a victim; what each rank is told, and after how many seconds."""
    began = time.monotonic()
    said = refusal(lambda: play_grouped(jobs, ffn, tp, victim, bound))
    return said, time.monotonic() - began
