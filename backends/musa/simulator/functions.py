"""Functions in place of a library's, called as those of a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any


class Function:
    """A function of a library. ``argtypes`` are checked as ctypes would; the result is an error code."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.argtypes: tuple[Any, ...] | None = None
        self.restype: Any = ctypes.c_int
        self._body = body

    def __call__(self, *args: Any) -> Any:
        if self.argtypes is not None:
            if len(args) != len(self.argtypes):
                raise TypeError(f"this function takes {len(self.argtypes)} arguments ({len(args)} given)")
            for position, (kind, value) in enumerate(zip(self.argtypes, args, strict=True), 1):
                try:
                    kind.from_param(value)
                except TypeError as error:
                    raise ctypes.ArgumentError(f"argument {position}: {error}") from None
        return self._body(*[_plain(value) for value in args])


def _plain(value: Any) -> Any:
    """What C would see: the object behind ``byref()`` or a pointer, the number in ``c_int()``."""
    if type(value).__name__ == "CArgObject":
        return value._obj
    if isinstance(value, ctypes._Pointer):
        return value.contents
    return value.value if isinstance(value, ctypes._SimpleCData) else value


class Library:
    """Functions by name; one that is not there is an AttributeError, as with a library."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        for name, body in functions.items():
            setattr(self, name, Function(body))
