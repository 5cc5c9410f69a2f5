"""A weight's tensors as the Triton kernels read them, and the checks that need its contents."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

import torch

from halma.backends.triton.fitting import CODES, layers_of
from halma.hal.errors import DispatchError

SCALES: Final = (127 - 56, 127 + 64)
"""Least and largest e8m0 code: bf16 holds every product of a code and its scale, made 2^64 too small."""

_ALIGNMENT: Final = 16
_SCALE_TYPES: Final = {8: torch.int16, 4: torch.uint8}
_NAN_CODE: Final = 0x7F
_sound: WeakSet[Any] = WeakSet()


def operands(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's data and scales: words, and the bytes of one or two scales; of a table the addresses of both.

    A weight met for the first time is looked at, which waits for the device: a program's first, eager run does it.

    Raises:
        DispatchError: scales or codes that the kernels cannot multiply exactly, or addresses between 16 bytes.
    """
    if weight not in _sound:
        for number, layer in enumerate(layers_of(weight)):
            if layer not in _sound:
                _look_at(layer, f"layer {number}'s " if layer is not weight else "the ")
                _sound.add(layer)
        _sound.add(weight)
    if hasattr(weight, "layers"):
        return weight.data_addresses, weight.scale_addresses
    codes = CODES[weight.format]
    if codes == 1:
        return weight.data, weight.data
    return weight.data.view(torch.int32), weight.scale.view(torch.uint8).view(_SCALE_TYPES[codes])


def _look_at(weight: Any, whose: str) -> None:
    problem = None
    if weight.data.data_ptr() % _ALIGNMENT:
        problem = f"an address that is no multiple of {_ALIGNMENT} bytes"
    elif not weight.data.is_contiguous() or not (weight.scale is None or weight.scale.is_contiguous()):
        problem = "strides of their own"
    elif weight.scale is not None:
        codes = weight.scale.view(torch.uint8)
        least, largest = (int(bound) for bound in torch.aminmax(codes))
        if least < SCALES[0] or largest > SCALES[1]:
            problem = f"scales from 2^{least - 127} to 2^{largest - 127}"
        elif CODES[weight.format] == 4 and any(_has_nan(expert) for expert in weight.data):
            problem = "NaN codes"
    if problem is not None:
        raise DispatchError(
            f"{whose}weights cannot be multiplied by the route triton",
            asked=f"{weight!r}: scales from 2^{SCALES[0] - 127} to 2^{SCALES[1] - 127}, no NaN, contiguous, aligned",
            found=problem,
            do="choose another route: HALMA_ROUTE=expert_ffn=reference,grouped_ffn=reference, or mend the weights",
        )


def _has_nan(codes: torch.Tensor) -> bool:
    """e4m3 codes, one expert's at a time: what this makes is no larger than they are."""
    bits = codes.view(torch.uint8) & _NAN_CODE
    return int(bits.max()) == _NAN_CODE
