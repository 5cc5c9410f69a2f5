"""The tiny checkpoint with the official rounding: a ladder from single roundings to whole texts.

1. rounding vectors, bit for bit; 2. layer by layer in fp32 on the recorded streams; 3. a float64 carrier
end to end at 1e-6; 4. fp32 end to end, a smoke test only.
"""

from __future__ import annotations

import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops
from halma.hal.graph.descriptor import Descriptor
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.boundary import boundary
from halma.models.deepseek_v4.golden import (
    CaseFile,
    CaseModel,
    CaseReport,
    Check,
    Loader,
    deviation,
    force,
    mismatches,
    sequence,
    step_rows,
)
from halma.models.deepseek_v4.program import block, prepare
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import occupy
from halma.ops.quant import round_fp4_blocks, round_kv_rows
from halma.ops.weight import FP4_BLOCK

LAYER_TOLERANCE, LAYER_POSITIONS = 1e-5, 28
CARRIER_TOLERANCE = 1e-6
SMOKE_RMS, SMOKE_MAX, SMOKE_TOKENS = 0.06, 1.0, 86


def compare(case: CaseFile, load: Loader, backend: Backend, report: CaseReport) -> None:
    """All four rungs."""
    _roundings(case, backend, report)
    single = load("shipping", torch.float32)
    _layers(case, single, backend, report)
    _texts(case, load("shipping", torch.float64), backend, report, torch.float64)
    _texts(case, single, backend, report, torch.float32)


def _roundings(case: CaseFile, backend: Backend, report: CaseReport) -> None:
    workspace = Workspace(backend.device.torch_device)
    ops = Ops(workspace, backend=backend.name)
    for name, run in (
        ("act128", lambda x, out: ops.round_activation(x, out=out)),
        ("kv_row", lambda x, out: round_kv_rows(x, 64, out, workspace)),
        ("index", lambda x, out: ops.round_index(x, "index_fp4", out=out)),
        ("e2m1", lambda x, out: round_fp4_blocks(x, FP4_BLOCK, out, workspace)),
    ):
        x, expected = case[f"op.{name}.x"].to(workspace.device), case[f"op.{name}.y"]
        found = torch.empty_like(x)
        run(x, found)
        wrong = mismatches(found.cpu().view(torch.int32), expected.view(torch.int32))
        report.checks.append(Check(f"rounding {name}", wrong, 0, f"bits of {expected.numel()} values"))


def _layers(case: CaseFile, model: CaseModel, backend: Backend, report: CaseReport) -> None:
    """Each layer alone on the recorded input streams of 32 positions."""
    device = backend.device.torch_device
    recorded = case["short.f64.streams"].float().to(device)
    fed = torch.cat([case["short.prompt_ids"], case["short.f64.tokens"]]).to(device)
    count = recorded.shape[1]
    options = RunnerOptions(max_requests=1, max_context=count, chunk=count, graph=False, arithmetic="shipping")
    runner = V4Runner(model.config, model.weights, backend, options)
    descriptor = Descriptor("prefill", 1, count, runner.capacities[0], "all")
    occupy(runner, 1)
    runner.inputs.fill([1], [count], tokens=fed[:count])
    v4 = runner.model
    with torch.no_grad():
        inputs = runner.inputs.views(descriptor)
        start = torch.zeros(1, dtype=torch.int64, device=device)
        step = prepare(v4, descriptor, inputs.tokens, start, inputs.count, inputs.slot)
        embedded = model.weights.embed.data[fed[:count]].float()
        before = embedded[:, None].expand(-1, model.config.hc_mult, -1).contiguous()
        for index, (layer, kind) in enumerate(zip(model.weights.layers, model.config.layers, strict=True)):
            expected = recorded[index]
            with v4.workspace.scope("layer"):
                between = boundary(v4, before.clone())
                x = between.enter((layer.hc_attn, layer.attn_norm))
                block(v4, x, between, layer, kind, v4.state.layers[index], step, None)
                streams = between.streams
            error = (streams - expected).abs().amax((1, 2)) / expected.std()
            good = int((error <= LAYER_TOLERANCE).sum())
            report.checks.append(
                Check(f"layer {index}", good, LAYER_POSITIONS, f"of {count} positions within 1e-5", at_least=True)
            )
            before = expected


def _texts(case: CaseFile, model: CaseModel, backend: Backend, report: CaseReport, carrier: torch.dtype) -> None:
    facts = case.json("facts_f64")
    for prompt in case.prompts():
        fed, length = sequence(case, prompt, "f64.")
        logits = force(
            backend,
            model,
            fed,
            prefill=length,
            step=report.tokens_per_step,
            graph=report.graph,
            arithmetic="shipping",
            carrier=carrier,
        )
        tokens, sigma = case[f"{prompt}.f64.tokens"], facts[prompt]["sigma"]
        found = step_rows(logits, length, case[f"{prompt}.f64.logit_steps"].tolist())
        expected = case[f"{prompt}.f64.logits"]
        equal = len(tokens) - mismatches(logits[0, length - 1 :].argmax(-1), tokens)
        if carrier is torch.float64:
            report.checks += [
                Check(f"{prompt}: float64 logits", deviation(found, expected, sigma), CARRIER_TOLERANCE),
                Check(f"{prompt}: float64 tokens", equal, len(tokens), f"of {len(tokens)}", at_least=True),
            ]
        else:
            rms = float((found.double() - expected.double()).pow(2).mean().sqrt()) / sigma
            report.checks += [
                Check(f"{prompt}: float32 rms", rms, SMOKE_RMS, "smoke"),
                Check(f"{prompt}: float32 largest", deviation(found, expected, sigma), SMOKE_MAX, "smoke"),
                Check(f"{prompt}: float32 tokens", equal, SMOKE_TOKENS, f"of {len(tokens)}", at_least=True),
            ]
