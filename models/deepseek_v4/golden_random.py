"""Random golden models: logits, tokens and, in eager runs, streams and choices of every layer."""

from __future__ import annotations

from collections import defaultdict

import torch

from halma.hal.backend import Backend
from halma.models.deepseek_v4.golden import (
    EXACT_TOLERANCE,
    LONGEST_CHUNK,
    CaseFile,
    CaseReport,
    Check,
    Divide,
    Loader,
    deviation,
    force,
    mismatches,
    set_mismatches,
)


class _Trace:
    """Collects tapped values by layer; a layer's choices come before its streams."""

    def __init__(self) -> None:
        self.streams: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.routes: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._layer = 0

    def __call__(self, name: str, value: torch.Tensor) -> None:
        if name == "route_ids":
            self._pending = value.to("cpu", copy=True)
        elif name.endswith(".streams"):
            layer = int(name.removeprefix("layer").removesuffix(".streams"))
            self.streams[layer].append(value.to("cpu", copy=True))
            self.routes[layer].append(self._pending)


def compare(case: CaseFile, load: Loader, backend: Backend, report: CaseReport, divide: Divide) -> None:
    """Prefill the prompt, feed the expected tokens, compare logits, tokens, streams and expert choices."""
    model = load("exact", torch.float32)
    ids, tokens = case["input.ids"], case["out.tokens"]
    prompt = ids.shape[1]
    fed = torch.cat([ids, tokens[:, :-1]], dim=1)
    trace = None if report.graph else _Trace()
    rows = len(fed) * max(LONGEST_CHUNK, report.tokens_per_step)
    with divide(model.config, rows, torch.float32) as ranks:
        logits = force(
            backend,
            model,
            fed,
            prefill=prompt,
            step=report.tokens_per_step,
            graph=report.graph,
            arithmetic="exact",
            carrier=torch.float32,
            ranks=ranks,
            tap=trace,
        )
    sigma = float(case.metadata["sigma"])
    report.checks += [
        Check("prefill logits", deviation(logits[:, :prompt], case["out.prefill_logits"], sigma), EXACT_TOLERANCE),
        Check("decode logits", deviation(logits[:, prompt - 1 :], case["out.step_logits"], sigma), EXACT_TOLERANCE),
        Check("tokens", mismatches(logits[:, prompt - 1 :].argmax(-1), tokens), 0, f"of {tokens.numel()}"),
    ]
    if trace is not None:
        _compare_trace(case, trace, model.config.num_hidden_layers, ids.shape, report)


def _compare_trace(case: CaseFile, trace: _Trace, layers: int, shape: torch.Size, report: CaseReport) -> None:
    """The prompt's streams and routes; those of later steps show in the logits."""
    requests, prompt = shape
    worst, wrong, seen = 0.0, 0, 0
    for layer in range(layers):
        expected = case[f"trace.prefill.layer{layer}.streams"]
        found = _prompt_rows(trace.streams[layer], requests, prompt)
        worst = max(worst, deviation(found, expected, float(expected.std())))
        routes = case[f"trace.prefill.layer{layer}.route_idx"].view(requests, prompt, -1)
        wrong += set_mismatches(_prompt_rows(trace.routes[layer], requests, prompt), routes)
        seen += requests * prompt
    report.checks += [
        Check("prefill streams", worst, EXACT_TOLERANCE, f"{layers} layers"),
        Check("expert choices", wrong, 0, f"of {seen} rows"),
    ]


def _prompt_rows(parts: list[torch.Tensor], requests: int, prompt: int) -> torch.Tensor:
    """Tapped chunks [R * T, ...] joined to [R, prompt, ...]; the last chunk's padding is cut off."""
    joined = torch.cat([part.view(requests, -1, *part.shape[1:]) for part in parts], dim=1)
    return joined[:, :prompt]
