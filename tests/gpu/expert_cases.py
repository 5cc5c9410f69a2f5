"""Weights, tokens and routing of the experts' tests on a device, and how far results may lie from the reference's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight
from tests.cpu.ops.grouped import compare_layout

EXPERTS, FIRST, ALL, LIMIT = 6, 4, 12, 2.0
FORMATS = (PLAIN, FP8_BLOCK128, FP4_BLOCK32)
ERROR = {PLAIN: 4e-3, FP8_BLOCK128: 2e-3, FP4_BLOCK32: 2e-3}
"""Root mean square against the reference, relative. bf16: the input of w2 is rounded to bf16 (2^-9 at most, half of
that on the average) where the reference keeps fp32. The others multiply exactly and differ by the order of sums, and
where that moves an input of w2 across a step of e4m3 (2^-4 of it, a few in ten thousand)."""


class ExpertCase:
    """One layer's weights and tokens of this rank's experts, on the device."""

    def __init__(
        self,
        backend: Backend,
        format: str,
        tokens: int,
        sizes: tuple[int, int],
        *,
        seed: int = 0,
        alignment: int = 1,
    ) -> None:
        self.backend, self.format, self.alignment = backend, format, alignment
        self.width, self.inner = sizes
        self.random = torch.Generator().manual_seed(seed)
        self.gate_up, self.down = self.stack(2 * self.inner, self.width), self.stack(self.width, self.inner)
        self.x = torch.randn(tokens, self.width, generator=self.random).bfloat16().to(self.device)
        self.weights = (torch.rand(tokens, 3, generator=self.random) + 0.1).to(self.device)
        self.ids = self.routing().to(self.device)

    @property
    def device(self) -> torch.device:
        return self.backend.device.torch_device

    def routing(self) -> torch.Tensor:
        ids = torch.rand(self.x.shape[0], ALL, generator=self.random).topk(3, 1).indices
        ids[self.x.shape[0] // 2] = -1 if self.x.shape[0] > 2 else FIRST
        return ids

    def stack(self, rows: int, columns: int) -> Weight:
        shape = (EXPERTS, rows, columns)
        if self.format == PLAIN:
            return Weight((torch.randn(shape, generator=self.random) * columns**-0.5).bfloat16().to(self.device))
        low = 127 - {FP8_BLOCK128: 12, FP4_BLOCK32: 7}[self.format]
        scale = torch.randint(low, low + 4, Weight.scale_shape(shape, self.format), generator=self.random)
        scales = scale.to(torch.uint8).view(torch.float8_e8m0fnu).to(self.device)
        if self.format == FP8_BLOCK128:
            codes = torch.randint(0, 254, shape, generator=self.random)
            data = (codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)  # no NaN
        else:
            data = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=self.random).to(torch.uint8)
        return Weight(data.to(self.device), scales, self.format, "fp8")

    def layout(self) -> list[torch.Tensor]:
        ops = Ops(Workspace(self.device, checked=True), backend="cuda", routes={"expert_layout": "reference"})
        return [one.clone() for one in ops.expert_layout(self.ids, self.weights, FIRST, EXPERTS, self.alignment)]

    def through(self, ops: Ops, out: torch.Tensor | None = None) -> torch.Tensor:
        index, given, counts, offsets, slots = ops.expert_layout(self.ids, self.weights, FIRST, EXPERTS, self.alignment)
        parts = ops.grouped_ffn(self.x, None, index, given, counts, offsets, self.gate_up, self.down, LIMIT)
        return ops.expert_sum(parts, slots, out=out)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative root mean square; infinite where anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - wanted.double()).square().mean().sqrt() / wanted.double().square().mean().sqrt())


def check_layout(backend: Backend, route: str, tokens: int, alignment: int) -> None:
    """``expert_layout`` by ``route`` beside the plain one, of top-6 of 256 experts of which 128 are here."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 256, generator=random).topk(6, 1).indices
    ids[tokens // 3] = -1
    weights = torch.rand(tokens, 6, generator=random)
    there = backend.device.torch_device
    ops = Ops(Workspace(there), backend="cuda", routes={"expert_layout": route})
    found: Sequence[torch.Tensor] = ops.expert_layout(ids.to(there), weights.to(there), 128, 128, alignment)
    compare_layout(tuple(one.cpu() for one in found), ids, weights, 128, 128, alignment)
