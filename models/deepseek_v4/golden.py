"""Golden cases: reference results of other people's code, and our run beside them.

A case file is a safetensors file that explains itself in its metadata. Two families are known: *random*
files hold a small model's weights, its prompts, logits and traces; *tiny* files hold results of the shipped
tiny checkpoint, either exact or with the official rounding (then a ladder of four checks applies, because
rounding is discontinuous and no fp32 program can meet 1e-4 end to end).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from halma.hal.backend import Backend
from halma.hal.errors import ModelError
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import occupy
from halma.models.deepseek_v4.weights import V4Weights

EXACT_TOLERANCE = 1e-4
"""In units of the logits' standard deviation: room for another order of summation, not for a fault."""


@dataclass(frozen=True)
class Check:
    """One comparison: the value found, the limit, and what it means."""

    name: str
    value: float
    limit: float
    detail: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class CaseReport:
    """What ``halma verify`` prints."""

    case: str
    arithmetic: str
    graph: bool
    tokens_per_step: int
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def passed(self) -> bool:
        """Whether there were checks and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)


class CaseFile:
    """A golden case, read lazily.

    Raises:
        ModelError: not a safetensors file, or not a case that we know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self.names = frozenset(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise ModelError(
                "the case cannot be read",
                asked=str(path),
                found=str(error),
                do="give a golden case: a .safetensors file that holds input.ids or <prompt>.prompt_ids",
            ) from error
        if "tolerance" not in self.metadata or not (self.random or self.prompts()):
            raise ModelError(
                "the file is not a golden case",
                asked=str(path),
                found=f"{len(self.names)} tensors, metadata keys {sorted(self.metadata)}",
                do="give a file with input.ids (random model) or <prompt>.prompt_ids (tiny checkpoint)",
            )

    @property
    def random(self) -> bool:
        """Whether it brings its own weights."""
        return "input.ids" in self.names

    @property
    def quantised(self) -> bool:
        """Whether the official rounding is in it."""
        return self.metadata.get("rounding", "none") != "none"

    def prompts(self) -> list[str]:
        """Names of a tiny file's prompts."""
        return sorted(name.removesuffix(".prompt_ids") for name in self.names if name.endswith(".prompt_ids"))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def json(self, key: str) -> Any:
        """A metadata entry, parsed."""
        return json.loads(self.metadata[key])


@dataclass(frozen=True)
class CaseModel:
    """The model that a case needs, loaded with one carrier and arithmetic."""

    config: V4Config
    weights: V4Weights


Loader = Callable[[str, torch.dtype], CaseModel]
"""(arithmetic, carrier) -> model, of several ranks this one's part."""

Divide = Callable[[V4Config, int, torch.dtype], AbstractContextManager[Ranks]]
"""(configuration, most rows of a step, carrier) -> the ranks that share the model, while the block runs."""

LONGEST_CHUNK = 64
"""Prompt tokens of a request in one step."""


def alone(config: V4Config, tokens: int, carrier: torch.dtype) -> AbstractContextManager[Ranks]:
    """One rank holds the model whole."""
    return nullcontext(ONE_RANK)


# -- driving a runner with given tokens -----------------------------------------------------------------


def force(
    backend: Backend,
    model: CaseModel,
    tokens: torch.Tensor,
    *,
    prefill: int,
    step: int,
    graph: bool,
    arithmetic: str,
    carrier: torch.dtype,
    ranks: Ranks = ONE_RANK,
    checked: bool = False,
    tap: Callable[[str, torch.Tensor], None] | None = None,
    after: Callable[[V4Runner], None] | None = None,
) -> torch.Tensor:
    """Feed ``tokens`` [R, L] and return the logits [R, L, V] of every position, on every rank.

    Args:
        prefill: tokens of the prompt, fed in chunks of at most ``LONGEST_CHUNK``.
        step: tokens per request and step after it.
        ranks: those that share ``model``, each with its part of it.
        tap: watches intermediate values (eager only).
        after: called with the runner at the end, to look at the final state.
    """
    requests, length = tokens.shape
    chunk = max(min(LONGEST_CHUNK, prefill), step)
    options = RunnerOptions(
        max_requests=requests,
        max_context=length,
        chunk=chunk,
        batches=(requests,),
        graph=graph,
        capture_prefill=True,
        checked=checked,
        arithmetic=arithmetic,
    )
    runner = V4Runner(model.config, model.weights, backend, options, carrier=carrier, ranks=ranks, tap=tap)
    try:
        parts = list(_parts(length, prefill, chunk, step))
        widths = {chunk if begin < prefill else step for begin, _ in parts}
        shapes = [Descriptor("prefill", requests, w, c, "all") for w in sorted(widths) for c in runner.capacities]
        runner.prepare(shapes)
        occupy(runner, requests)
        found = torch.empty(requests, length, model.config.vocab_size // ranks.size, dtype=runner.model.accumulator)
        for begin, end in parts:
            width = chunk if begin < prefill else step
            capacity = next(c for c in runner.capacities if c >= end)
            fed = torch.zeros(requests, width, dtype=torch.int64)
            fed[:, : end - begin] = tokens[:, begin:end]
            runner.inputs.fill(range(1, requests + 1), [end - begin] * requests, tokens=fed)
            _, logits = runner.step(Descriptor("prefill", requests, width, capacity, "all"))
            found[:, begin:end].copy_(logits.view(requests, width, -1)[:, : end - begin])
        if after is not None:
            after(runner)
        ranks.poll()
        return torch.cat(ranks.values("logits", found), -1)
    finally:
        runner.close()


def _parts(length: int, prefill: int, chunk: int, step: int) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < length:
        end = min(begin + chunk, prefill) if begin < prefill else min(begin + step, length)
        yield begin, end
        begin = end


# -- comparisons ----------------------------------------------------------------------------------------


def deviation(found: torch.Tensor, expected: torch.Tensor, sigma: float) -> float:
    """Largest absolute difference in units of sigma; NaN stays NaN."""
    return float((found.double() - expected.double()).abs().max()) / sigma


def verify(
    path: Path,
    load: Loader,
    backend: Backend,
    *,
    graph: bool = False,
    tokens_per_step: int = 1,
    divide: Divide = alone,
    target: bool = True,
    drafts: bool = True,
) -> CaseReport:
    """Run one case and compare it by its own tolerance. Of several ranks each compares all of it.

    Args:
        load: gives the model; for a random file the case's own weights.
        divide: gives the ranks; a case with roundings is one rank's alone.
        graph: replay instead of running eagerly; intermediate values are compared in eager runs only.
        tokens_per_step: tokens a request and step after the prompt.
        target, drafts: compare the model itself; compare what its MTP module drafts, where the case has any and
            one rank has all of the model.
    """
    from halma.models.deepseek_v4 import golden_drafts, golden_quantised, golden_random, golden_tiny

    case = CaseFile(path)
    report = CaseReport(path.stem, "shipping" if case.quantised else "exact", graph, tokens_per_step)
    if target:
        if case.random:
            golden_random.compare(case, load, backend, report, divide)
        elif case.quantised:
            golden_quantised.compare(case, load, backend, report)
        else:
            golden_tiny.compare(case, load, backend, report, divide)
    if drafts and divide is alone:
        golden_drafts.compare(case, load, backend, report)
    return report


def mismatches(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Entries that differ."""
    return int((found != expected).sum())


def set_mismatches(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows [.., k] that differ as sets."""
    return int((found.sort(-1).values != expected.sort(-1).values).any(-1).sum())


def sequence(case: CaseFile, prompt: str, prefix: str = "") -> tuple[torch.Tensor, int]:
    """Prompt and all greedy tokens but the last [1, P + n - 1], and P: what is fed to get every logit."""
    ids, tokens = case[f"{prompt}.prompt_ids"], case[f"{prompt}.{prefix}tokens"]
    return torch.cat([ids, tokens[:-1]])[None], len(ids)


def step_rows(logits: torch.Tensor, prompt_len: int, steps: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] that chose the tokens of the given steps, out of [1, L, V]."""
    return logits[0, [prompt_len - 1 + step for step in steps]]
