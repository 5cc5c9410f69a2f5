"""The route ``host`` of ``rms_norm``: six calls of numpy, 8 us, where the reference needs six of ATen, 20 us."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from halma.hal.routes import Call
from halma.hal.workspace import Workspace
from halma.ops.host.arrays import Array, HostArrays, short
from halma.ops.quant import accumulator


def weight_in_accumulator(call: Call) -> str | None:
    """Requirement: the weight needs no conversion."""
    x, weight = call["x"], call["weight"]
    if weight is not None and weight.dtype is not accumulator(x.dtype):
        return f"the weight is {short(weight.dtype)}, it multiplies {short(accumulator(x.dtype))}"
    return None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor, ws: Workspace
) -> Callable[[], None]:
    """See ``rms_norm`` in :mod:`halma.ops.norm`. numpy sums each row on its own, in pairs (K7)."""
    width = x.shape[-1]
    rows = x.view(-1, width)
    dtype = accumulator(x.dtype)
    wide = rows if x.dtype is dtype else ws.take(rows.shape, dtype)
    result = out.view(rows.shape) if out.dtype is dtype else ws.take(rows.shape, dtype)
    squares, roots = ws.take(rows.shape, dtype), ws.take((rows.shape[0], 1), dtype)
    arrays = HostArrays(wide, squares, roots, result, *(() if weight is None else (weight,)))

    def launch() -> None:
        if wide is not rows:
            wide.copy_(rows)
        source, scratch, root, target, *gain = arrays()
        with np.errstate(all="ignore"):  # padding rows hold anything
            root_mean_square(source, eps, scratch, root)
            np.divide(source, root, out=target)
            if gain:
                np.multiply(target, gain[0], out=target)
        if result.dtype is not out.dtype:
            out.view(rows.shape).copy_(result)

    return launch


def root_mean_square(x: Array, eps: float, squares: Array, out: Array) -> None:
    """x [M, D] -> out [M, 1]: ``sqrt(mean(x^2) + eps)``, with squares [M, D] as scratch."""
    np.multiply(x, x, out=squares)
    np.add.reduce(squares, axis=1, keepdims=True, out=out)
    np.multiply(out, 1.0 / x.shape[1], out=out)
    np.add(out, eps, out=out)
    np.sqrt(out, out=out)
