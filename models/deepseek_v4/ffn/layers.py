"""The experts' weights of all layers, as one graph for all of them reads them, and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from halma.hal.errors import ModelError
from halma.ops.weight import Weight
from halma.ops.weight_table import WeightTable


class ExpertWeights(Protocol):
    """What an item needs of a layer: a :class:`halma.models.deepseek_v4.weights.FfnWeights`, or its experts alone."""

    @property
    def gate_up(self) -> Weight: ...
    @property
    def down(self) -> Weight: ...
    @property
    def shared_gate_up(self) -> Weight | None: ...
    @property
    def shared_down(self) -> Weight | None: ...


@dataclass(frozen=True, eq=False)
class Experts:
    """Routed experts [E, 2I, D] and [E, D, I], and the shared one as a stack of one; tables where it is all layers."""

    gate_up: Weight | WeightTable
    down: Weight | WeightTable
    shared_gate_up: Weight | WeightTable | None
    shared_down: Weight | WeightTable | None

    def weights(self) -> tuple[Weight | WeightTable | None, ...]:
        """All four."""
        return self.gate_up, self.down, self.shared_gate_up, self.shared_down

    @property
    def kind(self) -> tuple[str, ...]:
        """Formats, shapes and dtypes: layers of one kind take the same scratch."""
        return tuple("" if weight is None else weight.plan_key for weight in self.weights())


def of_layer(layer: ExpertWeights) -> Experts:
    """One layer's, as views."""
    return Experts(layer.gate_up, layer.down, _stack(layer.shared_gate_up), _stack(layer.shared_down))


def of_all(layers: Sequence[ExpertWeights]) -> Experts:
    """Tables over all layers, in their order.

    Raises:
        ModelError: no layers, or layers of different formats or shapes: no table can hold them.
    """
    each = [of_layer(layer) for layer in layers]
    gates = [one.shared_gate_up for one in each if one.shared_gate_up is not None]
    downs = [one.shared_down for one in each if one.shared_down is not None]
    if gates and len(gates) != len(each):
        raise ModelError("some layers have a shared expert, some have none", found=f"{len(gates)} of {len(each)} have")
    return Experts(
        _table([one.gate_up for one in each]),
        _table([one.down for one in each]),
        _table(gates) if gates else None,
        _table(downs) if downs else None,
    )


def unlike(layers: Sequence[Experts]) -> str:
    """Why no table can hold these layers, in words, or nothing: a module's experts may be of another format.

    Raises:
        ModelError: they are of different shapes, so one item does not fit all.
    """
    first = layers[0]
    for number, one in enumerate(layers):
        for mine, theirs in zip(first.weights(), one.weights(), strict=True):
            if (mine is None) != (theirs is None) or (mine and theirs and mine.shape != theirs.shape):
                raise ModelError(
                    "the experts of the layers are of different shapes",
                    asked=f"layer 0 has {mine.plan_key if mine else 'none'}",
                    found=f"layer {number} has {theirs.plan_key if theirs else 'none'}",
                    do="one program for each kind of layer",
                )
    kinds = [one.kind for one in layers]
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    return (
        "" if other is None else f"layer {other} has {layers[other].gate_up.plan_key}, layer 0 {first.gate_up.plan_key}"
    )


def _table(weights: Sequence[Weight | WeightTable]) -> WeightTable:
    return WeightTable.of([weight for weight in weights if isinstance(weight, Weight)])


def _stack(weight: Weight | None) -> Weight | None:
    """A matrix [N, K] as a stack of one expert."""
    if weight is None or len(weight.shape) == 3:
        return weight
    scale = None if weight.scale is None else weight.scale.unsqueeze(0)
    return Weight(weight.data.unsqueeze(0), scale, weight.format, weight.activation)
