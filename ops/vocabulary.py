"""Choices over a vocabulary that is divided among ranks: rank r holds the logits of V/N tokens from r * V/N on."""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace


def _own_best_output(logits: torch.Tensor, first: int) -> Spec:
    exact = 1 << (53 if logits.dtype is torch.float64 else 24)
    if logits.dtype not in (torch.float32, torch.float64) or first + logits.shape[1] > exact:
        raise DispatchError(
            "own_best: a token's id would not be exact as a number beside its logit",
            asked=f"tokens {first} to {first + logits.shape[1] - 1} in {str(logits.dtype).removeprefix('torch.')}",
            found=f"the dtype counts to {exact:,}" if logits.is_floating_point() else "not a floating dtype",
            do="give logits in float32 or float64",
        )
    return Spec((logits.shape[0], 2), logits.dtype)


@op("own_best", out=_own_best_output)
def own_best(logits: torch.Tensor, first: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """logits [R, V/N] -> [R, 2]: the largest, and its token's id as a number: all that other ranks need to know.

    Args:
        logits: float32 or float64; of tokens ``first`` on.
        out: among equals the lower token id, as ``argmax_tokens`` has it.

    Raises:
        DispatchError: ids too large to be numbers of the dtype (found when planning).
    """
    rows = logits.shape[0]
    place = ws.take((rows, 1), torch.int64)
    value = ws.take((rows, 1), logits.dtype)
    torch.argmax(logits, 1, keepdim=True, out=place)
    torch.gather(logits, 1, place, out=value)
    out[:, :1].copy_(value)
    place.add_(first)
    out[:, 1:].copy_(place)


@op("best_of_all", out=lambda best, vocabulary: Spec((best.shape[1],), torch.int64))
def best_of_all(best: torch.Tensor, vocabulary: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """What ``own_best`` found on every rank, [N, R, 2] -> out [R] int64: the token with the largest logit.

    Equal logits go to the lower rank, so to the lower token id. Always within [0, vocabulary), also where a failed
    exchange left NaN: a token is an index into tables.
    """
    ranks, rows, _ = best.shape
    values = ws.take((rows, ranks), best.dtype)
    ids = ws.take((rows, ranks), best.dtype)
    place = ws.take((rows, 1), torch.int64)
    chosen = ws.take((rows, 1), best.dtype)
    values.copy_(best[..., 0].t())
    ids.copy_(best[..., 1].t())
    torch.argmax(values, 1, keepdim=True, out=place)
    torch.gather(ids, 1, place, out=chosen)
    chosen.nan_to_num_(0.0)
    chosen.clamp_(0, vocabulary - 1)
    out.view(rows, 1).copy_(chosen)


@op("join_columns", out=lambda parts: Spec((parts.shape[1], parts.shape[0] * parts.shape[2]), parts.dtype))
def join_columns(parts: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """parts [N, R, W] -> out [R, N*W]: every rank's columns, in the order of the ranks."""
    ranks, rows, width = parts.shape
    out.view(rows, ranks, width).copy_(parts.transpose(0, 1))
