"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed before and after every sublayer.

fn, base and scale are stored as the checkpoint has them: rows ``pre`` (n), ``post`` (n), ``comb`` (n*n).
"""

from __future__ import annotations

from math import isqrt

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from halma.ops.linear import row_product
from halma.ops.norm import inverse_rms
from halma.ops.quant import accumulator, widened


def _check_mixing(streams: torch.Tensor, outputs: int, fn: torch.Tensor, base: torch.Tensor, scales: int) -> None:
    _, count, width = streams.shape
    dtype = accumulator(streams.dtype)
    if (fn.dtype, *fn.shape) != (dtype, outputs, count * width) or (base.dtype, *base.shape) != (dtype, outputs):
        raise DispatchError(
            "the mixing weights do not fit the streams",
            asked=f"fn {dtype} {[outputs, count * width]}, base {[outputs]}, {scales} scales",
            found=f"fn {fn.dtype} {list(fn.shape)}, base {base.dtype} {list(base.shape)}",
            do="load fn, base and scale in the accumulator type of the carrier",
        )


def _pre_outputs(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Spec, ...]:
    rows, count, width = streams.shape
    if iterations < 1:
        raise DispatchError("hc_pre cannot do 0 iterations", asked=f"iterations={iterations}", do="ask for 1 or more")
    _check_mixing(streams, 2 * count + count * count, fn, base, 3)
    dtype = accumulator(streams.dtype)
    return Spec((rows, width), streams.dtype), Spec((rows, count), dtype), Spec((rows, count, count), dtype)


def _read_outputs(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, *_: object, **__: object
) -> tuple[Spec, ...]:
    rows, count, width = streams.shape
    _check_mixing(streams, 2 * count + count * count, fn, base, 3)
    return Spec((rows, width), streams.dtype), Spec((rows, count + count * count), accumulator(streams.dtype))


def _gate_outputs(
    mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, hc_eps: float, iterations: int
) -> tuple[Spec, ...]:
    rows, numbers = mixes.shape
    count = isqrt(numbers)  # the root of n + n*n, rounded down
    if iterations < 1:
        raise DispatchError("hc_gates cannot do 0 iterations", asked=f"iterations={iterations}", do="ask for 1 or more")
    if count * (count + 1) != numbers or (base.dtype, *base.shape) != (mixes.dtype, numbers + count):
        raise DispatchError(
            "the mixes do not fit their weights",
            asked="mixes [M, n + n*n], base [2n + n*n] of the same dtype",
            found=f"mixes {mixes.dtype} {list(mixes.shape)}, base {base.dtype} {list(base.shape)}",
        )
    return Spec((rows, count), mixes.dtype), Spec((rows, count, count), mixes.dtype)


def _head_output(streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, *_: object, **__: object) -> Spec:
    _check_mixing(streams, streams.shape[1], fn, base, 1)
    return Spec((streams.shape[0], streams.shape[2]), streams.dtype)


def _post_output(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> Spec:
    rows, count, width = streams.shape
    if (y.dtype, *y.shape) != (streams.dtype, rows, width) or comb.shape != (rows, count, count):
        raise DispatchError(
            "hc_post: these do not fit",
            asked=f"streams {streams.dtype} {[rows, count, width]}",
            found=f"y {y.dtype} {list(y.shape)}, comb {list(comb.shape)}",
        )
    return like(streams)


@op("hc_pre", out=_pre_outputs)
def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """What enters a sublayer, and how its result goes back.

    Args:
        streams: [M, n, D], contiguous.
        fn, base, scale: [2n + n*n, n*D], [2n + n*n], [3]; fp32 (fp64 for fp64 streams).
        rms_eps: of the unweighted norm over all n*D channels.
        hc_eps: added to pre, to the softmax and to every sum that divides.
        iterations: Sinkhorn rounds: the columns once, then ``iterations - 1`` times rows and columns.

    Returns x [M, D] in the carrier, post [M, n] and comb [M, n, n] in the accumulator type; ``hc_post`` applies
    comb with its first index summed.
    """
    x, post, comb = out
    rows, count, _ = streams.shape
    wide = widened(streams, ws)
    mixes = _mixes(wide, fn, rms_eps, ws)
    gates = _uncoalesced(rows, 2 * count, wide.dtype, ws)
    pre = gates[:, :count]
    logits = ws.take((rows, count, count), wide.dtype)
    torch.addcmul(base[:count], mixes[:, :count], scale[0:1], out=pre)
    torch.addcmul(base[count : 2 * count], mixes[:, count : 2 * count], scale[1:2], out=gates[:, count:])
    torch.addcmul(base[2 * count :], mixes[:, 2 * count :], scale[2:3], out=logits.view(rows, -1))
    gates.sigmoid_()
    torch.mul(gates[:, count:], 2.0, out=post)
    _weighted_sum(pre.add_(hc_eps), wide, x, ws)
    _sinkhorn(logits, hc_eps, iterations, comb, ws)


@op("hc_read", out=_read_outputs)
def hc_read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """The first half of ``hc_pre``: x [M, D], and the mixes [M, n + n*n] that ``hc_gates`` makes post and comb of."""
    x, raw = out
    rows, count, _ = streams.shape
    wide = widened(streams, ws)
    mixes = _mixes(wide, fn, rms_eps, ws)
    raw.copy_(mixes[:, count:])
    pre = _uncoalesced(rows, count, wide.dtype, ws)
    torch.addcmul(base[:count], mixes[:, :count], scale[0:1], out=pre)
    _weighted_sum(pre.sigmoid_().add_(hc_eps), wide, x, ws)


@op("hc_gates", out=_gate_outputs)
def hc_gates(
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    hc_eps: float,
    iterations: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """The second half of ``hc_pre``: raw mixes [M, n + n*n] -> post [M, n], comb [M, n, n]."""
    post, comb = out
    rows, count = post.shape
    gates = _uncoalesced(rows, count, mixes.dtype, ws)
    logits = ws.take((rows, count, count), mixes.dtype)
    torch.addcmul(base[count : 2 * count], mixes[:, :count], scale[1:2], out=gates)
    torch.addcmul(base[2 * count :], mixes[:, count:], scale[2:3], out=logits.view(rows, -1))
    torch.mul(gates.sigmoid_(), 2.0, out=post)
    _sinkhorn(logits, hc_eps, iterations, comb, ws)


def _uncoalesced(rows: int, width: int, dtype: torch.dtype, ws: Workspace) -> torch.Tensor:
    """Scratch [rows, width] with a gap behind each row, so that torch loops over rows one at a time.

    Without it elementwise kernels run over all rows in vectors and end with scalar code, whose ``exp`` has other
    bits: a row's sigmoid then depends on how many rows there are (seen at 8 rows of 8).
    """
    return ws.take((rows, width + 1), dtype)[:, :width]


def _mixes(streams: torch.Tensor, fn: torch.Tensor, rms_eps: float, ws: Workspace) -> torch.Tensor:
    """streams [M, n, D] -> [M, rows of fn]: fn applied to the normalised, flattened streams."""
    rows, count, width = streams.shape
    flat = streams.view(rows, count * width)
    inverse = inverse_rms(flat, rms_eps, ws)
    mixes = ws.take((rows, fn.shape[0]), streams.dtype)
    row_product(flat, fn, mixes, ws)
    return mixes.mul_(inverse)


def _weighted_sum(weights: torch.Tensor, streams: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
    """weights [M, n], streams [M, n, D] (accumulator) -> out [M, D] in any carrier."""
    result = out if out.dtype == streams.dtype else ws.take(out.shape, streams.dtype)
    torch.bmm(weights.unsqueeze(1), streams, out=result.unsqueeze(1))
    if result is not out:
        out.copy_(result)


def _sinkhorn(logits: torch.Tensor, eps: float, iterations: int, out: torch.Tensor, ws: Workspace) -> None:
    """softmax over the last axis plus eps, then columns, rows, columns, ..: each divided by its sum plus eps.

    The matrix itself is not touched: it stays diag(a) S diag(b), and dividing rows by ``a (S b) + eps`` turns
    1/a into ``S b + eps * (1/a)``. So a half round is a tiny product with eps folded in and a reciprocal of n
    numbers: two calls of ATen where sum, add and division of the matrix are three (20 rounds, 8 times a token
    in a model of four layers).
    """
    rows, count, _ = logits.shape
    start = ws.take(logits.shape, logits.dtype)
    torch.softmax(logits, -1, out=start)
    start.add_(eps)
    ones = ws.take((3, rows, count, 1), logits.dtype).fill_(1.0)
    over_a, over_b, a = ones[0], ones[1], ones[2]
    b = ws.take((rows, count, 1), logits.dtype)
    turned = start.transpose(1, 2)
    baddbmm, reciprocal = torch.baddbmm, torch.reciprocal
    for turn in range(iterations):
        if turn:
            baddbmm(over_a, start, b, beta=eps, out=over_a)
            reciprocal(over_a, out=a)
        baddbmm(over_b, turned, a, beta=eps, out=over_b)
        reciprocal(over_b, out=b)
    torch.mul(start, a, out=out).mul_(b.transpose(1, 2))


@op("hc_post", out=_post_output)
def hc_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """y [M, D], streams [M, n, D], post [M, n], comb [M, n, n] -> [M, n, D].

    Stream k becomes ``post[k] * y + sum_j comb[j, k] * streams[j]``, summed in the accumulator type.
    """
    wide, addend = widened(streams, ws), widened(y, ws)
    result = out if out.dtype == wide.dtype else ws.take(out.shape, wide.dtype)
    torch.bmm(comb.transpose(1, 2), wide, out=result)
    result.addcmul_(post.unsqueeze(2), addend.unsqueeze(1))
    if result is not out:
        out.copy_(result)


@op("hc_head", out=_head_output)
def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """streams [M, n, D] -> [M, D]: the sum that ends the model; fn [n, n*D], base [n], scale [1] or scalar."""
    wide = widened(streams, ws)
    mixes = _mixes(wide, fn, rms_eps, ws)
    weights = _uncoalesced(mixes.shape[0], mixes.shape[1], mixes.dtype, ws)
    torch.addcmul(base, mixes, scale, out=weights)
    _weighted_sum(weights.sigmoid_().add_(hc_eps), wide, out, ws)
