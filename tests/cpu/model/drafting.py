"""The small model with its MTP module, and drafts of any quality: the module of a random model is never right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import halma
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Engine, Generation, Request
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from halma.models.deepseek_v4.weights import V4Weights
from tests.cpu.model.small import alone

Right = Callable[[int, int], bool]
"""(request id, position) -> whether the draft for that position is to be right."""


@functools.cache
def drafting_model(arithmetic: str) -> tuple[V4Config, V4Weights]:
    """:func:`tests.cpu.model.small.small_model` with its MTP module."""
    config = small_config(index_topk=4)
    loaded = load_source(config, SyntheticSource(config, seed=3), LoadOptions(arithmetic=arithmetic))
    return loaded.config, loaded.weights


def drafting_runner(arithmetic: str = "exact", **options: Any) -> V4Runner:
    """A runner of its own, eager and planned for both variants unless the options say otherwise."""
    given: dict[str, Any] = {"max_requests": 3, "max_context": 256, "chunk": 16, "graph": False, "mtp": 4, **options}
    config, weights = drafting_model(arithmetic)
    made = RunnerOptions(arithmetic=arithmetic, batches=(1, given["max_requests"]), **given)
    runner = V4Runner(config, weights, halma.backend("cpu"), made)
    runner.prepare(runner.descriptors(("greedy", "sample")))
    return runner


class Rigged:
    """An engine whose drafts are the tokens that the requests will get alone, or others where ``right`` says so.

    They are put where the module leaves its own, before every step that verifies, so a step sees nothing unusual.
    """

    def __init__(self, runner: V4Runner, right: Right, **options: Any) -> None:
        self.engine = Engine(runner, **options)
        self.texts: dict[int, tuple[int, ...]] = {}
        self._right = right
        self._step = runner.step
        runner.step = self._rigged  # type: ignore[method-assign]

    def submit(self, request: Request) -> Generation:
        generation = self.engine.submit(request)
        whole = Request(request.prompt, request.max_tokens, request.temperature, request.top_p, request.seed)
        self.texts[generation.id] = (*request.prompt, *alone("exact", whole))
        return generation

    def run(self, requests: list[Request]) -> list[Generation]:
        generations = [self.submit(request) for request in requests]
        while self.engine.busy:
            self.engine.step()
        return generations

    def _rigged(self, descriptor: Any) -> Any:
        state = self.engine.runner.model.state
        assert state.draft is not None
        if descriptor.role == "verify":
            for one in self.engine.running:
                behind = int(state.lengths[one.slot]) + 1
                drafts = state.draft.tokens[one.slot]
                for place in range(int((drafts >= 0).sum())):
                    drafts[place] = self._draft(one.id, behind + place)
        return self._step(descriptor)

    def _draft(self, id: int, position: int) -> int:
        text = self.texts[id]
        token = text[position] if position < len(text) else 0
        return token if self._right(id, position) else (token + 1) % 199


def always(id: int, position: int) -> bool:
    """Every draft is right."""
    return True


def often(id: int, position: int) -> bool:
    """About two of three are, without a pattern that a step could line up with."""
    return int(torch.randint(0, 3, (), generator=torch.Generator().manual_seed(1000 * id + position))) > 0
