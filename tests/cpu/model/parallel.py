"""Serving requests on one rank or on many, as a value that can be compared."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as distributed

import halma
from halma.hal.collectives.contract import Kind
from halma.hal.errors import ArenaError, CaptureError, CollectiveError, RankError
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_checkpoint, load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.presets import tiny_directory
from halma.models.deepseek_v4.ranks import ONE_RANK, ManyRanks, Ranks, divided
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper, Text, occupy
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from halma.models.deepseek_v4.weights import V4Weights

EIGHT_GROUPS: Mapping[str, Any] = {"vocab_size": 200, "num_attention_heads": 8, "o_groups": 8, "index_topk": 4}


@dataclass(frozen=True)
class Job:
    """What to serve, and how. ``arrivals``: requests with the step at which each comes."""

    arrivals: tuple[tuple[Request, int], ...]
    changes: Mapping[str, Any] | None = None
    """Of a small random model; None: tiny-v4."""
    seed: int = 3
    arithmetic: str = "exact"
    carrier: torch.dtype = torch.float32
    graph: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    tokens: list[list[int]]
    finish: list[str]
    replayed: int
    eager: int
    weights: int


@functools.cache
def weights_of(
    model: tuple[tuple[str, Any], ...] | None, seed: int, options: LoadOptions
) -> tuple[V4Config, V4Weights]:
    if model is None:
        loaded = load_checkpoint(tiny_directory(), options)
    else:
        config = small_config(**dict(model))
        loaded = load_source(config, SyntheticSource(config, seed=seed), options)
    return loaded.config, loaded.weights


def runner_of(job: Job, ranks: Ranks) -> V4Runner:
    drafter = job.options.get("mtp", 0) > 0
    load = LoadOptions(job.carrier, arithmetic=job.arithmetic, rank=ranks.rank, world=ranks.size, drafter=drafter)
    model = None if job.changes is None else tuple(sorted(job.changes.items()))
    config, weights = weights_of(model, job.seed, load)
    options = {"max_requests": 3, "batches": (1, 3), "max_context": 256, "chunk": 16, **job.options}
    given = RunnerOptions(graph=job.graph, arithmetic=job.arithmetic, **options)
    return V4Runner(config, weights, halma.backend("cpu"), given, carrier=job.carrier, ranks=ranks)


def serve(job: Job, ranks: Ranks = ONE_RANK) -> Served:
    runner = runner_of(job, ranks)
    sampled = any(request.temperature > 0 for request, _ in job.arrivals)
    runner.prepare(runner.descriptors(("greedy", "sample") if sampled else ("greedy",)))
    engine = Engine(runner)
    waiting = sorted(enumerate(job.arrivals), key=lambda item: item[1][1])
    found: dict[int, Any] = {}
    step = 0
    while waiting or engine.busy:
        while waiting and waiting[0][1][1] <= step:
            number, (request, _) = waiting.pop(0)
            found[number] = engine.submit(request)
        engine.step()
        step += 1
    runner.close()
    generations = [found[number] for number in range(len(found))]
    counters = engine.counters
    return Served(
        [one.tokens for one in generations],
        [one.finish for one in generations],
        counters.replayed,
        counters.eager,
        runner.model.weights.nbytes,
    )


@contextmanager
def many(job: Job, tokens: int = 16 * 3) -> Iterator[ManyRanks]:
    """All ranks of this process's pool."""
    config = tiny_config() if job.changes is None else small_config(**job.changes)
    members = halma.collectives(world=distributed.group.WORLD, backend="cpu")
    with divided(config, members, tokens=tokens, carrier=job.carrier) as ranks:
        yield ranks


def tiny_config() -> V4Config:
    return V4Config.from_file(tiny_directory())


def serve_on_ranks(job: Job) -> Served:
    """One rank's part; checks itself that the others have the same tokens."""
    with many(job) as ranks:
        served = serve(job, ranks)
        ranks.require_same("tokens", served.tokens)
    return served


def drafted(job: Job, given: list[Text], ranks: Ranks = ONE_RANK) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of texts, and what each step accepted of its drafts, with as many drafts as the job's options have."""
    runner = runner_of(job, ranks)
    runner.prepare(runner.descriptors(("sample",)))
    found = Stepper(runner, [replace(text, tokens=[], accepted=[]) for text in given]).run(runner.options.mtp)
    runner.close()
    return [text.tokens for text in found], [text.accepted for text in found]


def draft_on_ranks(job: Job, given: list[Text]) -> tuple[list[list[int]], list[list[int]]]:
    with many(job) as ranks:
        return drafted(job, given, ranks)


def plan_too_little(job: Job) -> str:
    """The refusal of a ladder whose widest step is wider than what the ranks' memory was planned for."""
    with many(job, tokens=16) as ranks:
        runner = runner_of(job, ranks)
        try:
            runner.prepare()
        except ArenaError as error:
            return str(error)
        finally:
            runner.close()
    return ""


def logits(job: Job, tokens: torch.Tensor, ranks: Ranks = ONE_RANK) -> torch.Tensor:
    """Logits [R, L, V/N] of every position of ``tokens`` [R, L], fed in chunks: the same input whoever computes."""
    requests, length = tokens.shape
    runner = runner_of(job, ranks)
    shapes = [Descriptor("prefill", requests, 16, c, "all") for c in runner.capacities]
    runner.prepare(shapes)
    occupy(runner, requests)
    found: list[torch.Tensor] = []
    for begin in range(0, length, 16):
        end = min(begin + 16, length)
        fed = torch.zeros(requests, 16, dtype=torch.int64)
        fed[:, : end - begin] = tokens[:, begin:end]
        runner.inputs.fill(range(1, requests + 1), [end - begin] * requests, tokens=fed)
        capacity = next(c for c in runner.capacities if c >= end)
        _, part = runner.step(Descriptor("prefill", requests, 16, capacity, "all"))
        found.append(part.view(requests, 16, -1)[:, : end - begin].clone())
    runner.close()
    return torch.cat(found, 1)


def logits_on_ranks(job: Job, tokens: torch.Tensor) -> torch.Tensor:
    with many(job) as ranks:
        return logits(job, tokens, ranks)


def count_calls(job: Job, variant: str) -> list[tuple[str, int]]:
    """What one eager decode step of three requests sends, by the channel's flight recorder."""
    with many(job) as ranks:
        runner = runner_of(job, ranks)
        runner.prepare([Descriptor("decode", 3, 1, c, variant) for c in runner.capacities])
        occupy(runner, 3)
        runner.inputs.fill([1, 2, 3], [1, 1, 1], temperature=[0.7] * 3)
        channel = ranks._communicator
        assert not channel.flight()  # a plan runs nothing
        runner.step(Descriptor("decode", 3, 1, runner.capacities[0], variant))
        made = [(Kind(entry.kind).name.lower(), entry.nbytes) for entry in channel.flight()]
        runner.close()
    return made


def differ(really: bool) -> str:
    """The refusal of tokens of which this rank has others than the first, or nothing."""
    with many(Job((), EIGHT_GROUPS)) as ranks:
        try:
            ranks.require_same("their tokens", [[1], [4, 5 + ranks.rank * really], []])
        except CollectiveError as error:
            return str(error)
        return ""


def fail_on_one_rank(job: Job) -> str:
    """What each rank is told when the program of the last one fails while it is captured."""
    with many(job) as ranks:
        runner = runner_of(job, ranks)
        expand = runner.model.ops.expand_streams
        calls = 0

        def failing(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if ranks.rank == ranks.size - 1 and calls == 3:
                raise ValueError("no memory for layer 2")
            return expand(*args)

        runner.model.ops.__dict__["expand_streams"] = failing
        try:
            runner.prepare(runner.descriptors(("greedy",)))
        except (CaptureError, ValueError) as error:
            return str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        finally:
            runner.close()
        return "nothing"


def decode_until_one_dies(job: Job) -> tuple[str, str, list[int]]:
    """The last rank ends without a word before its sixth decode step; what the others are told, and their tokens."""
    manager = many(job)
    ranks = manager.__enter__()  # never left: nothing is exchanged any more
    ranks._communicator.set_bound(1.0)
    runner = runner_of(job, ranks)
    runner.prepare(runner.descriptors(("greedy",)))
    engine = Engine(runner)
    generation = engine.submit(job.arrivals[0][0])
    try:
        while engine.busy:
            if ranks.rank == ranks.size - 1 and engine.counters.decode_steps == 5:
                os._exit(9)
            engine.step()
    except RankError as error:
        return type(error).__name__, str(error), generation.tokens
    return "", "", generation.tokens
