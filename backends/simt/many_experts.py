"""Route ``simt_many`` of ``grouped_ffn``: launches of experts_many.cu, for e2m1 weights and many rows an expert.

Tokens are staged before each product, in an order of the kernels' own: rounded, widened to bf16, every expert's
together. Four launches, driven by the routing on the device; each waits for the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from halma.backends.simt import many_sources
from halma.backends.simt.experts import (
    address_of,
    bits_of,
    fits_rows,
    in_order,
    need_contiguous,
    pair_of,
    weight_addresses,
)
from halma.backends.simt.many_sources import FROM_ROWS, MOST_EXPERTS, SIZES, THREADS, Size, size_of, why_not_sizes
from halma.backends.simt.sources import Target
from halma.hal.backend import Backend
from halma.hal.errors import HalmaError
from halma.hal.registry import default_registry
from halma.hal.routes import Call
from halma.hal.workspace import Workspace

_ARCH: Final = "sm_90"
_FORMAT: Final = "fp4_block32"
_STAGE_BLOCKS: Final = 6
"""Blocks a multiprocessor of the kernels that stage: they only wait for memory."""
_ROWS: Final = {torch.bfloat16: "stage_bfloat16", torch.float32: "stage_float32", torch.float8_e4m3fn: "stage_e4m3"}


def fits_many(call: Call) -> str | None:
    """Requirement of ``grouped_ffn``."""
    gate_up, down = call["gate_up"], call["down"]
    if gate_up.format != _FORMAT or down.format != _FORMAT:
        return f"weights are {gate_up.format} and {down.format}, it decodes e2m1"
    if not (gate_up.activation == down.activation == "fp8"):
        return "activations are not rounded, its e2m1 products take e4m3"
    reason = fits_rows(call) or why_not_sizes(down.shape[1], down.shape[2])
    if reason is not None:
        return reason
    if gate_up.shape[0] > MOST_EXPERTS:
        return f"{gate_up.shape[0]} experts, its tables hold {MOST_EXPERTS}"
    return _other_arch(call.backend)


def fits_share(call: Call) -> str | None:
    """Requirement of the route that is taken by itself, beside that of the op."""
    share = call["index"].shape[0] / call["gate_up"].shape[0]
    if share < FROM_ROWS:
        return f"{share:g} slots an expert at most, weights are read at the memory's speed by others below {FROM_ROWS}"
    return None


def _other_arch(backend: str) -> str | None:
    """Why the device of this backend has no products of warp groups, or None."""
    try:
        arch = str(default_registry().select(backend).device.properties().get("arch", "unknown"))
    except HalmaError as error:
        return f"the backend {backend} cannot be opened: {error}"
    return None if arch == _ARCH else f"the device is {arch}, products of warp groups are {_ARCH}a's own"


class ManyKernels:
    """The loaded kernels of one backend and their launches.

    Args:
        backend: whose device and kernel loader they are.
    """

    def __init__(self, backend: Backend) -> None:
        part: Any = backend.kernels
        self._device, self._part = backend.device, part
        self._target = Target.of(backend.kernels, backend.capabilities)
        self._processors = int(backend.device.properties()["multiprocessors"])
        self._loaded: dict[Size, Any] = {}

    def _kernel(self, size: Size, entry: str) -> Any:
        found = self._loaded.get(size)
        if found is None:
            source = many_sources.many_source(size, self._target)
            found = self._loaded[size] = self._part.load(source, many_sources.ENTRIES)
        return found[entry]

    def staged(
        self,
        size: Size,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        index: torch.Tensor | None,
        factors: torch.Tensor | None,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[], None]:
        """x [R, K] bf16 or e4m3 by ``index``, or [C, K] fp32 times ``factors`` [C] -> out, ``staged_bytes`` of them."""
        width, experts = x.shape[1], counts.numel()
        args = [x.data_ptr(), address_of(scales), address_of(index), address_of(factors)]
        args += [counts.data_ptr(), offsets.data_ptr(), out.data_ptr(), pair_of(width, experts)]
        keep = (x, scales, index, factors, counts, offsets, out)
        return self._launch(self._kernel(size, _ROWS[x.dtype]), _STAGE_BLOCKS * self._processors, 256, args, keep)

    def product(
        self,
        way: str,
        size: Size,
        weight: Any,
        layer: torch.Tensor | None,
        x: torch.Tensor,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        limit: float,
    ) -> Callable[[], None]:
        """``up`` or ``down`` on staged tokens ``x``."""
        experts, n, k = weight.shape
        options = experts | int(out.dtype is torch.bfloat16) << 16 | bits_of(limit) << 32
        args = [*weight_addresses(weight, layer), x.data_ptr(), counts.data_ptr(), offsets.data_ptr()]
        args += [out.data_ptr(), address_of(layer), pair_of(k, n), options]
        keep = (weight, layer, x, counts, offsets, out)
        kernel = self._kernel(size, f"{way}_many")
        return self._launch(kernel, self._processors, THREADS, args, keep, size.shared_bytes)

    def _launch(
        self, kernel: Any, grid: int, block: int, args: Sequence[int], keep: Any, shared: int = 0
    ) -> Callable[[], None]:
        launch, device = self._part.launch, self._device

        def run(kept: Any = keep) -> None:  # a graph keeps the closure, and with it what the addresses belong to
            launch(kernel, grid, block, args, stream=device.current_stream(), shared_bytes=shared, dependent=True)

        return run


_kernels: dict[str, ManyKernels] = {}


def kernels_of(name: str) -> ManyKernels:
    """The kernels of the backend called ``name``, which the process's registry made."""
    found = _kernels.get(name)
    if found is None:
        found = _kernels[name] = ManyKernels(default_registry().select(name))
    return found


def many_launches(
    kernels: ManyKernels,
    most: int | None,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    slot_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    layer: torch.Tensor | None,
    out: torch.Tensor,
    ws: Workspace,
) -> list[Callable[[], None]]:
    """The launches in their order: tokens staged, ``up``, its result staged, ``down``.

    Args:
        most: tokens of an item, one of :data:`SIZES`; None: by the mean of slots an expert.
    """
    (experts, width, inner), slots = down.shape, index.shape[0]
    size = size_of(slots, experts) if most is None else {size.most: size for size in SIZES}[most]
    # One place for both products' tokens: those of the first are not needed once it has ended.
    tokens = ws.take((many_sources.staged_bytes(slots, experts, max(width, inner)),), torch.uint8)
    hidden = ws.take((slots, inner), torch.float32)
    lists = (counts, offsets)
    return [
        kernels.staged(size, rows, scales, index, None, *lists, tokens),
        kernels.product("up", size, gate_up, layer, tokens, *lists, hidden, limit),
        kernels.staged(size, hidden, None, None, slot_weights, *lists, tokens),
        kernels.product("down", size, down, layer, tokens, *lists, out, limit),
    ]


def many_route(
    name: str,
    most: int | None,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    index: torch.Tensor,
    slot_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    layer: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("grouped_ffn", rows, scales, index, slot_weights, counts, offsets, layer)
    given = (rows, scales, index, slot_weights, counts, offsets, gate_up, down, limit, layer, out, ws)
    return in_order(*many_launches(kernels_of(name), most, *given))
