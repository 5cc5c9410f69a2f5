"""What is kept of a channel's calls, and no more of it than that: programs may make calls of ever new shapes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Final

from halma.hal.collectives.contract import Call

MOST: Final = 1024
"""Shapes that a channel keeps something for, 2 KB each: more than any program's ladder has. A call that is made again
after so many others is prepared again, about 50 us."""


def forget_oldest(kept: dict[Any, Any]) -> None:
    """Drop what was kept first, once there is more than :data:`MOST`."""
    if len(kept) > MOST:
        del kept[next(iter(kept))]


class Calls:
    """The calls of one channel on this rank: one object for all equal ones, and their names by digest.

    Drivers keep what they prepared for a call by the object's identity. One that was forgotten and is made again is
    another object; captured work holds the one that it was captured with, and its name is never forgotten.
    """

    def __init__(self) -> None:
        self._objects: dict[Call, Call] = {}
        self._recent: dict[int, str] = {}
        self._captured: dict[int, str] = {}
        self.names: Mapping[int, str] = ChainMap(self._recent, self._captured)

    def one(self, call: Call) -> Call:
        """The object for all calls that equal this one."""
        return self._objects.get(call) or self._first(call)

    def _first(self, call: Call) -> Call:
        self._objects[call] = call
        self._recent[call.digest] = call.describe()
        forget_oldest(self._objects)
        forget_oldest(self._recent)
        return call

    def captured(self, call: Call) -> None:
        """A graph makes this call from now on."""
        self._captured[call.digest] = call.describe()
