"""A stored weight matrix: its bytes, its format, and what the product does to its input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from halma.hal.errors import ModelError

PLAIN: Final = "plain"
FP8_BLOCK128: Final = "fp8_block128"
FP4_BLOCK32: Final = "fp4_block32"

FP8_BLOCK = 128
"""Rows and columns that share one scale of an fp8 weight (``weight_block_size`` of the official config)."""

FP4_BLOCK = 32
"""Columns that share one scale of an fp4 weight."""

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen e2m1 codes mean; bit 3 is the sign."""

_BYTES = (torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False, repr=False)
class Weight:
    """One matrix ``[N, K]``, or a stack of experts ``[E, N, K]``; a product with it contracts K.

    Args:
        data: ``plain``: floating, logical shape. ``fp8_block128``: float8_e4m3fn, logical shape.
            ``fp4_block32``: int8 or uint8 ``[.., N, K/2]``, the low nibble is the even column.
        scale: float8_e8m0fnu; ``[.., ceil(N/128), ceil(K/128)]`` for fp8, ``[.., N, K/32]`` for fp4; None for plain.
        format: one of the three names above.
        activation: ``"fp8"`` where the product rounds its input to e4m3 per 128 channels (shipping arithmetic).

    Holds references, copies nothing; lives as long as the program that uses it.

    Raises:
        ModelError: data, scale and format do not fit one another.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    format: str = PLAIN
    activation: str | None = None
    shape: tuple[int, ...] = field(init=False)
    plan_key: str = field(init=False)
    """Format, shape and dtypes; equal keys share a plan. A string, because its hash is cached (one per op call)."""

    def __repr__(self) -> str:
        return f"Weight({self.plan_key})"  # never the values: printing reads the device

    @property
    def scales(self) -> torch.Tensor:
        """The scales of a packed weight.

        Raises:
            ModelError: a plain weight has none.
        """
        if self.scale is None:
            raise ModelError("a plain weight has no scales", found=repr(self))
        return self.scale

    def __post_init__(self) -> None:
        logical = list(self.data.shape)
        if self.format == FP4_BLOCK32:
            logical[-1] *= 2
        object.__setattr__(self, "shape", tuple(logical))
        problem = self._problem()
        if problem is not None:
            raise ModelError(
                "a weight does not fit its format",
                asked=f"{self.format} {logical}, activation {self.activation}",
                found=problem,
                do="check the tensor's dtype and its .scale in the checkpoint",
            )
        dtype = str(self.data.dtype).removeprefix("torch.")
        key = f"{self.format}:{dtype}{logical}@{self.data.device.type}"
        object.__setattr__(self, "plan_key", key if self.activation is None else f"{key}:{self.activation}")

    def _problem(self) -> str | None:
        if self.data.dim() not in (2, 3):
            return f"data has {self.data.dim()} dimensions, expected 2 or 3"
        if self.activation not in (None, "fp8"):
            return f"unknown activation rounding {self.activation!r}"
        if self.format == PLAIN:
            if self.data.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                return f"data is {self.data.dtype}, a plain weight is fp32, fp64, bf16 or fp16"
            return None if self.scale is None else "a plain weight has no scale"
        if self.format == FP8_BLOCK128:
            accepted: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
        elif self.format == FP4_BLOCK32:
            accepted = _BYTES
        else:
            return f"unknown format {self.format!r}"
        if self.data.dtype not in accepted:
            return f"data is {self.data.dtype}, expected {' or '.join(map(str, accepted))}"
        if self.scale is None:
            return "the scale is missing"
        if self.scale.dtype != torch.float8_e8m0fnu:
            # A numeric copy of e8m0 bytes into another dtype is a known trap (vllm-project/vllm#43416, #51946).
            return f"the scale is {self.scale.dtype}, expected float8_e8m0fnu"
        if self.format == FP4_BLOCK32 and self.shape[-1] % FP4_BLOCK:
            return f"K = {self.shape[-1]} is no multiple of {FP4_BLOCK}"
        expected = self.scale_shape(self.shape, self.format)
        found = tuple(self.scale.shape)
        return None if found == expected else f"the scale is {list(found)}, expected {list(expected)}"

    @staticmethod
    def scale_shape(shape: tuple[int, ...], format: str) -> tuple[int, ...]:
        """Shape of the scale of a quantised weight with logical shape ``shape``."""
        *lead, rows, columns = shape
        if format == FP8_BLOCK128:
            return (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return (*lead, rows, columns // FP4_BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale: what one product reads."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def narrow_rows(self, start: int, length: int) -> Weight:
        """Rows ``start .. start + length`` of every matrix, as views (tensor parallel, tiles of a product).

        Raises:
            ModelError: an fp8 weight cut inside a block of 128 rows.
        """
        scale = self.scale
        if scale is not None and self.format == FP8_BLOCK128:
            if start % FP8_BLOCK or (length % FP8_BLOCK and start + length != self.shape[-2]):
                raise ModelError(
                    "an fp8 weight can only be cut between blocks of 128 rows",
                    asked=f"rows {start} to {start + length} of {self.shape[-2]}",
                    found="one scale serves 128 rows",
                )
            scale = scale.narrow(-2, start // FP8_BLOCK, -(-length // FP8_BLOCK))
        elif scale is not None:
            scale = scale.narrow(-2, start, length)
        return Weight(self.data.narrow(-2, start, length), scale, self.format, self.activation)

    def matrix(self, index: int) -> Weight:
        """Matrix ``index`` of a stack ``[E, N, K]``, as views."""
        return Weight(self.data[index], None if self.scale is None else self.scale[index], self.format, self.activation)


def dequantise(weight: Weight, dtype: torch.dtype) -> Weight:
    """The same weight in format plain: value times scale, exact in fp32 and fp64 (allocates: for loading).

    Scales are powers of two, so fp32 holds every product; a narrower ``dtype`` rounds once at the end.
    """
    if weight.format == PLAIN:
        return Weight(weight.data.to(dtype), activation=weight.activation)
    scale = weight.scales.to(torch.float32)
    *_, rows, columns = weight.shape
    if weight.format == FP8_BLOCK128:
        scale = scale.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :].repeat_interleave(FP8_BLOCK, -1)[..., :columns]
        values = weight.data.to(torch.float32)
    else:
        table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=weight.data.device)
        packed = weight.data.view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = table[codes.to(torch.int64)]
        scale = scale.repeat_interleave(FP4_BLOCK, -1)
    return Weight(values.mul_(scale).to(dtype), activation=weight.activation)
