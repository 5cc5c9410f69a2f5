"""Choosing the next token."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.workspace import Workspace
from halma.ops.quant import widened

# The finaliser of David Stafford's "Mix13" for 64 bits, and the golden-ratio step that spreads a counter;
# int64 wraps, so the constants are written as what they are in two's complement.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_32 = (1 << 32) - 1
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest fp32 below 1: log1p of its negative stays finite."""


@op("argmax_tokens", out=lambda logits: Spec((logits.shape[0],), torch.int64))
def argmax_tokens(logits: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """logits [R, V] -> out [R] int64: the largest logit, among equals the lower token id. Always within [0, V)."""
    torch.argmax(logits, 1, out=out)


@op("next_position", out=lambda start, count: Spec(tuple(start.shape), torch.int64))
def next_position(start: torch.Tensor, count: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """start [R], count [R] int64 -> out [R] int64: the position of the token that this step chooses."""
    torch.add(start, count, out=out)


def _mix(state: torch.Tensor, scratch: torch.Tensor) -> None:
    """Scramble int64 counters in place. The shifts carry the sign along, which costs one bit of 64, not the mixing."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(state, shift, out=scratch)
        state.bitwise_xor_(scratch)
        state.mul_(factor)
    torch.bitwise_right_shift(state, 31, out=scratch)
    state.bitwise_xor_(scratch)


def _gumbel(
    seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor, noise: torch.Tensor, ws: Workspace
) -> None:
    """noise[r, j] = a Gumbel variate that is a function of (seed[r], position[r], token[r, j]) and nothing else."""
    rows, width = token.shape
    key = ws.take((rows, 1), torch.int64)
    key_scratch = ws.take((rows, 1), torch.int64)
    key.copy_(seed.view(rows, 1))
    key.add_(1)  # 0 is a fixed point of the mixer
    key.mul_(_STEP)
    _mix(key, key_scratch)
    key.add_(position.view(rows, 1))
    key.mul_(_STEP)
    _mix(key, key_scratch)
    counter = ws.take((rows, width), torch.int64)
    scratch = ws.take((rows, width), torch.int64)
    torch.mul(token, _STEP, out=counter)
    counter.add_(key)
    _mix(counter, scratch)
    counter.bitwise_and_(_LOW_32)
    _gumbel_of(counter, noise)


def _gumbel_of(words: torch.Tensor, noise: torch.Tensor) -> None:
    """words in [0, 2^32) -> finite Gumbel variates."""
    # -log(-log(1 - v)) with v = (h + 1/2) / 2^32: small v, the interesting tail, keeps all its bits in fp32.
    noise.copy_(words)
    noise.add_(0.5)
    noise.mul_(2.0**-32)
    noise.clamp_(max=_BELOW_ONE)
    noise.neg_()
    noise.log1p_()
    noise.neg_()
    noise.log_()
    noise.neg_()


@op(
    "sample_tokens",
    out=lambda logits, temperature, top_p, seed, position: Spec((logits.shape[0],), torch.int64),
)
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """Draw one token a row from softmax(logits / temperature), cut to its nucleus.

    The noise is a hash of (seed, position, token id), so a request draws the same tokens at any batch size,
    in any row (M10). The draw is the largest of logit / temperature + Gumbel noise.

    Args:
        logits: [R, V] floating; -inf excludes a token.
        temperature: [R] floating; 0 is greedy, ties to the lower token id.
        top_p: [R] floating in (0, 1]; keeps the fewest most probable tokens whose probabilities reach it,
            always at least one, and all of them at 1.
        seed: [R] int64.
        position: [R] int64; of the token being drawn.
        out: [R] int64, always within [0, V).
    """
    rows, width = logits.shape
    source = widened(logits, ws)
    acc = source.dtype
    scores = ws.take((rows, width), acc)
    order = ws.take((rows, width), torch.int64)
    torch.sort(source, stable=True, dim=1, descending=True, out=(scores, order))
    heat = ws.take((rows, 1), acc)
    drawn = ws.take((rows, 1), torch.bool)
    one = ws.take((1, 1), acc)
    best = ws.take((rows, 1), acc)
    heat.copy_(temperature.view(rows, 1))
    one.fill_(1.0)
    torch.gt(heat, 0.0, out=drawn)
    torch.where(drawn, heat, one, out=heat)
    best.copy_(scores[:, :1])
    scores.sub_(best)
    scores.div_(heat)
    _cut_to_nucleus(scores, top_p, ws)
    noise = ws.take((rows, width), acc)
    _gumbel(seed, position, order, noise, ws)
    heat.copy_(drawn)
    noise.mul_(heat)  # a greedy row has no noise
    scores.add_(noise)
    place = ws.take((rows, 1), torch.int64)
    torch.argmax(scores, 1, keepdim=True, out=place)
    torch.gather(order, 1, place, out=out.view(rows, 1))


def _cut_to_nucleus(scores: torch.Tensor, top_p: torch.Tensor, ws: Workspace) -> None:
    """scores [R, V], falling, best = 0: those behind the nucleus become -inf."""
    rows, width = scores.shape
    if width == 1:
        return
    mass = ws.take((rows, width), scores.dtype)
    limit = ws.take((rows, 1), scores.dtype)
    whole = ws.take((rows, 1), torch.bool)
    nothing = ws.take((1, 1), scores.dtype)
    torch.exp(scores, out=mass)
    # A running sum is taken row by row; a plain sum of one long row is split between threads (K7).
    mass.cumsum_(1)
    limit.copy_(top_p.view(rows, 1))
    torch.ge(limit, 1.0, out=whole)
    limit.mul_(mass[:, -1:])
    nothing.fill_(float("inf"))
    torch.where(whole, nothing, limit, out=limit)  # the sum of 129280 terms rounds: 1 must still mean all
    outside = ws.take((rows, width - 1), torch.bool)
    torch.ge(mass[:, :-1], limit, out=outside)
    scores[:, 1:].masked_fill_(outside, float("-inf"))
