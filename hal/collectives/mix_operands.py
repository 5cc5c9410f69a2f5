"""What the tensors of an all-reduce into mixed residual streams must be; said before anything has happened."""

from __future__ import annotations

from itertools import combinations
from math import isfinite
from typing import Any, Final

import torch

from halma.hal.collectives.contract import Call, Kind, Operands, StreamMix
from halma.hal.collectives.mixing import HANDED, MIXES, STREAMS
from halma.hal.collectives.operands import check_apart, check_eps, check_like, check_tensor, name_of
from halma.hal.errors import CollectiveError

KIND: Final = Kind.ALL_REDUCE_STREAMS
MOST_ITERATIONS: Final = 1 << 16


def stream_call(rows: int, row_length: int, dtype: torch.dtype, detail: str = "", descriptor: str = "") -> Call:
    """The call that sums ``rows`` rows into their streams."""
    nbytes = rows * row_length * dtype.itemsize
    return Call(KIND, nbytes, name_of(dtype), detail=detail, descriptor=descriptor, row_length=row_length)


def stream_operands(
    x: torch.Tensor, mix: StreamMix, weight: torch.Tensor, eps: Any, out: torch.Tensor, device: torch.device
) -> tuple[Operands, str]:
    """Operands, in place on the streams and their mixes, and what of them ranks must have in common.

    Raises:
        CollectiveError: a tensor that cannot be taken or does not fit x; or two share memory, one of which is written.
    """
    eps, hc_eps = check_eps(KIND, eps), _check_numbers(mix)
    read = {name: getattr(mix, name) for name in ("base", "scale", "fn", "next_base", "next_scale")}
    read["weight"] = weight
    written = {"x": x, "streams": mix.streams, "mixes": mix.mixes, "out": out}
    for name, tensor in (*written.items(), *read.items()):
        check_tensor(KIND, name, tensor, device)
    if x.dim() != 2 or not x.shape[-1] or not x.is_floating_point():
        raise CollectiveError(
            "all_reduce_streams cannot take x",
            found=f"{name_of(x.dtype)}{list(x.shape)}",
            do="give it rows [M, D] of floating numbers",
        )
    rows, width = x.shape
    wide = torch.float32
    fits: tuple[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype], ...] = (
        ("streams", mix.streams, (rows, STREAMS, width), x.dtype),
        ("mixes", mix.mixes, (rows, HANDED), wide),
        ("out", out, (rows, width), x.dtype),
        ("base", mix.base, (MIXES,), wide),
        ("scale", mix.scale, (3,), wide),
        ("fn", mix.fn, (MIXES, STREAMS * width), wide),
        ("next_base", mix.next_base, (MIXES,), wide),
        ("next_scale", mix.next_scale, (3,), wide),
        ("weight", weight, (width,), wide if weight.dtype == wide else x.dtype),
    )
    for name, tensor, shape, dtype in fits:
        check_like(KIND, name, tensor, shape, dtype)
    for one, two in combinations(written.items(), 2):
        check_apart(KIND, one, two)
    for one in written.items():
        for two in read.items():
            check_apart(KIND, one, two)
    detail = (
        f"rows of {width}, eps {eps!r}, mixed with eps {hc_eps!r}, {mix.iterations} rounds, "
        f"weight {name_of(weight.dtype)}"
    )
    return Operands(x, mix.streams, weight=weight, norm_out=out, eps=eps, row_length=width, mix=mix), detail


def _check_numbers(mix: StreamMix) -> float:
    given: tuple[Any, Any] = mix.hc_eps, mix.iterations
    hc_eps, rounds = given
    good = isinstance(hc_eps, float) and isfinite(hc_eps) and hc_eps > 0  # it divides
    if not good or isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= MOST_ITERATIONS:
        raise CollectiveError(
            "all_reduce_streams cannot mix with these",
            found=f"hc_eps={hc_eps!r}, iterations={rounds!r}",
            do=f"hc_eps a finite float above 0, iterations 1 to {MOST_ITERATIONS}",
        )
    return hc_eps
