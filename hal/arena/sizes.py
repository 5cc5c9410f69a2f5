"""Sizes in bytes: checked when they come in, rounded in one way, below 64 bits when they go out (A11)."""

from __future__ import annotations

from typing import Any, Final

from halma.hal.arena.layout import ALIGNMENT, GUARD_BYTES
from halma.hal.errors import ArenaError

MIB: Final = 1 << 20
LARGEST_ADDRESSABLE: Final = (1 << 63) - 1
"""Device code takes sizes and offsets as signed 64-bit numbers; an arena that needs more is refused
(32-bit sizes overflowed in vllm-project/vllm#41858)."""


def whole(name: str, value: Any, *, least: int = 1, even: bool = False) -> int:
    """``value`` as the integer that an argument called ``name`` must be.

    Raises:
        ArenaError: no int (a bool is none), below ``least``, odd where elements of two bytes must fit, or beyond
            64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unusable(name, value, f"{type(value).__name__}, where an int is wanted", f"{name}=4096, say")
    if value < least:
        raise _unusable(name, value, f"it is below {least}", f"{least} or more")
    if even and value % 2:
        raise _unusable(name, value, "it is odd: elements have two bytes or more", f"{name}={value + 1}")
    if value > LARGEST_ADDRESSABLE:
        raise _unusable(name, value, "it does not fit 64 bits", f"at most {LARGEST_ADDRESSABLE}")
    return value


def _unusable(name: str, value: Any, found: str, do: str) -> ArenaError:
    return ArenaError(f"{name} cannot be {value!r}", asked=f"{name}={value!r}", found=found, do=do)


def up(size: int, to: int = ALIGNMENT) -> int:
    """The smallest multiple of ``to`` that is no smaller than ``size``."""
    return -(-size // to) * to


def down(size: int, to: int = ALIGNMENT) -> int:
    """The largest multiple of ``to`` that is no larger than ``size``."""
    return size // to * to


class Cursor:
    """Hands out aligned, guarded pieces one behind the other; a guard zone stands before the first and after each.

    Args:
        start: where the first guard zone stands.
    """

    def __init__(self, start: int = 0) -> None:
        self.end = start
        self.guards: list[int] = []
        self._guard()

    def take(self, nbytes: int) -> int:
        """The offset of ``nbytes`` bytes."""
        offset = self.end
        self.end = up(offset + nbytes)
        self._guard()
        return offset

    def _guard(self) -> None:
        self.guards.append(self.end)
        self.end += GUARD_BYTES
