"""Outputs of a replay: they die at the next one, and in checked mode they say so (G14).

Every graph on a workspace writes into the same memory, so a replay of any of them ends the life of what an
earlier replay returned. In checked mode a replay returns aliases that know their generation; using one too
late raises. Otherwise it returns plain tensors, and using one too late reads whatever lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch

from halma.hal.device_value import DeviceValue, unwrap
from halma.hal.errors import StaleOutputError
from halma.hal.graph.current import current_recorder, open_captures


class Generations:
    """How often the memory of one workspace was overwritten by replays."""

    __slots__ = ("number", "owner")

    def __init__(self) -> None:
        self.number = 0
        self.owner = 0

    def next(self, owner: object) -> Generation:
        """A replay of ``owner`` begins: everything handed out before is stale from now on."""
        self.number += 1
        self.owner = id(owner)
        return Generation(self, self.number, self.owner)


@dataclass(frozen=True)
class Generation:
    """One replay, among all of its workspace."""

    among: Generations
    number: int
    owner: int

    @property
    def live(self) -> bool:
        """Whether no replay has begun since."""
        return self.number == self.among.number


class GuardedTensor(torch.Tensor):
    """An alias of an output. Shape, dtype and the like can be asked for ever, data only in its own generation.

    Views of it are guarded too; results of computing with it are plain tensors. An array or a capsule made of
    it while it lives (``numpy()``, DLPack) is out of sight.
    """

    _plain: torch.Tensor
    _generation: Generation
    _name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        guarded = list(_guarded_in(given))
        if func not in _HARMLESS:
            for tensor in guarded:
                tensor._check(func)
        positional, named = _mapped(given, _plain_of)
        result = func(*positional, **named)
        if current_recorder() is not None or open_captures or not guarded:
            return result  # what a capture makes has rules of its own
        return _mapped(result, lambda tensor, _: _guarded_again(tensor, guarded))

    def _check(self, func: Callable[..., Any]) -> None:
        born, now = self._generation, self._generation.among
        if born.live:
            return
        who = "the same graph" if born.owner == now.owner else "another graph or step on the same workspace"
        raise StaleOutputError(
            f"{self._name} was used after a later replay",
            asked=f"{_called(func)} on {str(self._plain.dtype).removeprefix('torch.')}{list(self._plain.shape)}",
            found=(
                f"it was written by replay {born.number} of its workspace; {now.number - born.number} have begun since",
                f"the last was of {who}, so its memory holds other data now",
            ),
            do="use it before the next replay, or clone() what must live longer",
        )

    def __repr__(self, **options: Any) -> str:
        # Debuggers and failing tests print arguments: showing a stale one must not raise, nor read it.
        return repr(self._plain) if self._generation.live else f"<{self._name}: stale, {list(self._plain.shape)}>"


def guard(outputs: Any, generation: Generation) -> Any:
    """``outputs`` with every tensor replaced by an alias that is usable in ``generation`` only.

    Sequences, mappings, records and device values keep their type; anything else is passed through.
    """
    return _mapped(outputs, lambda tensor, path: _guarded(tensor, generation, f"output{path}"))


def _guarded(plain: torch.Tensor, generation: Generation, name: str) -> torch.Tensor:
    if isinstance(plain, GuardedTensor):
        plain = plain._plain  # pyright: ignore[reportPrivateUsage]
    made = cast("GuardedTensor", torch.Tensor._make_subclass(GuardedTensor, plain))  # pyright: ignore
    made._plain = plain  # pyright: ignore[reportPrivateUsage]
    made._generation = generation  # pyright: ignore[reportPrivateUsage]
    made._name = name  # pyright: ignore[reportPrivateUsage]
    return made


def _guarded_again(result: torch.Tensor, guarded: Sequence[GuardedTensor]) -> torch.Tensor:
    """The result of a call: the argument itself after work in place, a guarded view, or fresh memory as it is."""
    for tensor in guarded:
        if result is tensor._plain:  # pyright: ignore[reportPrivateUsage]
            return tensor
    for tensor in guarded:
        if overlap(result, tensor._plain):  # pyright: ignore[reportPrivateUsage]
            return _guarded(result, tensor._generation, tensor._name)  # pyright: ignore[reportPrivateUsage]
    return result


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges that two tensors span meet."""
    # By address: all tensors of a workspace share one storage.
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel() or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


def _plain_of(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return tensor._plain if isinstance(tensor, GuardedTensor) else tensor  # pyright: ignore[reportPrivateUsage]


def _guarded_in(value: Any) -> Iterator[GuardedTensor]:
    if isinstance(value, GuardedTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("Sequence[Any]", value):
            yield from _guarded_in(item)
    elif isinstance(value, dict):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _guarded_in(item)


def _mapped(value: Any, change: Callable[[torch.Tensor, str], torch.Tensor], path: str = "") -> Any:
    """``value`` with ``change(tensor, where it is)`` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value, path)
    if isinstance(value, DeviceValue):
        return DeviceValue(change(unwrap(value), path), bound=value.bound, name=value.name)
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change, f"{path}[{i}]") for i, item in enumerate(cast("Sequence[Any]", value))]
        if isinstance(value, list):
            return items
        named = getattr(cast("Any", type(cast("object", value))), "_make", tuple)
        return named(items)
    if isinstance(value, dict):
        return {key: _mapped(item, change, f"{path}[{key!r}]") for key, item in cast("dict[Any, Any]", value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _mapped(getattr(value, f.name), change, f"{path}.{f.name}") for f in fields(value) if f.init}
        return replace(value, **parts)
    return value


def _called(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None) or str(func)
    owner = getattr(func, "__self__", None)  # a getter of a property is called __get__
    return str(getattr(owner, "__name__", name)) if name == "__get__" else f"{name}()"


_T: Any = torch.Tensor
_HARMLESS: frozenset[Any] = frozenset(
    {getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes")}
    | {getattr(_T, name).__get__ for name in ("is_cpu", "is_meta", "requires_grad", "is_leaf")}
    | {getattr(_T, name) for name in ("size", "stride", "dim", "numel", "element_size", "storage_offset")}
    | {getattr(_T, name) for name in ("is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__")}
)
"""What reads no data."""
