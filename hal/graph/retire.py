"""Executables that wait to be destroyed, and who may use a workspace now (G22).

Destroying a graph while another is captured breaks the capture on some drivers, and Python may drop the last
reference to a graph at any moment (pytorch/pytorch#161037). So nothing destroys an executable directly: it is
put here, and the queue is drained where no capture is open.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from halma.hal.backend import DevicePart, GraphPart, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.current import open_captures, open_scopes
from halma.hal.workspace import Workspace

guard = threading.RLock()
"""Held while a scope is published and while the queue drains, so that no capture begins amid a destroy."""

_waiting: deque[tuple[GraphPart, Any]] = deque()


def retire(graphs: GraphPart, executable: Any) -> None:
    """Queue ``executable``; calls no driver, so a finaliser may use it on any thread, inside a capture too."""
    _waiting.append((graphs, executable))


def waiting() -> int:
    """Executables that are not destroyed yet."""
    return len(_waiting)


def drain() -> None:
    """Destroy what is queued, unless a capture or scope is open anywhere in the process.

    Every executable is tried; then the first error is raised.
    """
    if not _waiting:
        return
    first: BaseException | None = None
    with guard:
        if open_scopes or open_captures:
            return
        while _waiting:
            graphs, executable = _waiting.popleft()
            try:
                graphs.destroy(executable)
            except Exception as error:
                first = first or error
    if first is not None:
        raise first


def drain_quietly() -> None:
    """:func:`drain` where another error is on its way already."""
    with suppress(Exception):
        drain()


# -- one active user of a workspace ------------------------------------------------------------------------


class _Use:
    user: str | None = None
    stream: Stream | None = None


_uses: weakref.WeakKeyDictionary[Workspace, _Use] = weakref.WeakKeyDictionary()
_uses_lock = threading.Lock()


@contextmanager
def lease(workspace: Workspace, user: str) -> Generator[None]:
    """Be the only user of ``workspace`` until the block ends.

    Replays and captures hold one: two graphs on one workspace overwrite each other's intermediates
    (pytorch/pytorch#166975). ``user`` says who it is; the thread's name is added.

    Raises:
        CaptureError: it is in use, by this thread or another; both users are named.
    """
    take_lease(workspace, user)
    try:
        yield
    finally:
        end_lease(workspace)


def take_lease(workspace: Workspace, user: str) -> None:
    """As :func:`lease`, for who cannot use a block; pair with :func:`end_lease`."""
    user = f"{user} on thread {threading.current_thread().name!r}"
    with _uses_lock:
        use = _uses.setdefault(workspace, _Use())
        if use.user is None:
            use.user = user
            return
    raise CaptureError(
        "the workspace is in use: it has one active user at a time",
        asked=user,
        found=use.user,
        do="wait until it is done, or give each thread a workspace and graphs of its own",
    )


def end_lease(workspace: Workspace) -> None:
    """Give the workspace back; nothing happens if nobody has it."""
    use = _uses.get(workspace)
    if use is not None:
        use.user = None


def follow_last_use(workspace: Workspace, stream: Stream, device: DevicePart) -> None:
    """Let ``stream`` wait for the stream of the last replay on this workspace, if that was another."""
    use = _uses.setdefault(workspace, _Use())
    last, use.stream = use.stream, stream
    if last is not None and last != stream:
        done = device.new_event("last use of the workspace")
        last.record(done)
        stream.wait(done)
