"""Python numbers among a call's arguments.

The dispatcher makes a number a tensor where an overload wants one, and hands it to Python as the number again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from halma.backends.cpu.fast_calls import bind
from halma.backends.cpu.op_rules import Overload, base_name, rule_of

_NN: Any = vars(torch._C)["_nn"]
_BINDINGS: Final = (torch, _NN, torch.special, torch.linalg)
_NUMBERS: Final = (int, float, bool, complex)


def call_of(func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of ``func``. The overload would refuse a number in a tensor's place; torch's own binding of the same name
    makes the same of it again, with its rules of promotion."""
    if not any(type(args[position]) in _NUMBERS for position in _tensor_positions(func) if position < len(args)):
        return partial(func, *args, **kwargs)
    name, outs = base_name(func), rule_of(func).outs
    if not outs and isinstance(args[0], torch.Tensor) and hasattr(args[0], name):
        return partial(getattr(args[0], name), *args[1:], **kwargs)
    function = next(getattr(home, name) for home in _BINDINGS if hasattr(home, name))
    given = {key: value for key, value in kwargs.items() if key not in outs}
    if outs:
        given["out"] = kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[key] for key in outs)
    return partial(function, *args, **given)


def bound(func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    """As :func:`call_of`, for a tape: the fastest way to the overload."""
    numbers = any(type(args[position]) in _NUMBERS for position in _tensor_positions(func) if position < len(args))
    return call_of(func, args, kwargs) if numbers else bind(func, args, kwargs)


_positions: dict[Overload, tuple[int, ...]] = {}


def _tensor_positions(func: Overload) -> tuple[int, ...]:
    found = _positions.get(func)
    if found is None:
        arguments = enumerate(func._schema.arguments)
        found = _positions[func] = tuple(at for at, one in arguments if str(one.type) == "Tensor")
    return found


def numbers_as_tensors(func: Overload, args: list[Any]) -> list[Any]:
    """For shapes and dtypes alone."""
    made = list(args)
    for position in _tensor_positions(func):
        if position < len(args) and type(args[position]) in _NUMBERS:
            made[position] = torch.tensor(args[position])
    return made
