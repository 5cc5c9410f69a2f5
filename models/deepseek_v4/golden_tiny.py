"""The tiny checkpoint in exact arithmetic: greedy text of four prompts."""

from __future__ import annotations

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
    sequence,
    step_rows,
)


def compare(case: CaseFile, load: Loader, backend: Backend, report: CaseReport, divide: Divide) -> None:
    """Every prompt: logits where recorded, and the greedy token of every step."""
    model = load("exact", torch.float32)
    facts = case.json("facts")
    with divide(model.config, max(LONGEST_CHUNK, report.tokens_per_step), torch.float32) as ranks:
        for prompt in case.prompts():
            fed, length = sequence(case, prompt)
            logits = force(
                backend,
                model,
                fed,
                prefill=length,
                step=report.tokens_per_step,
                graph=report.graph,
                arithmetic="exact",
                carrier=torch.float32,
                ranks=ranks,
            )
            steps, tokens = case[f"{prompt}.logit_steps"].tolist(), case[f"{prompt}.tokens"]
            found = step_rows(logits, length, steps)
            report.checks += [
                Check(
                    f"{prompt}: logits",
                    deviation(found, case[f"{prompt}.logits"], facts[prompt]["sigma"]),
                    EXACT_TOLERANCE,
                    f"{len(steps)} steps",
                ),
                Check(
                    f"{prompt}: tokens",
                    mismatches(logits[0, length - 1 :].argmax(-1), tokens),
                    0,
                    f"of {len(tokens)}",
                ),
            ]
