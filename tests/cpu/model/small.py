"""A small random V4 model with every kind of layer, and runners on it, shared by the tests of this folder."""

from __future__ import annotations

import functools
from typing import Any

import torch

import halma
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config
from halma.models.deepseek_v4.weights import V4Weights


@functools.cache
def small_model(arithmetic: str) -> tuple[V4Config, V4Weights]:
    """Every kind of layer and router, weights in the official packed formats, prepared for ``arithmetic``."""
    config = small_config(index_topk=4)
    loaded = load_source(config, SyntheticSource(config, seed=3), LoadOptions(arithmetic=arithmetic, drafter=False))
    return loaded.config, loaded.weights


_runners: dict[Any, V4Runner] = {}


def small_runner(arithmetic: str, *, fresh: bool = False, **options: Any) -> V4Runner:
    """A runner on the small model, captured once and shared by tests that ask for the same options."""
    options = {"max_context": 256, "chunk": 16, "arithmetic": arithmetic, **options}
    options["batches"] = tuple(sorted({1, options.get("max_requests", 1)}))
    key = tuple(sorted(options.items()))
    if not fresh and key in _runners:
        return _runners[key]
    config, weights = small_model(arithmetic)
    runner = V4Runner(config, weights, halma.backend("cpu"), RunnerOptions(**options))
    runner.prepare(runner.descriptors(("greedy", "sample")))
    if not fresh:
        _runners[key] = runner
    return runner


@functools.cache
def alone(arithmetic: str, request: Request, *, max_context: int = 256) -> list[int]:
    """What ``request`` gets from an engine that serves nobody else."""
    runner = small_runner(arithmetic, max_context=max_context)
    return Engine(runner).run([request])[0].tokens


def poison(tensor: torch.Tensor) -> None:
    """The worst a row can hold: NaN, or the least integer."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
