"""The same weight of every layer, so that one graph serves all layers: the layer is a value on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from halma.hal.errors import ModelError
from halma.ops.weight import Weight


@dataclass(frozen=True, eq=False, repr=False)
class WeightTable:
    """Layer -> weight, with the addresses in device memory for routes that look them up there.

    Args:
        layers: one weight a layer, all of one format, shape and activation rounding, on one device.

    Copies no weight; two int64 a layer are allocated. Lives as long as the graphs that read it: the weights may
    not move (their addresses are read on the device at every replay).

    Raises:
        ModelError: no layer, or layers of different kinds (the message names the first that differs).
    """

    layers: tuple[Weight, ...]
    data_addresses: torch.Tensor = field(init=False)
    """int64 [L]: where the data of layer l starts."""
    scale_addresses: torch.Tensor = field(init=False)
    """int64 [L]: where the scales of layer l start; 0 for plain weights."""
    plan_key: str = field(init=False)

    @classmethod
    def of(cls, layers: Sequence[Weight]) -> WeightTable:
        """The table of ``layers``."""
        return cls(tuple(layers))

    def __repr__(self) -> str:
        return f"WeightTable({self.plan_key})"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ModelError("a table of weights needs at least one layer", do="give the layers' weights in order")
        first = self.layers[0]
        for position, weight in enumerate(self.layers):
            if weight.plan_key != first.plan_key or weight.data.device != first.data.device:
                raise ModelError(
                    "the layers of a table have different weights",
                    asked=f"layer 0 has {first.plan_key}",
                    found=f"layer {position} has {weight.plan_key}",
                    do="one table for each kind of layer",
                )
            if not weight.data.is_contiguous() or (weight.scale is not None and not weight.scale.is_contiguous()):
                raise ModelError(
                    "a weight of a table must be contiguous: its address is all that is kept",
                    found=f"layer {position} has strides {weight.data.stride()}",
                    do="copy it once when loading",
                )
        device = first.data.device
        data = [weight.data.data_ptr() for weight in self.layers]
        scales = [0 if weight.scale is None else weight.scale.data_ptr() for weight in self.layers]
        object.__setattr__(self, "data_addresses", torch.tensor(data, dtype=torch.int64, device=device))
        object.__setattr__(self, "scale_addresses", torch.tensor(scales, dtype=torch.int64, device=device))
        object.__setattr__(self, "plan_key", f"{len(self.layers)} x {first.plan_key}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of one layer's weight."""
        return self.layers[0].shape

    @property
    def format(self) -> str:
        """Format of every layer's weight."""
        return self.layers[0].format

    @property
    def activation(self) -> str | None:
        """What a product with any of them does to its input."""
        return self.layers[0].activation

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(weight.nbytes for weight in self.layers)
