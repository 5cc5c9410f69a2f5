"""Poison: what lies beside the real rows must not matter, whatever it is.

Padded rows, tails, gaps between aligned groups, their scales, and staging left over from another call. Kernels
that read them anyway gave wrong results that no ordinary test saw: a NaN in a padding row that a warp's shared
maximum carried into real rows (vllm-project/vllm#40047), wrong but finite scales (flashinfer-ai/flashinfer#3057).

:func:`check_real_rows` is the whole harness: it needs a maker of inputs and a way to run them. The admission suite
runs it on every route of an op declared ``padded``; an exchange runs it in its own tests, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from halma.hal.workspace import Workspace

T = TypeVar("T")


class Failed(Exception):
    """A check that does not hold; the text is the reason."""


_CODES = {
    # quiet NaN, +Inf or the largest, -Inf or the lowest, the largest: as bytes, for types that arithmetic lacks
    torch.float8_e4m3fn: (0x7F, 0x7E, 0xFE, 0x7E),
    torch.float8_e5m2: (0x7F, 0x7C, 0xFC, 0x7B),
    torch.float8_e8m0fnu: (0xFF, 0xFE, 0x00, 0xFE),
}
_KINDS = ("nan", "+inf", "-inf", "huge")


@dataclass(frozen=True)
class Fill:
    """Fills memory in place: ``nan``, ``+inf``, ``-inf``, ``huge``, ``stale`` (finite and ordinary) or ``zero``.

    Integers get -1, the largest, the least, the largest, small non-negative numbers, and 0.
    """

    name: str

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill ``tensor`` (any dtype, any strides) and return it."""
        if tensor.numel() == 0:
            return tensor
        if self.name == "zero":
            (tensor.view(torch.uint8) if tensor.dtype in _CODES else tensor).zero_()
        elif self.name == "stale":
            self._stale(tensor)
        elif tensor.dtype in _CODES:
            tensor.view(torch.uint8).fill_(_CODES[tensor.dtype][_KINDS.index(self.name)])
        elif tensor.is_floating_point():
            tensor.fill_(float(self.name) if self.name != "huge" else torch.finfo(tensor.dtype).max)
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            span = torch.iinfo(tensor.dtype)
            tensor.fill_({"nan": span.max if span.min == 0 else -1, "-inf": span.min}.get(self.name, span.max))
        return tensor

    def _stale(self, tensor: torch.Tensor) -> None:
        # Different in every element, so that a row taken for another shows.
        numbers = torch.arange(1, tensor.numel() + 1, device=tensor.device).view(tensor.shape)
        if tensor.dtype in _CODES:
            tensor.view(torch.uint8).copy_(numbers % 100 + 20)
        elif tensor.is_floating_point():
            tensor.copy_((numbers * 37 % 101).to(torch.float64).sub_(50.0).mul_(0.37))
        else:
            tensor.copy_(numbers % 3)


FILLS = tuple(Fill(name) for name in ("zero", *_KINDS, "stale"))
"""Zeros first: what the others are compared with."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: tells NaN payloads and -0 apart."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def check_real_rows(
    make: Callable[[Fill], T],
    run: Callable[[T, Fill], Sequence[torch.Tensor]],
    fills: Sequence[Fill] = FILLS,
) -> int:
    """Runs the same real work beside every kind of poison and compares the real results bit by bit.

    Args:
        make: inputs, equal at each call but for what is not real, to which it applies the fill.
        run: the work; it may apply the fill to staging, scratch and outputs first (:class:`FilledWorkspace`).
            Returns the real results alone.

    Returns:
        The number of tensors compared.

    Raises:
        Failed: a result moved, naming the fill; or there was nothing to compare.
    """
    first: list[torch.Tensor] = []
    compared = 0
    for fill in fills:
        found = [tensor.detach().cpu().clone() for tensor in run(make(fill), fill)]
        if fill is fills[0]:
            first = found
            continue
        if len(found) != len(first):
            raise Failed(f"{len(found)} real results beside {fill.name!r} instead of {len(first)}")
        for position, (mine, theirs) in enumerate(zip(found, first, strict=True)):
            if not same_bits(mine, theirs):
                raise Failed(
                    f"real result {position} has other bits beside {fill.name!r} than beside {fills[0].name!r}"
                    f" ({_where(mine, theirs)})"
                )
            compared += 1
    if not any(tensor.numel() for tensor in first):
        raise Failed("there is no real result: poison proves nothing here")
    return compared


def _where(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    width = a[0].numel() * a.itemsize if a.dim() > 1 and len(a) else a.itemsize
    wrong = (_bits(a) != _bits(b)).view(-1, width).any(1).nonzero().view(-1)
    return f"{len(wrong)} of {a.shape[0] if a.dim() else 1} rows, the first is {int(wrong[0])}"


class FilledWorkspace(Workspace):
    """A workspace whose every take holds the fill: scratch and outputs look as another call may have left them."""

    def __init__(self, device: torch.device | str, fill: Fill) -> None:
        super().__init__(device)
        self._fill = fill

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`Workspace.take`."""
        return self._fill(super().take(shape, dtype))
