"""What operands of dispatch and combine must be; said before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from halma.hal.collectives.exchange_contract import ExchangeCall, Step
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.operands import check_like, check_tensor
from halma.hal.errors import CollectiveError


def check_outgoing(
    geometry: Geometry, call: ExchangeCall, device: torch.device, x: Any, ids: Any = None, weights: Any = None
) -> int:
    """How many tokens a dispatch sends; without ids and weights where it is by a kept layout.

    Raises:
        CollectiveError: a bound or tensors that it cannot have.
    """
    carrier, acc = (getattr(torch, name) for name in (geometry.given, geometry.accumulator))
    if isinstance(call.bound, bool) or not 1 <= call.bound <= geometry.max_tokens:
        raise CollectiveError(
            "a dispatch cannot have this bound",
            asked=f"bound={call.bound!r}",
            found=f"the exchange was opened for 1 to {geometry.max_tokens} tokens a rank",
        )
    for name, value in (("x", x), *(() if call.kept else (("ids", ids), ("weights", weights)))):
        check_tensor(Step.DISPATCH, name, value, device)
    count = x.shape[0] if x.dim() == 2 else 0
    if count > call.bound:
        raise CollectiveError(
            "more tokens than were declared",
            asked=f"{count} tokens",
            found=f"this call's bound is {call.bound}, and the exchange's max_tokens {geometry.max_tokens}",
            do="a larger bound on every rank, or several calls; nothing was sent",
        )
    check_like(Step.DISPATCH, "x", x, (count, geometry.hidden), carrier)
    if call.kept:
        return count
    check_like(Step.DISPATCH, "ids", ids, (count, geometry.top_k), torch.int64)
    check_like(Step.DISPATCH, "weights", weights, (count, geometry.top_k), acc)
    return count


def check_alone(host: bool, others: Iterable[object]) -> None:
    """That a dispatch by a kept layout has x and nothing else.

    Raises:
        CollectiveError: it has.
    """
    if host or any(one is not None for one in others):
        raise CollectiveError(
            "a dispatch by a kept layout takes x alone",
            found="ids, weights, bound, keep or host_counts beside layout",
            do="dispatch(x, layout=...): routing and bound are the layout's",
        )


def check_returning(geometry: Geometry, device: torch.device, slots: int, count: int, parts: Any, out: Any) -> None:
    """``parts`` [slots, hidden] and ``out`` [count, hidden] of a combine.

    Raises:
        CollectiveError: they are not.
    """
    carrier, acc = (getattr(torch, name) for name in (geometry.given, geometry.accumulator))
    for name, value, rows in (("parts", parts, slots), ("out", out, count)):
        check_tensor(Step.COMBINE, name, value, device)
        if value.dtype not in (carrier, acc):
            raise CollectiveError(f"combine cannot take {name}", found=str(value.dtype), do=f"{carrier} or {acc}")
        check_like(Step.COMBINE, name, value, (rows, geometry.hidden), value.dtype)


def check_ids(ids: torch.Tensor, experts: int) -> None:
    """Read ids on the host, and refuse those that are no expert.

    Raises:
        CollectiveError: with the smallest and the largest.
    """
    if ids.numel() and not (-1 <= int(ids.min()) and int(ids.max()) < experts):
        raise CollectiveError(
            "ids of experts that there are not",
            asked=f"ids from {int(ids.min())} to {int(ids.max())}",
            found=f"experts 0..{experts - 1}; -1 for none",
            do="look at the router, or at a hash table of another model; nothing was sent",
        )
