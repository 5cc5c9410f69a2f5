"""The steps of a model: each is one graph, and leaves the inputs of the next one on the device.

Shapes as in :mod:`halma.models.deepseek_v4.program`: R requests with T tokens each, V tokens in the vocabulary, N
ranks. How many tokens of a request are real, and how many its step emits, only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.draft import push_and_draft
from halma.models.deepseek_v4.program import (
    Step,
    StepInputs,
    V4Model,
    backbone,
    choose,
    prepare,
    target_logits,
)


def decode_step(model: V4Model, inputs: StepInputs, descriptor: Descriptor) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed each request's newest token, choose the next and commit it. Returns (next [R], logits [R, V/N])."""
    ops, state = model.ops, model.state
    tokens, start, count = ops.decode_inputs(inputs.slot, inputs.count, state.last_token, state.lengths, state.end)
    step = prepare(model, descriptor, tokens, start, count, inputs.slot)
    logits = target_logits(model, backbone(model, step))
    chosen = choose(model, inputs, descriptor, logits, ops.next_position(start, count))
    commit(model, step, chosen, emitted=count, fed=count)
    return chosen, logits


def prefill_step(model: V4Model, inputs: StepInputs, descriptor: Descriptor) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed ``inputs.tokens`` and commit what follows: the prompt's next token, or the choice behind its end.

    The variants ``greedy`` and ``sample`` choose behind each request's last real token; ``all`` returns the greedy
    choice and the logits of every row, [M] and [M, V/N]. With MTP it drafts too.
    """
    ops, state, count = model.ops, model.state, inputs.count
    _, start, _ = ops.decode_inputs(inputs.slot, count, state.last_token, state.lengths, state.end)
    step = prepare(model, descriptor, inputs.tokens, start, count, inputs.slot)
    streams = backbone(model, step)
    every = descriptor.variant == "all"
    logits = target_logits(model, streams if every else ops.last_rows(streams, count, descriptor.query_len))
    chosen = choose(model, inputs, descriptor, logits, ops.next_position(start, count))
    last = ops.last_rows(chosen, count, descriptor.query_len) if every else chosen
    newest, emitted = ops.prompt_choice(last, inputs.after, count)
    commit(model, step, newest, emitted=emitted, fed=count)
    if state.draft is not None:
        following = ops.shift_tokens(inputs.tokens, count, newest)
        push_and_draft(model, inputs, descriptor, streams, start, following, count, state.plan.drafts)
    return chosen, logits


def verify_step(model: V4Model, inputs: StepInputs, descriptor: Descriptor) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed each request's newest token and its k = T - 1 drafts, keep those that are right, draft k more.

    Returns (choices [R, T], emitted [R]): the first ``emitted`` choices of a request are its new tokens, one for each
    token that stays fed. What the others left behind is overwritten before it is read.
    """
    choices, emitted, start, streams = verify(model, inputs, descriptor)
    push_and_draft(model, inputs, descriptor, streams, start, choices, emitted, descriptor.query_len - 1)
    return choices, emitted


def verify(
    model: V4Model, inputs: StepInputs, descriptor: Descriptor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's part of :func:`verify_step`.

    Returns choices [R, T], emitted [R], where each request's first token stands [R], and the streams [M, n, D].
    """
    ops, state = model.ops, model.state
    assert state.draft is not None
    tokens, start, count = ops.decode_inputs(
        inputs.slot,
        inputs.count,
        state.last_token,
        state.lengths,
        state.end,
        state.draft.tokens,
        descriptor.query_len,
    )
    step = prepare(model, descriptor, tokens, start, count, inputs.slot)
    streams = backbone(model, step)
    choices = choose(model, inputs, descriptor, target_logits(model, streams), ops.later(step.positions, 1))
    emitted = ops.accept_run(choices, tokens, count, inputs.slot, state.stops)
    commit(model, step, choices, emitted=emitted, fed=emitted)
    return choices.view(tokens.shape), emitted, start, streams


def commit(model: V4Model, step: Step, choices: torch.Tensor, *, emitted: torch.Tensor, fed: torch.Tensor) -> None:
    """Make ``fed`` [R] tokens part of each request, and the first ``emitted`` [R] of its choices [R*C] known."""
    ops, state = model.ops, model.state
    ops.commit_run(choices, emitted, fed, step.start, step.slot, state.last_token, state.lengths, state.ring)
    ops.end_runs(emitted, step.slot, state.last_token, state.lengths, state.stops, state.end)
    ops.log_step(emitted, state.log, state.step)


STEPS: dict[str, Callable[[V4Model, StepInputs, Descriptor], tuple[torch.Tensor, torch.Tensor]]] = {
    "decode": decode_step,
    "prefill": prefill_step,
    "verify": verify_step,
}
"""By the descriptor's role."""
