"""Queues for the streams of a device, each of which is one live stream's alone.

torch hands out 32 streams in turn, to whoever asks: two of ours, or one of ours and one of a user's, could be one and
the same queue. Then "on another stream" is not true of them, and what must not wait for a spinning kernel, such as
setting its bound, does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from halma.backends.torch_device.family import Family
from halma.hal.errors import CapabilityError

T = TypeVar("T")
POOLED: Final = 32


class Lending(Generic[T]):
    """Things that are lent to one owner at a time, and made where none is free.

    They are kept for the life of the process: memory that torch caches for a queue may still be in use by its work.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._free: list[T] = []

    def take(self) -> T:
        """One that nobody has."""
        return self._free.pop() if self._free else self._make()

    def lend(self, owner: Any, thing: T) -> None:
        """``thing`` is free again when ``owner`` dies."""
        weakref.finalize(owner, self._free.append, thing).atexit = False


def pooled_queue(family: Family, index: int, taken: Callable[[int], bool]) -> Any:
    """One of torch's, where there is no driver to make one with.

    Args:
        taken: whether a live stream of ours is that one, by torch's number of it.

    Raises:
        CapabilityError: all of them are.
    """
    for _ in range(POOLED + 1):
        made = family.module.Stream(index)
        if not taken(made.stream_id):
            return made
    raise CapabilityError(
        "there is no stream that is nobody else's",
        asked="new_stream()",
        found=f"torch has {POOLED}, and all of them are in use",
        do=f"drop streams that are done, or {family.more_queues}",
    )
