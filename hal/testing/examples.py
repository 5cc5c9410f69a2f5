"""Example calls of an op: what the admission suite tries a route on.

An op's module (or one beside it) offers them with :func:`examples`; whoever writes a route for the op needs
to know nothing else about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halma.hal.errors import DispatchError
from halma.hal.testing.poison import Fill

Arguments = tuple[Any, ...]

Padding = Callable[[Arguments, int, float], None]
"""Turns rows from the given index on into padding, in place, with the given payload."""


@dataclass(frozen=True)
class OpExample:
    """A family of calls of one op.

    Args:
        op: the op's name.
        name: what is special about these calls; shown in reports.
        build: (seed, rows) -> positional arguments on the CPU: tensors, records of tensors, plain values.
            Equal inputs give equal arguments, in memory of their own.
        by_row: positions of the tensors whose first dimension is ``rows``, as it is in every output.
        state: positions of what the op writes in place, for ops that do.
        null_row: row 0 of every state tensor is the one that padding writes to; it is not compared.
        tolerance: largest difference allowed, as a part of the largest magnitude in the reference's result.
            Integers and booleans must be equal.
        rows: the row counts tried.
        scales: factors on the floating tensors of ``by_row`` for the check of extreme values.
        padding: default: fills the last rows of the floating tensors of ``by_row``.
        poison: fills, in place, everything in the arguments that is not real (gaps, tails, their scales), for an op
            that is declared ``padded``; default: the second half of the floating tensors of ``by_row``.
        defined: picks what may be read of the outputs; default: all of it.
    """

    op: str
    name: str
    build: Callable[[int, int], Arguments]
    by_row: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    null_row: bool = False
    tolerance: float = 1e-5
    rows: tuple[int, ...] = (1, 3, 8)
    scales: tuple[float, ...] = (0.0, 1e-20, 1e4)
    padding: Padding | None = None
    poison: Callable[[Arguments, Fill], None] | None = None
    defined: Callable[[Arguments, list[torch.Tensor]], list[torch.Tensor]] | None = None

    def pad(self, arguments: Arguments, real: int, payload: float) -> None:
        """Make the rows from ``real`` on padding that holds ``payload``."""
        if self.padding is not None:
            self.padding(arguments, real, payload)
            return
        for tensor in self.floating_rows(arguments):
            tensor[real:] = payload

    def floating_rows(self, arguments: Arguments) -> list[torch.Tensor]:
        """The tensors of ``by_row`` that hold numbers; ids, positions and slots stay what they are."""
        chosen = (arguments[position] for position in self.by_row)
        return [value for value in chosen if isinstance(value, torch.Tensor) and value.is_floating_point()]


Maker = Callable[[], Sequence[OpExample]]

_makers: dict[str, list[Maker]] = {}


def examples(op: str) -> Callable[[Maker], Maker]:
    """Decorator: the function below returns examples of ``op``; it is called when they are asked for."""

    def decorate(maker: Maker) -> Maker:
        known = _makers.setdefault(op, [])
        if maker not in known:
            known.append(maker)
        return maker

    return decorate


def examples_of(op: str) -> list[OpExample]:
    """Every example of ``op`` that an imported module offers.

    Raises:
        DispatchError: there is none.
    """
    found = [example for maker in _makers.get(op, ()) for example in maker()]
    if not found:
        raise DispatchError(
            f"op {op!r} has no example calls",
            found="examples are known for: " + (", ".join(sorted(_makers)) or "no op"),
            do="import the module that offers them (for our ops: halma.ops.examples)",
        )
    return found


def ops_with_examples() -> list[str]:
    """Names of the ops that can be tried."""
    return sorted(_makers)
