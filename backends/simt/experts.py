"""Routes ``simt`` of the experts' ops: launches of experts.cu and expert_rows.cu.

Everything is driven by the routing on the device: no host read, grids as large as the device. Launches follow one
another as dependent ones, each waiting for the one before; ``down`` fetches its first weights ahead of that wait.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from halma.backends.simt import expert_sources
from halma.backends.simt.expert_sources import (
    BITS,
    FP4_PAIRS,
    FRAGMENT_LANES,
    MOST_EXPERTS,
    MOST_PAIRS,
    THIN,
    TILINGS,
    Tiling,
    fp4_launch,
    fp4_tiling,
    tiling_of,
    why_not_sizes,
    why_not_wide,
)
from halma.backends.simt.sources import Target
from halma.hal.backend import Backend
from halma.hal.collectives.expert_rows import takes_skipped
from halma.hal.errors import DispatchError, HalmaError
from halma.hal.registry import default_registry
from halma.hal.routes import Call
from halma.hal.workspace import Workspace

FP8_BLOCK: Final = 128
_FORMATS: Final = {"plain": "bf16", "fp8_block128": "e4m3", "fp4_block32": "e2m1"}
_ROUND_BLOCKS: Final = 4
"""Blocks a multiprocessor of the kernels that round and add: they only wait for memory."""


# -- requirements ---------------------------------------------------------------------------------------


def _weights(call: Call) -> str | None:
    gate_up, down = call["gate_up"], call["down"]
    if gate_up.format != down.format:
        return f"gate_up is {gate_up.format} and down {down.format}, it takes one format"
    if gate_up.format == "plain":
        layers = getattr(gate_up, "layers", (gate_up,))
        if layers[0].data.dtype is not torch.bfloat16:
            return f"plain weights are {_short(layers[0].data.dtype)}, it multiplies bfloat16"
        if gate_up.activation or down.activation:
            return "activations are rounded for plain weights, it multiplies them as they are"
    elif not (gate_up.activation == down.activation == "fp8"):
        return f"activations are not rounded, its {_FORMATS[gate_up.format]} products take e4m3"
    experts, _, width = gate_up.shape
    if experts > MOST_EXPERTS:
        return f"{experts} experts, its tables hold {MOST_EXPERTS}"
    return why_not_sizes(BITS[gate_up.format], width, down.shape[2]) or _other_warps(call.backend)


def _other_warps(backend: str) -> str | None:
    """Why the device of this backend cannot hold a product's fragments, or None; of one that cannot be opened nobody
    asks for a product."""
    try:
        width = default_registry().select(backend).capabilities.warp_width
    except HalmaError:
        return None
    if width == FRAGMENT_LANES:
        return None
    return f"warp_width is {width}, fragments of its products lie on warps of {FRAGMENT_LANES} lanes"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fits_ffn(call: Call) -> str | None:
    """Requirement of ``expert_ffn``."""
    x, weights = call["x"], call["weights"]
    if x.dtype is not torch.bfloat16:
        return f"x is {_short(x.dtype)}, it reads bfloat16"
    if weights.dtype is not torch.float32:
        return f"weights are {_short(weights.dtype)}, it sums in float32"
    return _weights(call)


def fits_grouped(call: Call) -> str | None:
    """Requirement of ``grouped_ffn``."""
    return fits_rows(call) or _weights(call)


def fits_rows(call: Call) -> str | None:
    """What of it has nothing to do with the weights' sizes."""
    rows, weights, dtype = call["rows"], call["slot_weights"], call["dtype"]
    if (reason := takes_skipped(call)) is not None:
        return reason
    if rows.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"rows are {_short(rows.dtype)}, it reads bfloat16 or e4m3"
    if rows.dtype is not torch.bfloat16 and call["gate_up"].format == "plain":
        return "the payload is rounded and the weights are plain"
    if weights.dtype is not torch.float32:
        return f"weights of slots are {_short(weights.dtype)}, it sums in float32"
    if dtype not in (None, torch.float32, torch.bfloat16):
        return f"the result is {_short(dtype)}, it writes float32 or bfloat16"
    return None


def fits_wide(call: Call) -> str | None:
    """Requirement of wide items, beside that of the op."""
    if call["down"].format == "fp4_block32":
        return None
    _, width, inner = call["down"].shape
    return why_not_wide(width, inner)


def fits_layout(call: Call) -> str | None:
    """Requirement of ``expert_layout``."""
    if call["weights"].dtype is not torch.float32:
        return f"weights are {_short(call['weights'].dtype)}, it moves float32"
    experts = call["experts"]
    return takes_skipped(call) if experts <= MOST_EXPERTS else f"{experts} experts, its tables hold {MOST_EXPERTS}"


def fits_sum(call: Call) -> str | None:
    """Requirement of ``expert_sum``."""
    parts = call["parts"]
    if parts.dtype is not torch.float32:
        return f"parts are {_short(parts.dtype)}, it adds float32"
    return f"D = {parts.shape[1]} is no multiple of 4" if parts.shape[1] % 4 else None


# -- the kernels of a backend ---------------------------------------------------------------------------


class ExpertKernels:
    """The loaded kernels of one backend and their launches.

    Args:
        backend: whose device and kernel loader they are.
    """

    def __init__(self, backend: Backend) -> None:
        part: Any = backend.kernels
        self._device, self._part = backend.device, part
        self._target = Target.of(backend.kernels, backend.capabilities)
        self._shared: int = part.shared_bytes
        self._processors = int(backend.device.properties()["multiprocessors"])
        self._rows = part.load(expert_sources.rows_source(self._target), expert_sources.ROW_ENTRIES)
        self._products: dict[int, Any] = {}

    def layout(
        self,
        ids: torch.Tensor,
        weights: torch.Tensor,
        first: int,
        experts: int,
        alignment: int,
        out: Sequence[torch.Tensor],
        rounding: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> Callable[[], None]:
        """See ``expert_layout``; ``rounding``: (x [M, K] bf16, its e4m3, its scales), in the same launch."""
        pairs, choices = ids.numel(), max(ids.shape[1], 1)
        args = [t.data_ptr() for t in (ids, weights, *out)]
        args += [pair_of(pairs, choices), pair_of(first, experts), pair_of(alignment, out[0].numel())]
        blocks = 1
        if rounding is None:
            args += [0, 0, 0, 0]
        else:
            x, data, scales = rounding
            args += [x.data_ptr(), data.data_ptr(), scales.data_ptr(), pair_of(*x.shape)]
            blocks += max(1, min(x.numel() // (FP8_BLOCK * 8), self._processors))
        threads = 256 if pairs <= 2048 else 1024
        return self._launch(self._rows["expert_layout"], blocks, threads, args, (ids, weights, *out))

    def rounded(
        self,
        x: torch.Tensor,
        index: torch.Tensor | None,
        offsets: torch.Tensor,
        data: torch.Tensor,
        scales: torch.Tensor,
    ) -> Callable[[], None]:
        """Slots of x [C, K] fp32, or of x[index] bf16, -> data e4m3 [C, K] (as uint8) and scales [C, K/128]."""
        capacity, width = data.shape
        blocks = max(1, min(capacity * width // (FP8_BLOCK * 8), _ROUND_BLOCKS * self._processors))
        kernel = self._rows[f"round_{_short(x.dtype)}"]
        end = offsets.data_ptr() + 4 * (offsets.numel() - 1)
        args = [x.data_ptr(), address_of(index), end, width, data.data_ptr(), scales.data_ptr()]
        return self._launch(kernel, blocks, 256, args, (x, index, offsets, data, scales))

    def sum(self, parts: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """See ``expert_sum``."""
        blocks = max(1, min(-(-out.numel() // 1024), 8 * self._processors))
        args = [
            parts.data_ptr(),
            slots.data_ptr(),
            out.data_ptr(),
            slots.shape[1],
            pair_of(out.shape[1], out.shape[0]),
        ]
        return self._launch(self._rows["expert_sum"], blocks, 256, args, (parts, slots, out))

    def product(
        self,
        way: str,
        tiling: Tiling,
        weight: Any,
        layer: torch.Tensor | None,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        index: torch.Tensor | None,
        slot_weights: torch.Tensor,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        limit: float,
        few: tuple[int, int] | None = None,
    ) -> Callable[[], None]:
        """``up`` or ``down`` of experts.cu.

        With ``few``, (pairs, choices), ``counts`` are ids and ``slot_weights`` the pairs' weights, nobody reads
        ``offsets``, and ``down`` adds a token's choices up.
        """
        bits = BITS[weight.format]
        kernels = self._products.get(bits)
        if kernels is None:
            source = expert_sources.products_source(bits, self._shared, self._target)
            kernels = self._products[bits] = self._part.load(source, expert_sources.product_entries(bits))
        experts, n, k = weight.shape
        options = experts | int(out.dtype is torch.bfloat16) << 16 | bits_of(limit) << 32
        if few:
            options |= few[0] << 17 | few[1] << 24
        args = [*weight_addresses(weight, layer), x.data_ptr(), address_of(scales), address_of(index)]
        args += [slot_weights.data_ptr(), counts.data_ptr(), offsets.data_ptr(), out.data_ptr(), address_of(layer)]
        args += [pair_of(k, n), options]
        keep = (weight, layer, x, scales, index, slot_weights, counts, offsets, out)
        name = tiling.name if few is None else "few"
        if bits == 4:
            slots = slot_weights.numel() if few is None or way == "down" else few[0] // few[1]
            cut = fp4_launch(f"{way}_{name}", slots, experts, k, self._shared)
            args[-1] |= cut.room << 12
            grid = cut.resident * self._processors
            return self._launch(kernels[cut.entry], grid, cut.threads, args, keep, cut.shared_bytes(k))
        shared = tiling.shared_bytes(bits, tiling.stages(bits, self._shared))
        kernel = kernels[f"{way}_{name}" + ("_raw" if bits < 16 and scales is None and few is None else "")]
        return self._launch(kernel, self._processors, 256, args, keep, shared)

    def _launch(
        self, kernel: Any, grid: int, block: int, args: Sequence[int], keep: Any, shared: int = 0
    ) -> Callable[[], None]:
        launch, device = self._part.launch, self._device

        def run(kept: Any = keep) -> None:  # a graph keeps the closure, and with it what the addresses belong to
            launch(kernel, grid, block, args, stream=device.current_stream(), shared_bytes=shared, dependent=True)

        return run


def need_contiguous(op: str, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise DispatchError(
                f"the kernels of {op} read contiguous tensors",
                asked=f"{_short(tensor.dtype)}{list(tensor.shape)}",
                found=f"strides {tensor.stride()}",
                do="give a contiguous tensor: a copy made here would be stale when a graph replays",
            )


def pair_of(low: int, high: int) -> int:
    return low | high << 32


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def weight_addresses(weight: Any, layer: torch.Tensor | None) -> tuple[int, int]:
    if layer is not None:
        return weight.data_addresses.data_ptr(), weight.scale_addresses.data_ptr()
    for tensor in (weight.data, weight.scale):
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % 16):
            raise DispatchError(
                "the experts' kernels read contiguous weights from 16-byte addresses",
                asked=weight.plan_key,
                found=f"strides {tensor.stride()}, address {tensor.data_ptr():#x}",
                do="copy the weight once when loading",
            )
    return weight.data.data_ptr(), address_of(weight.scale)


_kernels: dict[str, ExpertKernels] = {}


def kernels_of(name: str) -> ExpertKernels:
    """The kernels of the backend called ``name``, which the process's registry made."""
    found = _kernels.get(name)
    if found is None:
        found = _kernels[name] = ExpertKernels(default_registry().select(name))
    return found


# -- the routes -----------------------------------------------------------------------------------------


def in_order(*launches: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def layout_route(
    name: str,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    experts: int,
    alignment: int,
    *,
    out: tuple[torch.Tensor, ...],
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("expert_layout", ids, weights)
    return kernels_of(name).layout(ids, weights, first, experts, alignment, out)


def sum_route(
    name: str, parts: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor, ws: Workspace
) -> Callable[[], None]:
    need_contiguous("expert_sum", parts, slots)
    return kernels_of(name).sum(parts, slots, out)


class Products:
    """Both products over one layout of ``slots`` slots: scratch is taken and launches are made by :meth:`launches`.

    Thin items and those of fp4 weights round their tokens themselves; for wide ones of fp8 weights that is a launch of
    its own before each product.
    """

    def __init__(
        self,
        kernels: ExpertKernels,
        tiling: str | None,
        gate_up: Any,
        down: Any,
        layer: torch.Tensor | None,
        slots: int,
    ) -> None:
        experts, width, inner = down.shape
        self._kernels = kernels
        if tiling is not None:
            self._tiling = TILINGS[tiling]
        elif gate_up.format == "fp4_block32":
            self._tiling = TILINGS[fp4_tiling(slots)]
        else:
            self._tiling = tiling_of(slots, experts, width, inner)
        self._gate_up, self._down, self._layer, self._slots = gate_up, down, layer, slots
        self._rounds = gate_up.format == "fp8_block128" and self._tiling is not THIN

    def launches(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        index: torch.Tensor | None,
        slot_weights: torch.Tensor,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        limit: float,
        out: torch.Tensor,
        ws: Workspace,
    ) -> list[Callable[[], None]]:
        """rows [R, D] bf16, or e4m3 with ``scales``; ``index``: slot -> row -> out [slots, D]."""
        found: list[Callable[[], None]] = []
        if scales is None and self._rounds:
            rows, scales, launch = self._rounded(rows, index, offsets, ws)
            index = None
            found.append(launch)
        inner = self._down.shape[2]
        carrier = torch.bfloat16 if self._gate_up.format == "plain" else torch.float32
        hidden, powers = ws.take((self._slots, inner), carrier), None
        rest = (slot_weights, counts, offsets)
        product, tiling, layer = self._kernels.product, self._tiling, self._layer
        found.append(product("up", tiling, self._gate_up, layer, rows, scales, index, *rest, hidden, limit))
        if self._rounds:
            hidden, powers, launch = self._rounded(hidden, None, offsets, ws)
            found.append(launch)
        found.append(product("down", tiling, self._down, layer, hidden, powers, None, *rest, out, limit))
        return found

    def _rounded(
        self, x: torch.Tensor, index: torch.Tensor | None, offsets: torch.Tensor, ws: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        data = ws.take((self._slots, x.shape[1]), torch.uint8)
        powers = ws.take((self._slots, x.shape[1] // FP8_BLOCK), torch.float32)
        return data, powers, self._kernels.rounded(x, index, offsets, data, powers)


def grouped_route(
    name: str,
    tiling: str | None,
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
    products = Products(kernels_of(name), tiling, gate_up, down, layer, index.shape[0])
    return in_order(*products.launches(rows, scales, index, slot_weights, counts, offsets, limit, out, ws))


def ffn_route(
    name: str,
    tiling: str | None,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    need_contiguous("expert_ffn", x, ids, weights)
    kernels = kernels_of(name)
    (tokens, width), pairs, experts = x.shape, ids.numel(), down.shape[0]
    if tiling is None and 0 < pairs <= (FP4_PAIRS if gate_up.format == "fp4_block32" else MOST_PAIRS):
        return _few(kernels, x, ids, weights, gate_up, down, limit, out, ws)
    index, slot_weights = ws.take((max(pairs, 1),), torch.int32), ws.take((max(pairs, 1),), torch.float32)
    counts, offsets = ws.take((experts,), torch.int32), ws.take((experts + 1,), torch.int32)
    slots = ws.take(tuple(ids.shape), torch.int32)
    rows, scales, rounding = x, None, None
    if gate_up.format != "plain":
        rows = ws.take((tokens, width), torch.uint8)
        scales = ws.take((tokens, width // FP8_BLOCK), torch.float32)
        rounding = (x, rows, scales)
    layout = kernels.layout(ids, weights, 0, experts, 1, (index, slot_weights, counts, offsets, slots), rounding)
    parts = ws.take((max(pairs, 1), width), torch.float32)
    products = Products(kernels, tiling, gate_up, down, None, max(pairs, 1))
    both = products.launches(rows, scales, index, slot_weights, counts, offsets, limit, parts, ws)
    return in_order(layout, *both, kernels.sum(parts, slots, out))


def _few(
    kernels: ExpertKernels,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    limit: float,
    out: torch.Tensor,
    ws: Workspace,
) -> Callable[[], None]:
    """Blocks lay the pairs out, round the tokens and add the choices up themselves: two launches in all."""
    few = ids.numel(), ids.shape[1]
    carrier = torch.bfloat16 if gate_up.format == "plain" else torch.float32
    hidden = ws.take((few[0], down.shape[2]), carrier)
    rest = (None, None, weights, ids, ids)
    return in_order(
        kernels.product("up", THIN, gate_up, None, x, *rest, hidden, limit, few),
        kernels.product("down", THIN, down, None, hidden, *rest, out, limit, few),
    )
