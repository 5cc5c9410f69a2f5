"""The routes ``host`` of ``hc_pre`` and ``hc_post``: the 24 numbers of a token are mixed in Python, Sinkhorn unrolled.

Twenty Sinkhorn rounds on a 4 x 4 matrix are 79 calls of ATen, 170 us; on Python's floats they take 30 us. Those
are fp64, where the order of operations alone decides the bits, so many rows can go through numpy instead, in
the same order, and give the same bits as one (K7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import Array, HostArrays
from halma.ops.host.linear import row_products
from halma.ops.host.norm import root_mean_square
from halma.ops.quant import accumulator

STREAMS = 4
_MANY = 9
"""Rows from which numpy is faster: 30 us a row here against about 300 us for any number there."""

_STEEP = 700.0
"""exp beyond it leaves fp64; a sigmoid is 0 or 1 there."""


def four_streams(call: Call) -> str | None:
    """Requirement: what the unrolled loop is written for, and nothing it could divide by zero."""
    count = call["streams"].shape[1]
    if count != STREAMS:
        return f"hc_mult is {count}, it is unrolled for {STREAMS}"
    if call["rms_eps"] <= 0 or call["hc_eps"] <= 0:
        return "an eps is zero, and Python refuses to divide by zero"
    return None


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
) -> Callable[[], None]:
    """See ``hc_pre`` in :mod:`halma.ops.hyper_connection`."""
    x, post, comb = out
    rows, count, width = streams.shape
    dtype = accumulator(streams.dtype)
    wide = streams if streams.dtype is dtype else ws.take(streams.shape, dtype)
    result = x if x.dtype is dtype else ws.take(x.shape, dtype)
    flat = wide.view(rows, count * width)
    squares, root = ws.take(flat.shape, dtype), ws.take((rows, 1), dtype)
    mixes, pre = ws.take((rows, fn.shape[0]), dtype), ws.take((rows, count), dtype)
    multiply = row_products(flat, fn, mixes, ws)
    arrays = HostArrays(flat, squares, root, mixes, base, scale.view(3), pre, post, wide, result)
    choose = _Sinkhorn(comb, hc_eps, iterations, ws)

    def launch() -> None:
        if wide is not streams:
            wide.copy_(streams)
        source, scratch, roots, mixed, bases, scales, pre_rows, post_rows, stream_rows, sums = arrays()
        multiply()
        with np.errstate(all="ignore"):  # padding rows hold anything
            root_mean_square(source, rms_eps, scratch, roots)
        offsets, (s_pre, s_post, s_comb) = bases.tolist(), scales.tolist()
        factors = [s_pre] * 4 + [s_post] * 4 + [s_comb] * 16
        matrices: list[list[float]] = []
        for row, (values, (length,)) in enumerate(zip(mixed.tolist(), roots.tolist(), strict=True)):
            logits = [v / length * f + b for v, f, b in zip(values, factors, offsets, strict=True)]
            pre_rows[row] = [_sigmoid(z) + hc_eps for z in logits[:4]]
            post_rows[row] = [2.0 * _sigmoid(z) for z in logits[4:8]]
            matrices.append(_softmax_rows(logits[8:], hc_eps))
        choose(matrices)
        with np.errstate(all="ignore"):
            for weights, parts, total in zip(pre_rows, stream_rows, sums, strict=True):
                np.dot(weights, parts, total)
        if result is not x:
            x.copy_(result)

    return launch


def hc_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    """See ``hc_post`` in :mod:`halma.ops.hyper_connection`; a token is one product of its own (K7)."""
    dtype = accumulator(streams.dtype)
    given = (y, streams)
    wide = [t if t.dtype is dtype else ws.take(t.shape, dtype) for t in given]
    result = out if out.dtype is dtype else ws.take(out.shape, dtype)
    scratch = ws.take(streams.shape[1:], dtype)
    arrays = HostArrays(*wide, post.unsqueeze(2), comb.transpose(1, 2), result, scratch)

    def launch() -> None:
        for source, target in zip(given, wide, strict=True):
            if source is not target:
                target.copy_(source)
        addends, parts, weights, mixes, results, space = arrays()
        with np.errstate(all="ignore"):
            for addend, part, weight, mix, total in zip(addends, parts, weights, mixes, results, strict=True):
                np.dot(mix, part, total)
                np.multiply(weight, addend, out=space)
                np.add(total, space, out=total)
        if result is not out:
            out.copy_(result)

    return launch


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(_STEEP if -z > _STEEP else -z))


def _softmax_rows(logits: Sequence[float], eps: float) -> list[float]:
    """16 logits, row by row -> softmax of each row plus eps."""
    found: list[float] = []
    for start in (0, 4, 8, 12):
        row = logits[start : start + 4]
        top = max(row)
        powers = [math.exp(z - top) for z in row]
        total = sum(powers)
        found += [p / total + eps for p in powers]
    return found


class _Sinkhorn:
    """Divides matrices by their column sums, row sums, column sums .. into ``out`` [M, 4, 4].

    As in the reference the matrix stays ``diag(a) S diag(b)``, and a half round renews a or b alone.
    """

    def __init__(self, out: torch.Tensor, eps: float, iterations: int, ws: Workspace) -> None:
        rows = out.shape[0]
        self._many = rows >= _MANY
        self._eps, self._iterations = eps, iterations
        shapes = ((rows, 4, 4), (rows, 4, 4), (rows, 4), (rows, 4), (rows, 4), (rows, 4)) if self._many else ()
        self._arrays = HostArrays(out.view(rows, 16), *[ws.take(shape, torch.float64) for shape in shapes])

    def __call__(self, matrices: list[list[float]]) -> None:
        target, *scratch = self._arrays()
        if self._many:
            with np.errstate(all="ignore"):
                scratch[0].reshape(-1, 16)[:] = matrices
                target[:] = _sinkhorn_many(scratch, self._eps, self._iterations).reshape(-1, 16)
            return
        for row, matrix in enumerate(matrices):
            target[row] = _sinkhorn_one(matrix, self._eps, self._iterations)


def _sinkhorn_one(matrix: Sequence[float], eps: float, iterations: int) -> list[float]:
    s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33 = matrix
    a0 = a1 = a2 = a3 = over_a0 = over_a1 = over_a2 = over_a3 = 1.0
    over_b0 = over_b1 = over_b2 = over_b3 = b0 = b1 = b2 = b3 = 1.0
    for turn in range(iterations):
        if turn:
            over_a0 = s00 * b0 + s01 * b1 + s02 * b2 + s03 * b3 + eps * over_a0
            over_a1 = s10 * b0 + s11 * b1 + s12 * b2 + s13 * b3 + eps * over_a1
            over_a2 = s20 * b0 + s21 * b1 + s22 * b2 + s23 * b3 + eps * over_a2
            over_a3 = s30 * b0 + s31 * b1 + s32 * b2 + s33 * b3 + eps * over_a3
            a0, a1, a2, a3 = 1.0 / over_a0, 1.0 / over_a1, 1.0 / over_a2, 1.0 / over_a3
        over_b0 = s00 * a0 + s10 * a1 + s20 * a2 + s30 * a3 + eps * over_b0
        over_b1 = s01 * a0 + s11 * a1 + s21 * a2 + s31 * a3 + eps * over_b1
        over_b2 = s02 * a0 + s12 * a1 + s22 * a2 + s32 * a3 + eps * over_b2
        over_b3 = s03 * a0 + s13 * a1 + s23 * a2 + s33 * a3 + eps * over_b3
        b0, b1, b2, b3 = 1.0 / over_b0, 1.0 / over_b1, 1.0 / over_b2, 1.0 / over_b3
    return [
        s00 * a0 * b0, s01 * a0 * b1, s02 * a0 * b2, s03 * a0 * b3,
        s10 * a1 * b0, s11 * a1 * b1, s12 * a1 * b2, s13 * a1 * b3,
        s20 * a2 * b0, s21 * a2 * b1, s22 * a2 * b2, s23 * a2 * b3,
        s30 * a3 * b0, s31 * a3 * b1, s32 * a3 * b2, s33 * a3 * b3,
    ]  # fmt: skip


def _sinkhorn_many(scratch: Sequence[Array], eps: float, iterations: int) -> Array:
    """The same sums in the same order, all rows at a time; scratch[0] holds the matrices [M, 4, 4]."""
    start, product, over_a, over_b, a, b = scratch
    for ones in (over_a, over_b, a):
        ones.fill(1.0)

    by_column = [product[:, :, k] for k in range(4)]
    by_row = [product[:, k, :] for k in range(4)]

    def half_round(parts: Sequence[Array], over: Array, result: Array) -> None:
        np.add(parts[0], parts[1], out=result)
        np.add(result, parts[2], out=result)
        np.add(result, parts[3], out=result)
        np.multiply(over, eps, out=over)
        np.add(result, over, out=over)
        np.divide(1.0, over, out=result)

    for turn in range(iterations):
        if turn:
            np.multiply(start, b[:, None, :], out=product)
            half_round(by_column, over_a, a)
        np.multiply(start, a[:, :, None], out=product)
        half_round(by_row, over_b, b)
    np.multiply(start, a[:, :, None], out=product)
    return np.multiply(product, b[:, None, :], out=product)
