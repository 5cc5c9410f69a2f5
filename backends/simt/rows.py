"""Routes ``simt`` of small products, SwiGLU and the rotation: launches of rows.cu, one or two an op.

Results go straight to the buffer that the caller gave: a group of ``grouped_linear`` writes its columns of ``out``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from halma.backends.simt.gemv_tiles import MOST_ROWS, tile_of
from halma.backends.simt.row_sources import ENTRIES, rows_source
from halma.backends.simt.sources import Target
from halma.hal.backend import Backend
from halma.hal.errors import DispatchError
from halma.hal.registry import default_registry
from halma.hal.routes import Call
from halma.hal.workspace import Workspace

_THREADS: Final = 128
_BLOCK: Final = 128
_GROUPS: Final = 16
"""Groups of 128 columns that a block rounds at a time."""
_WAVES: Final = 8
"""Blocks a multiprocessor of the elementwise kernels, which only wait for memory."""


# -- requirements ---------------------------------------------------------------------------------------


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits_weight(weight: Any, rows: int) -> str | None:
    if weight.format != "fp8_block128":
        return f"the weight is {weight.format}, it multiplies fp8_block128"
    if rows > MOST_ROWS:
        return f"{rows} rows, it is for at most {MOST_ROWS}"
    if weight.shape[1] % _BLOCK:
        return f"K = {weight.shape[1]} is no multiple of {_BLOCK}"
    return None


def fits_linear(call: Call) -> str | None:
    """Requirement of ``linear``."""
    x, weight, dtype = call["x"], call["weight"], call["dtype"] or call["x"].dtype
    if x.dtype is not torch.bfloat16 and (weight.activation is None or x.dtype is not torch.float32):
        return f"x is {_short(x.dtype)}, it reads bfloat16" + (" or float32" if weight.activation else "")
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the result is {_short(dtype)}, it writes bfloat16 or float32"
    return _fits_weight(weight, x.shape[0])


def fits_linear_fp8(call: Call) -> str | None:
    """Requirement of ``linear_fp8``."""
    if call["dtype"] not in (torch.bfloat16, torch.float32):
        return f"the result is {_short(call['dtype'])}, it writes bfloat16 or float32"
    return _fits_weight(call["weight"], call["codes"].shape[0])


def fits_grouped(call: Call) -> str | None:
    """Requirement of ``grouped_linear``."""
    x, weight = call["x"], call["weight"]
    if x.dtype is not torch.bfloat16:
        return f"x is {_short(x.dtype)}, it reads bfloat16"
    each = weight.shape[0] // x.shape[1]
    if x.shape[1] > 1 and each % _BLOCK:
        return f"{each} rows of the weight a group, which is no multiple of {_BLOCK}"
    return _fits_weight(weight, x.shape[0])


def fits_swiglu(call: Call) -> str | None:
    """Requirement of ``swiglu``."""
    dtype = call["gate_up"].dtype
    return None if dtype is torch.bfloat16 else f"gate_up is {_short(dtype)}, it reads bfloat16"


def fits_swiglu_fp8(call: Call) -> str | None:
    """Requirement of ``swiglu_fp8``."""
    gate_up = call["gate_up"]
    if gate_up.dtype not in (torch.bfloat16, torch.float16):
        return f"gate_up is {_short(gate_up.dtype)}, it reads bfloat16 or float16"
    inner = gate_up.shape[1] // 2
    return f"rows of {inner} channels, which is no multiple of {_BLOCK}" if inner % _BLOCK else None


def fits_rope(call: Call) -> str | None:
    """Requirement of ``rope``."""
    x, angles = call["x"], call["angles"]
    if x.dtype is not torch.bfloat16 or angles.dtype is not torch.float32:
        return f"x is {_short(x.dtype)} with {_short(angles.dtype)} angles, it turns bfloat16 by float32"
    return f"rows of {x.shape[-1]} channels, an odd number" if x.shape[-1] % 2 else None


# -- the kernels of a backend ---------------------------------------------------------------------------


class RowKernels:
    """The loaded kernels of one backend and their launches."""

    def __init__(self, backend: Backend) -> None:
        self._device, self._part = backend.device, backend.kernels
        properties = backend.device.properties()
        self._arch, self._processors = properties["arch"], int(properties["multiprocessors"])
        self._kernels = self._part.load(rows_source(Target.of(backend.kernels, backend.capabilities)), ENTRIES)

    def product(self, x: torch.Tensor, weight: Any, groups: int, out: torch.Tensor) -> Callable[[], None]:
        """x [M, G*K] bf16, weight [G*N, K] e4m3 -> out [M, G*N] bf16 or fp32."""
        rows, (lines, k) = x.shape[0], weight.shape
        n = lines // groups
        tile, _ = tile_of(self._arch, self._processors, n, k, rows)
        args = [weight.data.data_ptr(), weight.scales.data_ptr(), x.data_ptr(), out.data_ptr()]
        args += [n | k << 32, rows | groups << 32, int(out.dtype is torch.float32)]
        blocks = -(-lines // int(tile.partition("x")[0]))
        return self._launch(f"gemv_{tile}", blocks, args, (x, weight, out))

    def product_of_codes(
        self, codes: torch.Tensor, scales: torch.Tensor, weight: Any, out: torch.Tensor
    ) -> Callable[[], None]:
        """codes [M, K] e4m3 with scales [M, K/128] fp32, weight [N, K] e4m3 -> out [M, N] bf16 or fp32."""
        rows, (n, k) = codes.shape[0], weight.shape
        tile, _ = tile_of(self._arch, self._processors, n, k, rows)
        args = [weight.data.data_ptr(), weight.scales.data_ptr(), codes.data_ptr(), scales.data_ptr(), out.data_ptr()]
        args += [n | k << 32, rows, int(out.dtype is torch.float32)]
        blocks = -(-n // int(tile.partition("x")[0]))
        return self._launch(f"gemv_codes_{tile}", blocks, args, (codes, scales, weight, out))

    def quantised(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """x [M, K] -> out bf16: what a product that rounds its input multiplies, exact in bf16."""
        count = x.numel() // _BLOCK
        args = [x.data_ptr(), out.data_ptr(), count]
        return self._launch(f"quantise_{_short(x.dtype)}", self._waves(-(-count // _GROUPS)), args, (x, out))

    def swiglu(self, gate_up: torch.Tensor, limit: float, out: torch.Tensor) -> Callable[[], None]:
        """See the op."""
        rows, inner = out.shape
        args = [gate_up.data_ptr(), out.data_ptr(), inner, rows, _bits(limit)]
        return self._launch("swiglu_bfloat16", self._waves(-(-out.numel() // _THREADS)), args, (gate_up, out))

    def swiglu_codes(
        self, gate_up: torch.Tensor, limit: float, codes: torch.Tensor, scales: torch.Tensor
    ) -> Callable[[], None]:
        """See the op ``swiglu_fp8``."""
        rows, inner = codes.shape
        args = [gate_up.data_ptr(), codes.data_ptr(), scales.data_ptr(), inner, rows, _bits(limit)]
        name = f"swiglu_fp8_{_short(gate_up.dtype)}"
        return self._launch(name, self._waves(-(-scales.numel() // _GROUPS)), args, (gate_up, codes, scales))

    def rotated(self, x: torch.Tensor, angles: torch.Tensor, inverse: bool) -> Callable[[], None]:
        """See the op ``rope``."""
        rows, pairs, width = angles.shape[0], angles.shape[1], x.shape[-1]
        heads = x.numel() // max(rows * width, 1)
        args = [x.data_ptr(), angles.data_ptr(), heads | width << 32, rows | pairs << 32, int(inverse)]
        return self._launch("rotate_bfloat16", self._waves(-(-rows * heads * pairs // _THREADS)), args, (x, angles))

    def _waves(self, blocks: int) -> int:
        return max(1, min(blocks, _WAVES * self._processors))

    def _launch(self, name: str, grid: int, args: Sequence[int], keep: Any) -> Callable[[], None]:
        launch, device, kernel = self._part.launch, self._device, self._kernels[name]

        def run(kept: Any = keep) -> None:  # a graph keeps the closure, and with it what the addresses belong to
            launch(kernel, max(grid, 1), _THREADS, args, stream=device.current_stream(), dependent=True)

        return run


def _bits(value: float) -> int:
    """Of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


_kernels: dict[str, RowKernels] = {}


def kernels_of(name: str) -> RowKernels:
    """The kernels of the backend called ``name``, which the process's registry made."""
    found = _kernels.get(name)
    if found is None:
        found = _kernels[name] = RowKernels(default_registry().select(name))
    return found


# -- the routes -----------------------------------------------------------------------------------------


def _need_whole(op: str, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % 16):
            raise DispatchError(
                f"the kernels of {op} read contiguous tensors from 16-byte addresses",
                asked=f"{_short(tensor.dtype)}{list(tensor.shape)}",
                found=f"strides {tensor.stride()}, address {tensor.data_ptr():#x}",
                do="give a contiguous tensor: a copy made here would be stale when a graph replays",
            )


def linear_route(
    name: str, x: torch.Tensor, weight: Any, dtype: torch.dtype | None = None, *, out: torch.Tensor, ws: Workspace
) -> Callable[[], None]:
    """``linear``: one launch, or two where the weight wants its input rounded."""
    _need_whole("linear", x, weight.data, out)
    kernels = kernels_of(name)
    if weight.activation is None:
        return kernels.product(x, weight, 1, out)
    rounded = ws.take(tuple(x.shape), torch.bfloat16)
    first, second = kernels.quantised(x, rounded), kernels.product(rounded, weight, 1, out)

    def both() -> None:
        first()
        second()

    return both


def linear_fp8_route(
    name: str, codes: torch.Tensor, scales: torch.Tensor, weight: Any, dtype: torch.dtype, *, out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:  # fmt: skip
    """``linear_fp8``: one launch, for the input is rounded already."""
    _need_whole("linear_fp8", codes, scales, weight.data, out)
    return kernels_of(name).product_of_codes(codes, scales, weight, out)


def grouped_route(name: str, x: torch.Tensor, weight: Any, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    """``grouped_linear``: one launch for all groups; the input is never rounded."""
    _need_whole("grouped_linear", x, weight.data, out)
    return kernels_of(name).product(x, weight, x.shape[1], out)


def swiglu_route(
    name: str, gate_up: torch.Tensor, limit: float, *, out: torch.Tensor, ws: Workspace
) -> Callable[[], None]:
    """``swiglu``: clamp, gate and product in one launch."""
    _need_whole("swiglu", gate_up, out)
    return kernels_of(name).swiglu(gate_up, limit, out)


def swiglu_fp8_route(
    name: str, gate_up: torch.Tensor, limit: float, *, out: tuple[torch.Tensor, torch.Tensor], ws: Workspace
) -> Callable[[], None]:
    """``swiglu_fp8``: clamp, gate, product and both roundings in one launch."""
    _need_whole("swiglu_fp8", gate_up, *out)
    return kernels_of(name).swiglu_codes(gate_up, limit, *out)


def rope_route(
    name: str, x: torch.Tensor, angles: torch.Tensor, inverse: bool = False, *, ws: Workspace
) -> Callable[[], None]:
    """``rope``: every pair of every head side by side, in place."""
    _need_whole("rope", x, angles)
    return kernels_of(name).rotated(x, angles, inverse)
