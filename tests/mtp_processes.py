"""MTP on the ranks of a pool, one process a device; the device's tests use it, and a CPU can run it too."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as distributed

import halma
from halma.models.deepseek_v4.load import default_carrier, load_v4, resolve_model
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks, divided
from halma.models.deepseek_v4.runner import RunnerOptions
from halma.models.deepseek_v4.stepper import Stepper, Text

Found = tuple[list[list[int]], list[list[int]]]


def options_for(count: int, drafts: int, graph: bool) -> RunnerOptions:
    """Exact arithmetic: what M1 promises there has no bound."""
    given = {"max_requests": count, "batches": (count,), "max_context": 512, "arithmetic": "exact", "graph": graph}
    return RunnerOptions(**given, mtp=drafts)  # type: ignore[arg-type]


def tokens_of(name: str, given: list[Text], drafts: int, graph: bool, ranks: Ranks = ONE_RANK) -> Found:
    """(tokens, accepted runs) of tiny-v4 with so many drafts a step; none without."""
    backend = halma.backend(name)
    options = options_for(len(given), drafts, graph)
    runner = load_v4("tiny-v4", backend, options, ranks=ranks).runner
    try:
        runner.prepare(runner.descriptors(("sample",) if any(text.temperature for text in given) else ("greedy",)))
        found = Stepper(runner, [replace(text, tokens=[], accepted=[]) for text in given]).run(drafts)
    finally:
        runner.close()
    return [text.tokens for text in found], [text.accepted for text in found]


def tokens_on_ranks(name: str, given: list[Text], drafts: int, graph: bool) -> Found:
    """The same on all ranks of the pool, each with its part of the model."""
    backend = halma.backend(name)
    options = options_for(len(given), drafts, graph)
    members = halma.collectives(world=distributed.group.WORLD, backend=backend)
    config, carrier = resolve_model("tiny-v4").config, default_carrier(backend, "exact")
    with divided(config, members, tokens=options.most_rows, carrier=carrier) as ranks:
        found = tokens_of(name, given, drafts, graph, ranks)
        ranks.require_same("tokens", found[0])
    return found
