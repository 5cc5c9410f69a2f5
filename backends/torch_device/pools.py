"""Memory that captures on a workspace allocate from where ops make results or temporaries of their own.

One pool a workspace, shared by all its graphs, because they replay one at a time (G22). It lives as long as the
workspace or any graph captured with it. Giving a pool back frees device memory, so it is never done amid a capture:
dropped pools and graphs wait in a graveyard until no capture is open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from halma.hal.graph.current import open_captures
from halma.hal.workspace import Workspace


class GraphPool(Protocol):
    """A pool of torch's caching allocator, private to captures; a family's own class."""

    @property
    def id(self) -> Any:
        """What ``capture_begin`` takes."""
        ...

    def hold(self) -> None:
        """Called before each capture, on a stream that can be captured."""
        ...

    def nbytes(self) -> int:
        """Bytes of device memory that the pool holds, used or not."""
        ...


_graveyard: list[Any] = []


def bury(thing: Any) -> None:
    """Drop ``thing`` later, where no capture is open; calls no driver, so a finaliser may use it anywhere."""
    _graveyard.append(thing)


def clear_graveyard() -> None:
    """Drop what was buried, unless a capture is open anywhere in the process."""
    while not open_captures:  # asked each time: another thread may begin one meanwhile
        try:
            _graveyard.pop()
        except IndexError:  # empty; threads may do this at once, so the last one may be gone since anybody looked
            return


_pools: weakref.WeakKeyDictionary[Workspace, GraphPool] = weakref.WeakKeyDictionary()


def pool_of(workspace: Workspace, make: Callable[[], GraphPool]) -> GraphPool:
    """The pool of a workspace, made at first use."""
    pool = _pools.get(workspace)
    if pool is None:
        pool = _pools[workspace] = make()
    return pool


def forget_pool(workspace: Workspace) -> None:
    """Let the next capture on ``workspace`` make a pool of its own; graphs that use the old one keep it."""
    _pools.pop(workspace, None)


def pool_bytes(workspace: Workspace) -> int:
    """Bytes that captures on ``workspace`` have taken beside it."""
    pool = _pools.get(workspace)
    return 0 if pool is None else pool.nbytes()
