"""What a model drafts, beside the golden cases: drafts, their logits, and how many of them a step accepts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops
from halma.hal.graph.descriptor import Descriptor
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.golden import (
    EXACT_TOLERANCE,
    CaseFile,
    CaseModel,
    CaseReport,
    Check,
    Loader,
    deviation,
    mismatches,
)
from halma.models.deepseek_v4.program import logits_of
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import Stepper, Text, occupy

DRAFTS = 4
"""Of every case that has any."""


class _Watch:
    """Keeps what the module makes in eager runs: its streams of a step, and the logits of each draft."""

    def __init__(self) -> None:
        self.streams: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, name: str, value: torch.Tensor) -> None:
        if name == "mtp.streams":
            self.streams.append(value.clone())
        elif name == "mtp.logits":
            self.logits.append(value.to("cpu", copy=True))

    def taken(self) -> torch.Tensor:
        """Logits [R, DRAFTS, V] of the drafts since it was last asked."""
        made, self.logits = self.logits, []
        return torch.stack(made[-DRAFTS:], 1)


def compare(case: CaseFile, load: Loader, backend: Backend, report: CaseReport) -> None:
    """Nothing, where the case holds no drafts."""
    if case.random and "mtp.after_prompt.draft_tokens" in case.names:
        _random(case, load("exact", torch.float32), backend, report)
    elif case.quantised:
        # Roundings make every fp32 program go its own way: drafts are compared with a float64 carrier.
        _drafted(case, load("shipping", torch.float64), backend, report, torch.float64, "f64.")
    elif not case.random:
        model = load("exact", torch.float32)
        _drafted(case, model, backend, report, torch.float32)
        _accepted(case, model, backend, report)


def _runner(
    model: CaseModel,
    backend: Backend,
    report: CaseReport,
    *,
    requests: int,
    context: int,
    watch: _Watch | None,
    carrier: torch.dtype = torch.float32,
    chunk: int = 64,
    lengths: Sequence[int] = (DRAFTS,),
) -> V4Runner:
    options = RunnerOptions(
        max_requests=requests,
        max_context=context,
        chunk=chunk,
        mtp=DRAFTS,
        mtp_lengths=tuple(lengths),
        graph=report.graph,
        arithmetic=report.arithmetic,
        batches=(requests,),
    )
    return V4Runner(model.config, model.weights, backend, options, carrier=carrier, tap=watch)


# -- the tiny checkpoint --------------------------------------------------------------------------------


def _drafted(
    case: CaseFile, model: CaseModel, backend: Backend, report: CaseReport, carrier: torch.dtype, prefix: str = ""
) -> None:
    """All prompts in one batch, one token a step, so that the module drafts behind every one of them."""
    prompts, watch = case.prompts(), None if report.graph else _Watch()
    texts = _texts(case, prompts, prefix)
    context = max(len(text.prompt) + text.max_tokens for text in texts)
    runner = _runner(model, backend, report, requests=len(texts), context=context, watch=watch, carrier=carrier)
    runner.prepare()
    wrong, steps = dict.fromkeys(prompts, 0), len(case[f"{prompts[0]}.{prefix}tokens"])
    logits: dict[str, list[torch.Tensor]] = defaultdict(list)
    assert runner.model.state.draft is not None
    try:
        stepper = Stepper(runner, texts)
        stepper.prefill()
        for step in range(steps):
            if step:
                stepper.step(DRAFTS, most=1)
            drafts = runner.model.state.draft.tokens[1:].cpu()
            made = None if watch is None or not step else watch.taken()  # prompts are fed one by one
            for number, prompt in enumerate(prompts):
                wrong[prompt] += mismatches(drafts[number], case[f"{prompt}.{prefix}draft_tokens"][step])
                if made is not None:
                    logits[prompt].append(made[number])
    finally:
        runner.close()
    word = "float64 " if prefix else ""
    for text, prompt in zip(texts, prompts, strict=True):
        other = mismatches(torch.tensor(text.tokens[:steps]), case[f"{prompt}.{prefix}tokens"])
        report.checks += [
            Check(f"{prompt}: {word}tokens with MTP", other, 0, f"of {steps}"),
            Check(f"{prompt}: {word}drafts", wrong[prompt], 0, f"of {steps * DRAFTS}"),
        ]
        if logits and not prefix:
            _draft_logits(case, prompt, logits[prompt], report)


def _draft_logits(case: CaseFile, prompt: str, found: list[torch.Tensor], report: CaseReport) -> None:
    """``found`` [1..][DRAFTS, V]: behind the steps 1, 2, ..."""
    kept = [(row, step) for row, step in enumerate(case[f"{prompt}.draft_logit_steps"].tolist()) if step]
    expected = case[f"{prompt}.draft_logits"][[row for row, _ in kept]]
    made = torch.stack([found[step - 1] for _, step in kept])
    sigma = case.json("facts")[prompt]["sigma"]
    report.checks.append(
        Check(f"{prompt}: draft logits", deviation(made, expected, sigma), EXACT_TOLERANCE, f"{len(kept)} steps")
    )


def _texts(case: CaseFile, prompts: Sequence[str], prefix: str = "") -> list[Text]:
    """Room for every draft behind the recorded tokens: the last ones are judged like any other."""
    return [
        Text(case[f"{prompt}.prompt_ids"].tolist(), len(case[f"{prompt}.{prefix}tokens"]) + DRAFTS + 1)
        for prompt in prompts
    ]


def accepted_runs(runner: V4Runner, case: CaseFile, drafts: int, copies: int = 1) -> list[Text]:
    """Decode the case's prompts with ``drafts`` drafts a step, each until its recorded tokens are there.

    Args:
        copies: how often each prompt is in the batch; the texts come copy after copy.
    """
    texts = _texts(case, case.prompts() * copies)
    stepper = Stepper(runner, texts)
    stepper.prefill()
    length = len(case[f"{case.prompts()[0]}.tokens"])
    ended: set[int] = set()
    while len(ended) < len(texts):
        stepper.step(drafts)
        for number, text in enumerate(texts):
            if number not in ended and len(text.tokens) >= length:
                ended.add(number)
                text.max_tokens = len(text.tokens)  # the host is done with it: it takes no part in the next step
    return texts


def _accepted(case: CaseFile, model: CaseModel, backend: Backend, report: CaseReport) -> None:
    """Speculative decoding with 1 .. DRAFTS drafts: the same tokens, the recorded number accepted in every step."""
    lengths = range(1, DRAFTS + 1)
    context = max(len(text.prompt) + text.max_tokens for text in _texts(case, case.prompts()))
    runner = _runner(model, backend, report, requests=len(case.prompts()), context=context, watch=None, lengths=lengths)
    runner.prepare()
    recorded = case.json("acceptance")
    try:
        for drafts in lengths:
            texts = accepted_runs(runner, case, drafts)
            wrong = other = 0
            for prompt, text in zip(case.prompts(), texts, strict=True):
                tokens, runs = case[f"{prompt}.tokens"], case[f"{prompt}.spec_accepted_k{drafts}"].tolist()
                other += mismatches(torch.tensor(text.tokens[: len(tokens)]), tokens)
                wrong += text.accepted != runs
            steps = sum(len(text.accepted) for text in texts)
            mean = 1 + sum(sum(text.accepted) for text in texts) / steps
            expected = recorded[f"k={drafts}"]["tokens_per_verify_step"]
            report.checks += [
                Check(f"{drafts} drafts: tokens", other, 0, f"{len(texts)} prompts"),
                Check(f"{drafts} drafts: accepted", wrong, 0, f"prompts that differ, in {steps} steps"),
                Check(f"{drafts} drafts: tokens a step", abs(mean - expected), 5e-4, f"{mean:.3f}"),
            ]
    finally:
        runner.close()


# -- random models --------------------------------------------------------------------------------------


def _random(case: CaseFile, model: CaseModel, backend: Backend, report: CaseReport) -> None:
    """The prompt in one chunk, then token after token: drafts behind either, and what the module made on the way."""
    ids, tokens = case["input.ids"], case["out.tokens"]
    requests, length = ids.shape
    context = length + tokens.shape[1] + DRAFTS
    watch = None if report.graph else _Watch()
    runner = _runner(model, backend, report, requests=requests, context=context, watch=watch, chunk=length)
    shape = Descriptor("prefill", requests, length, next(c for c in runner.capacities if c >= length), "greedy")
    runner.prepare([*runner.descriptors(), shape])
    state, slots = runner.model.state, range(1, requests + 1)
    assert state.draft is not None
    try:
        occupy(runner, requests)
        runner.inputs.fill(slots, [length] * requests, tokens=ids.reshape(-1))
        runner.step(shape)
        _compare_drafts(case, "after_prompt", runner, watch, tokens[:, 0], report)
        other = 0
        for step in range(1, tokens.shape[1]):
            runner.inputs.fill(slots, [1] * requests)
            runner.step(runner.verify_descriptor(requests, DRAFTS, context, "greedy"))
            other += mismatches(state.last_token[1:].cpu(), tokens[:, step])
        report.checks.append(Check("tokens with MTP", other, 0, f"of {tokens.numel() - requests}"))
        _compare_drafts(case, "after_text", runner, watch, tokens[:, -1], report)
    finally:
        runner.close()


def _compare_drafts(
    case: CaseFile, place: str, runner: V4Runner, watch: _Watch | None, newest: torch.Tensor, report: CaseReport
) -> None:
    """Drafts behind ``newest`` [R] and, of an eager run, their logits and those of every position before."""
    state = runner.model.state
    assert state.draft is not None
    wrong = mismatches(state.draft.tokens[1:].cpu(), case[f"mtp.{place}.draft_tokens"])
    wrong += mismatches(state.last_token[1:].cpu(), newest)
    report.checks.append(Check(f"{place}: drafts", wrong, 0, f"of {newest.numel() * DRAFTS}"))
    if watch is None:
        return
    sigma = float(case.metadata["sigma"])
    for name, found in (("draft_logits", watch.taken()), ("prefill_logits", _logits_of_rows(runner, watch.streams))):
        off = deviation(found, case[f"mtp.{place}.{name}"], sigma)
        report.checks.append(
            Check(f"{place}: {name.replace('_', ' ')}", off, EXACT_TOLERANCE, f"{found.shape[1]} rows")
        )


def _logits_of_rows(runner: V4Runner, streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """The module's logits [R, L, V]: a prompt's rows first, then of each step the one row that was kept."""
    requests, weights = runner.options.max_requests, runner.model.weights.mtp[0]
    workspace = Workspace(runner.backend.device.torch_device)
    model = replace(runner.model, workspace=workspace, ops=Ops(workspace, backend=runner.backend.name))
    rows = [
        part.view(requests, -1, *part.shape[1:])[:, : None if number == 0 else 1] for number, part in enumerate(streams)
    ]
    joined = torch.cat(rows, 1)
    with torch.no_grad():
        logits = logits_of(model, joined.flatten(0, 1).contiguous(), weights.hc_head, weights.norm)
    return logits.view(requests, joined.shape[1], -1).cpu()
