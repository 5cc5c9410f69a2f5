"""The MTP module: proposes tokens that the target then verifies.

Its one layer has a window of its own, which must hold a row for every token of a request, made of the target's
streams [model.py, MTPBlock]. Drafts run on the module's own streams meanwhile, and their rows are overwritten once
the true ones are known. Shapes as in :mod:`halma.models.deepseek_v4.program`.
"""

from __future__ import annotations

import torch

from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.boundary import boundary
from halma.models.deepseek_v4.program import Step, StepInputs, V4Model, block, choose, embedded, logits_of, prepare


def push_and_draft(
    model: V4Model,
    inputs: StepInputs,
    descriptor: Descriptor,
    streams: torch.Tensor,
    start: torch.Tensor,
    following: torch.Tensor,
    fed: torch.Tensor,
    drafts: int,
) -> None:
    """Give the module the tokens that a step committed, then let it propose the ``drafts`` that come next.

    Args:
        streams: [M, n, D] behind the target's last layer; the module's own afterwards.
        start: [R]; where the step's first token stands.
        following: [R, T]; the token behind each of the step's.
        fed: [R]; how many of a request's rows were committed. Where it is 0 nothing changes.
        drafts: how many tokens to propose, 0 to K; those of the step before are dropped in any case.
    """
    ops, slot, state = model.ops, inputs.slot, model.state.draft
    assert state is not None
    kinds = model.config.mtp_layers[:1]
    with model.workspace.scope("push"):
        module(model, prepare(model, descriptor, following, start, fed, slot, kinds=kinds), streams)
        if model.tap is not None:
            model.tap("mtp.streams", streams)
        ops.drop_drafts(fed, slot, state.tokens)
        if not drafts:
            return
        own = ops.last_rows(streams, fed, descriptor.query_len)
        newest = ops.next_position(start, fed)  # where each request's newest token stands
        for number in range(drafts):
            with model.workspace.scope("draft"):
                if number:
                    token, place = ops.draft_at(slot, state.tokens, number - 1), ops.later(newest, number - 1)
                    module(model, prepare(model, descriptor, token, place, fed, slot, kinds=kinds), own)
                weights = model.weights.mtp[0]
                logits = logits_of(model, own, weights.hc_head, weights.norm)
                if model.tap is not None:
                    model.tap("mtp.logits", logits)
                chosen = choose(model, inputs, descriptor, logits, ops.later(newest, number + 1))
                ops.store_draft(chosen, fed, slot, state.tokens, number)


def module(model: V4Model, step: Step, streams: torch.Tensor) -> None:
    """One pass: streams [P, n, D] of each position, in place, and the token behind it -> the module's own.

    The embedding of position 0 is used like any other, as the published code does.
    """
    ops, config, weights, state = model.ops, model.config, model.weights.mtp[0], model.state.draft
    assert state is not None
    with model.workspace.scope("module"):
        token = ops.rms_norm(embedded(model, step), weights.enorm, config.rms_norm_eps)
        before = ops.rms_norm(streams, weights.hnorm, config.rms_norm_eps)
        mixed = ops.linear(before.view(-1, config.hidden_size), weights.h_proj)
        ops.add_to_streams(mixed.view(streams.shape), ops.linear(token, weights.e_proj), out=streams)
        between = boundary(model, streams)
        layer = weights.block
        x = between.enter((layer.hc_attn, layer.attn_norm))
        block(model, x, between, layer, config.mtp_layers[0], state.layer, step, None)
        if between.streams is not streams:  # as a whole they are made elsewhere
            streams.copy_(between.streams)
