"""What the tests of the collective kernels share: ways to make a call, references, comparison by bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.virtual_ranks import SECOND, VirtualRanks
from halma.hal.collectives.contract import Algorithm, Call, Choice, Kind, Operands, Wire

Lab = VirtualRanks
MILLISECOND = SECOND // 1000

ONE_SHOT_WORDS = Choice(Algorithm.ONE_SHOT, Wire.WORDS)
ONE_SHOT_SENTINEL = Choice(Algorithm.ONE_SHOT, Wire.SENTINEL)
ONE_SHOT_CHUNKS = Choice(Algorithm.ONE_SHOT, Wire.CHUNKS)
TWO_SHOT = Choice(Algorithm.TWO_SHOT, Wire.CHUNKS)
STAGED = Choice(Algorithm.STAGED, Wire.FLAGS)
STAGED_TWO_SHOT = Choice(Algorithm.STAGED_TWO_SHOT, Wire.FLAGS)
REDUCTIONS = (ONE_SHOT_WORDS, ONE_SHOT_SENTINEL, TWO_SHOT, STAGED, STAGED_TWO_SHOT)


def name_of(choice: Choice) -> str:
    """``two_shot-chunks``, for test ids."""
    return f"{choice.algorithm.name}-{choice.wire.name}".lower()


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one definition of a sum: fp32, in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals itself."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor, *, any_nan: bool = False) -> bool:
    """Equal bit by bit; ``any_nan``: a NaN may have another payload."""
    equal = bits(a) == bits(b)
    if any_nan:
        equal = equal | (a.isnan() & b.isnan())
    return bool(equal.all())


def all_reduce(nbytes: int, dtype: torch.dtype) -> Call:
    return Call(Kind.ALL_REDUCE, nbytes, str(dtype).removeprefix("torch."))


def operands(sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[Operands]:
    return [Operands(source, out) for source, out in zip(sources, outs, strict=True)]
