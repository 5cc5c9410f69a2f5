"""Attention and FFN ranks of one model, as values that can be compared with one process."""

# pyright: basic
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as distributed

import halma
from halma.hal.collectives.rings import LOOKS_A_POLL, Rings
from halma.hal.errors import HalmaError, ModelError
from halma.models.deepseek_v4.checkpoint import load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.expert_loading import ExpertLayers, experts_of
from halma.models.deepseek_v4.experts import OWN_EXPERTS, FarExperts
from halma.models.deepseek_v4.load import ModelSource, default_carrier, load_expert_part, load_v4, resolve_model
from halma.models.deepseek_v4.preparation import LoadOptions
from halma.models.deepseek_v4.role_ranks import ItemsChoice
from halma.models.deepseek_v4.roles import ServingOptions, expert_server, geometry_of, opened
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.spread import spread
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config


@dataclass(frozen=True)
class Job:
    """What one attention rank serves, and on which model. ``changes``: of a small random model; None: tiny-v4."""

    requests: tuple[Request, ...]
    graph: bool = True
    arithmetic: str = "exact"
    carrier: torch.dtype | None = None
    changes: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "cpu"
    ffn_graph: bool = True
    items: ItemsChoice = "headers"

    @property
    def mtp(self) -> bool:
        return self.options.get("mtp", 0) > 0

    @property
    def source(self) -> ModelSource:
        return resolve_model("tiny-v4")

    def config(self) -> V4Config:
        return self.source.config if self.changes is None else small_config(**self.changes)

    def run_options(self) -> RunnerOptions:
        options = {"max_requests": 3, "batches": (1, 3), "max_context": 128, "chunk": 16, **self.options}
        return RunnerOptions(graph=self.graph, arithmetic=self.arithmetic, **options)

    def carrier_on(self, backend: Any) -> torch.dtype:
        return self.carrier or default_carrier(backend, self.arithmetic)

    def load_options(self, experts: Any) -> LoadOptions:
        carrier = self.carrier or torch.float32
        return LoadOptions(carrier, arithmetic=self.arithmetic, drafter=self.mtp, experts=experts)


@dataclass(frozen=True)
class Served:
    tokens: list[list[int]]
    finish: list[str]
    replayed: int
    eager: int
    weights: int


def prompts(count: int, longest: int, vocabulary: int = 1024) -> list[tuple[int, ...]]:
    """Unequal prompts, the same in every process."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()) for length in lengths]


def runner_of(job: Job, backend: Any, experts: Any) -> V4Runner:
    options = job.run_options()
    if job.changes is None:
        return load_v4(job.source, backend, options, carrier=job.carrier, experts=experts).runner
    source = SyntheticSource(job.config(), seed=3)
    loaded = load_source(job.config(), source, job.load_options(experts.held))
    return V4Runner(loaded.config, loaded.weights, backend, options, carrier=job.carrier_on(backend), experts=experts)


def attend(job: Job, rings: Rings | None = None, pauses: Sequence[float] = ()) -> Served:
    """An attention rank's whole part; without rings one process that does all.

    Args:
        pauses: seconds that the rank idles between two halves of its requests.
    """
    runner = runner_of(job, halma.backend(job.backend), OWN_EXPERTS if rings is None else FarExperts(rings))
    sampled = any(request.temperature > 0 for request in job.requests)
    runner.prepare(runner.descriptors(("greedy", "sample") if sampled else ("greedy",)))
    engine = Engine(runner)
    half = len(job.requests) // 2 if pauses else len(job.requests)
    found = engine.run(job.requests[:half])
    for seconds in pauses:
        time.sleep(seconds)
    found += engine.run(job.requests[half:])
    runner.close()
    counters = engine.counters
    weights = runner.model.weights.nbytes
    return Served([g.tokens for g in found], [g.finish for g in found], counters.replayed, counters.eager, weights)


def held(job: Job, part: tuple[int, int]) -> ExpertLayers:
    if job.changes is None:
        backend = halma.backend(job.backend)
        return load_expert_part(job.source, backend, job.run_options(), part, ranks=2, carrier=job.carrier)
    return experts_of(job.config(), SyntheticSource(job.config(), seed=3), job.load_options(True), part)


def serving(job: Job) -> ServingOptions:
    """Without a measurement what runs as a graph is the gate's alone, the same in every run."""
    return ServingOptions(graph=job.ffn_graph, checked=True, measure=False, items=job.items)


def geometry(job: Job, attention: int, ffn: int, **changes: Any) -> Any:
    given = {
        "max_tokens": job.run_options().most_rows,
        "carrier": job.carrier_on(halma.backend(job.backend)),
        "arithmetic": job.arithmetic,
        "mtp": job.mtp,
        **changes,
    }
    return geometry_of(job.config(), attention=attention, ffn=ffn, **given)


def play(
    jobs: Sequence[Job],
    ffn: int,
    experts: tuple[int, ...] = (),
    late: Mapping[int, float] | None = None,
    pauses: Sequence[float] = (),
) -> Any:
    """One rank's part: attention rank r serves ``jobs[r]``, the others hold experts.

    Args:
        late: seconds that a rank spends on something else before its part, by rank.
    """
    backend = halma.backend(jobs[0].backend)
    group = halma.collectives(world=distributed.group.WORLD, backend=backend)
    made = geometry(jobs[0], len(jobs), ffn, experts=experts)
    with opened(group, made) as rings:
        time.sleep((late or {}).get(group.rank, 0.0))
        if rings.attends:
            mine = jobs[group.rank]
            served = attend(mine, rings, pauses) if mine.requests else None
            rings.finish()
            return served
        part = made.experts[rings.number : rings.number + 2]
        return expert_server(rings, held(jobs[0], part), backend, serving(jobs[0])).serve()


def play_spread(jobs: Sequence[Job]) -> Served:
    """One rank's part where each attends for requests of its own and holds some experts."""
    backend = halma.backend(jobs[0].backend)
    group = halma.collectives(world=distributed.group.WORLD, backend=backend)
    mine = jobs[group.rank]
    tokens = mine.run_options().most_rows
    with spread(mine.config(), group, tokens=tokens, carrier=mine.carrier_on(backend)) as experts:
        runner = runner_of(mine, backend, experts)
        runner.prepare()
        engine = Engine(runner)
        group.ranks.exchange("all are ready", None)
        found = engine.run(mine.requests)
        experts.go_along(runner)
        runner.close()
        weights, counters = runner.model.weights.nbytes, engine.counters
        return Served([g.tokens for g in found], [g.finish for g in found], counters.replayed, counters.eager, weights)


def spread_until_one_dies(jobs: Sequence[Job], bound: float) -> str:
    """As :func:`play_spread`, but the last rank ends without a word in its sixth step; what the others are told."""
    backend = halma.backend(jobs[0].backend)
    group = halma.collectives(world=distributed.group.WORLD, backend=backend)
    mine = jobs[group.rank]
    tokens = mine.run_options().most_rows
    manager = spread(mine.config(), group, tokens=tokens, carrier=mine.carrier_on(backend))
    experts = manager.__enter__()  # never left: nothing is exchanged any more
    runner = runner_of(mine, backend, experts)
    runner.prepare()
    experts._exchange.set_bound(bound)
    engine = Engine(runner)
    right = experts.begin_step

    def begin() -> None:
        if group.rank == group.size - 1 and experts.steps == 5:
            os._exit(9)
        right()

    experts.__dict__["begin_step"] = begin
    group.ranks.exchange("all are ready", None)

    def work() -> None:
        engine.run(mine.requests)
        experts.go_along(runner)

    return refusal(work)


def refusal(work: Callable[[], Any]) -> str:
    """What halma says to ``work``."""
    try:
        work()
    except HalmaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def play_until(jobs: Sequence[Job], ffn: int, victim: int, how: str, bound: float) -> tuple[str, float]:
    """As :func:`play`, but ``victim`` dies, stands still or fails in the middle of it; what each rank is told, and
    after how many seconds since it all began.

    Nothing is exchanged afterwards: whoever is left frees its memory with its process.
    """
    backend = halma.backend(jobs[0].backend)
    group = halma.collectives(world=distributed.group.WORLD, backend=backend)
    rings = Rings.open(group, geometry(jobs[0], len(jobs), ffn))
    rings.set_bound(bound)
    if group.rank == victim:
        _misbehave(rings, how, jobs[0].items)
    if not rings.attends:
        part = rings.geometry.experts[rings.number : rings.number + 2]
        server = expert_server(rings, held(jobs[0], part), backend, serving(jobs[0]))
    group.ranks.exchange("all are ready", None)
    began = time.monotonic()

    def work() -> None:
        try:
            if not rings.attends:
                server.serve()
                return
            attend(jobs[group.rank], rings)
            rings.finish()
        except BaseException as error:
            rings.leave(str(error))
            raise

    said = refusal(work)
    return said, time.monotonic() - began


def _misbehave(rings: Rings, how: str, items: ItemsChoice) -> None:
    """After 40 looks of an attention rank at its rings, or 40 items of an FFN rank, about as many without headers."""
    looks = rings.attends or items == "worst-case"
    right, calls = (rings.poll if looks else rings.next_item), 0
    most = 40 if rings.attends or not looks else 40 // LOOKS_A_POLL + 1

    def wrong() -> Any:
        nonlocal calls
        found = right()
        calls += looks or found is not None
        if calls < most or (found is None and not looks):
            return found
        if how == "dies":
            os._exit(9)
        if how == "stands still":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ModelError("its experts are lost")

    rings.__dict__[right.__name__] = wrong


# -- rings alone ----------------------------------------------------------------------------------------


def mismatch(job: Job, changes: Sequence[Mapping[str, Any]]) -> str:
    """What a rank is told whose geometry, or another's, has ``changes[rank]``; a right one is opened afterwards."""
    group = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    wrong = replace(geometry(job, 1, group.size - 1), **changes[group.rank])
    said = refusal(lambda: Rings.open(group, wrong))
    with opened(group, geometry(job, 1, group.size - 1)) as rings:
        rings.finish()
    return said


def too_many(job: Job) -> tuple[str, int]:
    """The refusal of more rows than were declared, and how many items the FFN rank saw."""
    group = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    with opened(group, geometry(job, 1, 1, max_tokens=8)) as rings:
        said, seen = "", 0
        if rings.attends:
            g, device = rings.geometry, halma.backend(job.backend).device.torch_device
            x = torch.zeros(9, g.hidden, dtype=getattr(torch, g.payload), device=device)
            ids = torch.zeros(9, g.top_k, dtype=torch.int64, device=device)
            said = refusal(lambda: rings.submit(0, x, ids, ids.to(torch.float32)))
        group.ranks.exchange("it was tried", None)
        if not rings.attends:
            seen = rings.next_item() is not None
        rings.finish()
        return said, seen


def out_of_turn(job: Job) -> list[str]:
    """What an attention rank is told that collects what was not submitted, as other rows, or submits too much."""
    group = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    with opened(group, geometry(job, 1, 1)) as rings:
        said: list[str] = []
        if rings.attends:
            g, device = rings.geometry, halma.backend(job.backend).device.torch_device
            x = torch.zeros(3, g.hidden, dtype=getattr(torch, g.payload), device=device)
            ids = torch.zeros(3, g.top_k, dtype=torch.int64, device=device)
            weights = ids.to(torch.float32)
            said.append(refusal(lambda: rings.collect(x)))
            said.append(refusal(lambda: rings.submit(g.layers, x, ids, weights)))
            said.append(refusal(lambda: rings.submit(0, x, ids.int(), weights)))
            for _ in range(g.depth):
                rings.submit(0, x, ids, weights)
            said.append(refusal(lambda: rings.submit(0, x, ids, weights)))
            said.append(refusal(lambda: rings.collect(x[:2])))
        else:
            said.append(refusal(lambda: rings.submit(0, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))))
        rings.finish()
        return said


def bad_header(job: Job) -> str:
    """What an FFN rank says to a header whose counts do not sum, once its other ranks are out of the way."""
    group = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    with opened(group, geometry(job, 1, 1)) as rings:
        said = ""
        if rings.attends:
            words: Any = rings._boards[1]._words
            for place, value in enumerate((99, 3, 3 * rings.geometry.top_k + 1, 2, 2)):
                words[rings._boards[1]._first + rings.geometry.depth // 2 * 8 + place] = 1 << 32 | value
        group.ranks.exchange("a header was written", None)
        if not rings.attends:
            said = refusal(rings.next_item)
        rings.finish()
        return said


def never_comes(job: Job, absent: int, seconds: float) -> str:
    """What a rank is told when ``absent`` does not open its rings."""
    group = halma.collectives(world=distributed.group.WORLD, backend=job.backend)
    ranks: Any = group.ranks
    if group.rank == absent:
        return ""
    ranks._seconds = seconds
    return refusal(lambda: Rings.open(group, geometry(job, 1, 1)))


def serve_refused(job: Job) -> str:
    """What an FFN rank says that cannot serve as it is asked to."""
    backend = halma.backend(job.backend)
    group = halma.collectives(world=distributed.group.WORLD, backend=backend)
    with opened(group, geometry(job, 1, 1)) as rings:
        said = "" if rings.attends else refusal(lambda: expert_server(rings, held(job, (0, 16)), backend, serving(job)))
        rings.finish()
        return said
