"""Runners with MTP, texts with and without it, and drafts that are right by design, shared by the tests of MTP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import halma
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_checkpoint, load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.presets import tiny_directory
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper, Text
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from halma.models.deepseek_v4.weights import V4Weights

RANDOM, TINY = "random", "tiny-v4"
CONTEXT = 256
LENGTHS = (0, 1, 3, 8)
ANY = {"max_requests": 3, "mtp": 8, "mtp_lengths": LENGTHS, "graph": False}
"""Options of the runner whose steps may have few drafts or many: eager, since its captures would take longest."""


@functools.cache
def model(name: str, arithmetic: str) -> tuple[V4Config, V4Weights]:
    options = LoadOptions(arithmetic=arithmetic)
    if name == TINY:
        loaded = load_checkpoint(tiny_directory(), options)
    else:
        config = small_config(index_topk=4)
        loaded = load_source(config, SyntheticSource(config, seed=3), options)
    return loaded.config, loaded.weights


_runners: dict[Any, V4Runner] = {}


def runner(name: str, arithmetic: str = "exact", *, fresh: bool = False, **options: Any) -> V4Runner:
    """A runner, prepared for greedy and drawn tokens; shared by those who ask for the same options.

    Its one number of requests is the largest, so fewer are padded.
    """
    options = {"max_requests": 1, "max_context": CONTEXT, "chunk": 16, "arithmetic": arithmetic, **options}
    key = (name, *sorted(options.items()))
    if not fresh and key in _runners:
        return _runners[key]
    made = V4Runner(*model(name, arithmetic), halma.backend("cpu"), RunnerOptions(batches=(), **options))
    made.prepare(made.descriptors(("greedy", "sample")))
    if not fresh:
        _runners[key] = made
    return made


def texts(name: str, lengths: Sequence[int], max_tokens: int, *, heat: float = 0.0, seed: int = 0) -> list[Text]:
    """Prompts of the given lengths, every second one drawn where there is heat."""
    vocabulary = model(name, "exact")[0].vocab_size
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        warm, top_p = heat * (number % 2 == 0), (1.0, 0.9)[number % 4 // 2]
        made.append(Text(prompt, max_tokens - number % 3, temperature=warm, top_p=top_p, seed=seed + number))
    return made


@functools.cache
def _plain(name: str, arithmetic: str, text: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(Stepper(runner(name, arithmetic), [Text(*text)]).run(0)[0].tokens)


def plain(name: str, text: Text, arithmetic: str = "exact") -> list[int]:
    """What the model generates without MTP, one token a step, alone."""
    key = (tuple(text.prompt), text.max_tokens, text.temperature, text.top_p, text.seed, tuple(text.stop))
    return list(_plain(name, arithmetic, key))


def again(some: Sequence[Text]) -> list[Text]:
    """The same requests, nothing of them made yet."""
    return [replace(text, tokens=[], accepted=[]) for text in some]


Drafts = Callable[[int, int], Sequence[int]]
"""(number of the text, tokens that it has) -> drafts for what comes next."""


def run_with(stepper: Stepper, drafts: int, proposed: Drafts | None = None) -> list[Text]:
    """Run texts to their ends; ``proposed`` takes the place of what the module drafts."""
    state = stepper.runner.model.state
    assert state.draft is not None
    stepper.prefill()
    for _ in stepper.unfinished():
        if proposed is not None:
            for number, text in enumerate(stepper.texts):
                state.draft.tokens[number + 1, :drafts] = torch.tensor(proposed(number, len(text.tokens))[:drafts])
        stepper.step(drafts)
    return stepper.texts


def forced(expected: Sequence[Sequence[int]], vocabulary: int, right: Callable[[int, int], bool]) -> Drafts:
    """Drafts that are what will come where ``right(text, place)`` says so, and another token elsewhere."""

    def drafts(number: int, have: int) -> list[int]:
        coming = [*expected[number][have:], *[0] * 8][:8]
        return [
            token if right(number, have + place) else (token + 1) % vocabulary for place, token in enumerate(coming)
        ]

    return drafts
