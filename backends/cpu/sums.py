"""Sums and bytes of tensors. One definition of a sum, so that every algorithm gives the same bits (C1):

((x0 + x1) + x2) + ... in float32, in order of ranks, then one rounding to the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from halma.hal.collectives.contract import Operands

Bytes = Any  # numpy.ndarray of uint8


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A contiguous tensor's memory as uint8, shared."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def added_up(parts: Sequence[Bytes], dtype: torch.dtype) -> Bytes:
    """The sum of byte arrays that hold elements of ``dtype``, rounded once, in memory of its own."""
    tensors = [torch.from_numpy(part).view(dtype) for part in parts]
    total = tensors[0].to(torch.float32, copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(dtype).view(torch.uint8).numpy()


def poison(operands: Operands) -> None:
    """NaN in every result; all ones where a dtype has no NaN."""
    for tensor in (operands.out, operands.norm_out, operands.scale_out):
        if tensor is not None and tensor.numel():
            tensor = tensor.detach()
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            else:
                bytes_of(tensor).fill(0xFF)


def words_of(data: Bytes) -> Any:
    """``data`` as uint32, the last word padded with zeros."""
    if not data.nbytes % 4 and data.ctypes.data % 4 == 0:
        return data.view(np.uint32)
    words = np.zeros(-(-data.nbytes // 4), dtype=np.uint32)
    words.view(np.uint8)[: data.nbytes] = data
    return words
