"""Destinations of break results: memory that the next segment has baked in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from halma.hal.errors import CaptureError
from halma.hal.graph.outputs import overlap
from halma.hal.workspace import Workspace


class Cell:
    """Where the result of a break goes: a tensor, or a sequence, mapping or dataclass that holds tensors.

    In a capture the first result becomes the destination, or a copy of it where it lies in an argument or in a
    larger tensor, or the memory given here, if any. The next segment reads its address, the graph keeps it alive,
    and each replay copies the new result into it. Address, dtype and shape never change; values that are no
    tensors are taken over as they come. Outside a capture the cell just holds the latest result, unless memory was
    given: then results are always copied into that.

    One cell belongs to one break of a capture; other captures may use it again, each with its own destination.

    Args:
        memory: tensors of a fixed address to copy results into, in the structure of the result.
        name: for messages.

    Raises:
        CaptureError: there is no tensor in ``memory``.
    """

    def __init__(self, memory: Any = None, *, name: str = "") -> None:
        self.name = name
        self.memory = memory
        self._value = memory
        if memory is not None:
            self.check(memory, "memory of a cell")

    @property
    def value(self) -> Any:
        """The latest result.

        Raises:
            CaptureError: there was none yet.
        """
        if self._value is None:
            raise CaptureError(f"{self} is empty", do="let its break run first: host(fn, ...)")
        return self._value

    def hold(self, value: Any) -> Any:
        """For breaks only: make ``value`` the latest result."""
        self._value = value
        return value

    def check(self, value: Any, break_name: str) -> None:
        """Refuse what cannot be copied into at a replay.

        Raises:
            CaptureError: it holds no tensor.
        """
        if next(leaves(value), None) is None:
            raise CaptureError(
                f"{break_name}: its result cannot be copied into a cell",
                found=f"{type(value).__name__} holds no tensor",
                do="return tensors, or declare out=NO_WRITE_BACK if captured work never looks at the result",
            )

    def __str__(self) -> str:
        return f"the cell {self.name!r}" if self.name else "a cell without a name"


def pinned(value: Any, given: Any, workspace: Workspace) -> Any:
    """``value`` as a destination: itself, but for tensors that replays must not write.

    Those repeat memory, or are somebody else's: they lie in what the break was given, or are a part of something
    larger (a row of a store). Writing them would change the program's own state at every replay.
    """
    taken = list(leaves(given))

    def writable(tensor: torch.Tensor, _: object) -> torch.Tensor:
        part = tensor.untyped_storage().nbytes() > tensor.nbytes and not workspace.holds(tensor)
        own = not (part or _repeats(tensor) or any(overlap(tensor, other) for other in taken))
        return tensor if own else tensor.clone()

    return _rebuilt(value, value, writable)


def write(destination: Any, value: Any, break_name: str) -> Any:
    """Copy the tensors of ``value`` into those of ``destination``; all are compared before the first is copied.

    Returns the destination's tensors in the structure of ``value``, with its other values.

    Raises:
        CaptureError: the structure, a dtype, a shape or a device differs.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def matched(tensor: torch.Tensor, fresh: Any) -> torch.Tensor:
        if not isinstance(fresh, torch.Tensor):
            raise _mismatch(break_name, _shown(tensor), type(fresh).__name__)
        if (tensor.dtype, tensor.shape, tensor.device) != (fresh.dtype, fresh.shape, fresh.device):
            raise _mismatch(break_name, _shown(tensor), _shown(fresh))
        pairs.append((tensor, fresh))
        return tensor

    try:
        result = _rebuilt(destination, value, matched)
    except _Structure as error:
        raise _mismatch(break_name, *error.args) from None
    for tensor, fresh in pairs:
        if not _same_memory(tensor, fresh):
            tensor.copy_(fresh)
    return result


class _Structure(Exception):
    """The destination's structure and the result's, where they part."""


def _rebuilt(destination: Any, value: Any, leaf: Any) -> Any:
    if isinstance(destination, torch.Tensor):
        return leaf(destination, value)
    if isinstance(destination, (list, tuple)):
        return _sequence(cast("Sequence[Any]", destination), value, leaf)
    if isinstance(destination, Mapping):
        return _mapping(cast("Mapping[Any, Any]", destination), value, leaf)
    if is_dataclass(destination) and not isinstance(destination, type):
        if type(value) is not type(destination):
            raise _Structure(type(destination).__name__, type(value).__name__)
        parts = {
            f.name: _rebuilt(getattr(destination, f.name), getattr(value, f.name), leaf) for f in fields(destination)
        }
        return replace(value, **parts)
    if isinstance(value, torch.Tensor):
        raise _Structure(type(destination).__name__, _shown(value))
    return value


def _sequence(destination: Sequence[Any], value: Any, leaf: Any) -> Any:
    if type(value) is not type(destination) or len(value) != len(destination):
        raise _Structure(_length(destination), _length(value))
    parts = [_rebuilt(old, new, leaf) for old, new in zip(destination, value, strict=True)]
    kind: Any = type(destination)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _mapping(destination: Mapping[Any, Any], value: Any, leaf: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Structure(f"keys {sorted(map(str, destination))}", type(value).__name__)
    fresh = cast("Mapping[Any, Any]", value)
    if fresh.keys() != destination.keys():
        raise _Structure(f"keys {sorted(map(str, destination))}", f"keys {sorted(map(str, fresh))}")
    return {key: _rebuilt(destination[key], fresh[key], leaf) for key in destination}


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result: itself, or those in sequences, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in cast("Sequence[Any]", value):
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in cast("Mapping[Any, Any]", value).values():
            yield from leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from leaves(getattr(value, part.name))


def holds_tensors(value: Any) -> bool:
    """Whether a tensor is anywhere in it."""
    return next(leaves(value), None) is not None


def host_values(value: Any) -> Any:
    """``value`` with shapes for tensors and type names for what cannot be compared, for a node's parameters."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(host_values(part) for part in cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return tuple((key, host_values(part)) for key, part in cast("Mapping[Any, Any]", value).items())
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(cast("object", value)).__name__


def _repeats(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _length(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(cast('Sequence[Any]', value))}" if isinstance(value, (list, tuple)) else name


def _mismatch(break_name: str, destination: str, found: str) -> CaptureError:
    return CaptureError(
        f"{break_name}: its result does not fit its destination",
        asked=f"to write {found} into {destination}",
        found="the captured segments read the destination at the address, dtype and shape of the capture",
        do="return the same structure, dtypes and shapes at every step, padded to the descriptor",
    )
