"""Rows of a step: which token, position and slot each row stands for, and the first and last rows of the model."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.weight import PLAIN, Weight


def _row_outputs(tokens: torch.Tensor, *_: object, **__: object) -> tuple[Spec, ...]:
    spec = Spec((tokens.numel(),), torch.int64)
    return spec, spec, spec


@op("step_rows", out=_row_outputs)
def step_rows(
    tokens: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """tokens [R, T], start, count, slot [R], all i64 -> tokens, positions and slots of the M = R*T rows.

    Row ``r*T + j`` is token j of request r, at position ``start[r] + j``. Past ``count[r]`` the row is padding:
    token 0 at position 0 of slot 0, the null slot, whatever the inputs hold there.
    """
    row_tokens, positions, row_slot = (part.view(tokens.shape) for part in out)
    step = ws.take((tokens.shape[1],), torch.int64)
    torch.arange(tokens.shape[1], out=step)
    real = torch.lt(step, count.unsqueeze(1), out=ws.take(tokens.shape, torch.bool))
    torch.mul(tokens, real, out=row_tokens)
    torch.add(start.unsqueeze(1), step, out=positions).mul_(real)
    torch.mul(slot.unsqueeze(1), real, out=row_slot)


def _embed_output(tokens: torch.Tensor, weight: Weight, first: int | None = None) -> Spec:
    if weight.format != PLAIN:
        raise DispatchError("an embedding is stored plain", asked="embed", found=weight.plan_key)
    return Spec((tokens.shape[0], weight.shape[1]), weight.data.dtype)


@op("embed", out=_embed_output)
def embed(tokens: torch.Tensor, weight: Weight, first: int | None = None, *, out: torch.Tensor, ws: Workspace) -> None:
    """tokens [M] i64 -> [M, D]: rows of a plain weight, in its dtype.

    Args:
        first: the token of the weight's first row, where it holds a part of the vocabulary; tokens that it does not
            hold, wherever they lie, give zeros: the sum over all parts is the embedding, to the bit.

    Raises:
        DispatchError: the weight is quantised (found when planning).
    """
    if first is None:
        torch.index_select(weight.data, 0, tokens, out=out)
        return
    last = weight.shape[0] - 1
    row = torch.sub(tokens, first, out=ws.take(tuple(tokens.shape), torch.int64))
    outside = torch.lt(row, 0, out=ws.take(tuple(tokens.shape), torch.bool))
    behind = torch.gt(row, last, out=ws.take(tuple(tokens.shape), torch.bool))
    outside.logical_or_(behind)
    row.clamp_(0, last)
    torch.index_select(weight.data, 0, row, out=out)
    out.masked_fill_(outside.unsqueeze(1), 0.0)


@op("expand_streams", out=lambda x, count: Spec((x.shape[0], count, x.shape[1]), x.dtype))
def expand_streams(x: torch.Tensor, count: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [M, D] -> [M, count, D]: every stream starts as the embedding."""
    out.copy_(x.unsqueeze(1))


@op("last_rows", out=lambda x, count, query_len: Spec((count.shape[0], *x.shape[1:]), x.dtype))
def last_rows(x: torch.Tensor, count: torch.Tensor, query_len: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [R*T, ..], count [R] i64 -> [R, ..]: the row of each request's last real token (its first, if it has none)."""
    if query_len == 1:
        out.copy_(x)
        return
    requests = count.shape[0]
    before = ws.take((requests,), torch.int64)
    torch.arange(-1, requests * query_len - 1, query_len, out=before)
    index = torch.clamp_min(count, 1, out=ws.take((requests,), torch.int64)).add_(before)
    torch.index_select(x, 0, index, out=out)
