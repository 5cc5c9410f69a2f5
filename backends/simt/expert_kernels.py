"""The loaded kernels of the experts' ops of one backend: experts.cu, experts_fp4.cu, expert_rows.cu; their launches.

Everything is driven by the routing on the device: no host read, grids as large as the device. Launches follow one
another as dependent ones, each waiting for the one before; ``down`` fetches its first weights ahead of that wait.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from halma.backends.simt import expert_sources
from halma.backends.simt.expert_needs import short
from halma.backends.simt.expert_sources import BITS, MOST_PAIRS, Tiling, fp4_launch, fp4_takes_few
from halma.backends.simt.sources import Target
from halma.hal.backend import Backend
from halma.hal.errors import DispatchError
from halma.hal.registry import default_registry

FP8_BLOCK: Final = 128
_ROUND_BLOCKS: Final = 4
"""Blocks a multiprocessor of the kernels that round and add: they only wait for memory."""


class ExpertKernels:
    """The loaded kernels of one backend and their launches.

    Args:
        backend: whose device and kernel loader they are.
    """

    def __init__(self, backend: Backend) -> None:
        part: Any = backend.kernels
        self._device, self._part = backend.device, part
        self._target = Target.of(backend.kernels, backend.capabilities)
        self.shared_bytes: int = part.shared_bytes
        self._processors = int(backend.device.properties()["multiprocessors"])
        self._rows = part.load(expert_sources.rows_source(self._target), expert_sources.ROW_ENTRIES)
        self._products: dict[int, Any] = {}

    def takes_few(self, form: str, pairs: int, choices: int, width: int, inner: int) -> bool:
        """Whether blocks of the products lay so many pairs out themselves."""
        if form == "fp4_block32":
            return fp4_takes_few(pairs, choices, width, inner, self.shared_bytes)
        return 0 < pairs <= MOST_PAIRS

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
        kernel = self._rows[f"round_{short(x.dtype)}"]
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
            source = expert_sources.products_source(bits, self.shared_bytes, self._target)
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
            cut = fp4_launch(f"{way}_{name}", slots, experts, k, self.shared_bytes)
            args[-1] |= cut.room << 12
            return self._launch(
                kernels[cut.entry], cut.resident * self._processors, cut.threads, args, keep, cut.shared_bytes(k)
            )
        shared = tiling.shared_bytes(bits, tiling.stages(bits, self.shared_bytes))
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
                asked=f"{short(tensor.dtype)}{list(tensor.shape)}",
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
