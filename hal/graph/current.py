"""What is being captured on this thread, if anything, and whether another thread captures.

Apart from the scope so that op dispatch, the workspace, breaks and forks, which ask often, import nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from halma.hal.errors import CaptureError

if TYPE_CHECKING:
    import torch

    from halma.hal.graph.scope import GraphCaptureScope


class Recorder(Protocol):
    """A graph driver that files work as nodes itself, because no hardware stream does it for us."""

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Append one opaque node that runs ``launch`` at replay; nothing runs now.

        ``parameters`` are the host values that the launch was made with: they are baked in (G11).
        """
        ...


class _State(threading.local):
    recorder: Recorder | None = None
    aside: Callable[[], AbstractContextManager[None]] | None = None
    launches: int = 0
    scope: GraphCaptureScope | None = None

    def __init__(self) -> None:
        self.kept: list[Any] = []


_state = _State()

open_scopes: dict[int, str] = {}
"""Identity of each thread that has a scope open, inert ones included -> what it captures. A piecewise scope is
open between its segments too, when no driver captures."""


def current_scope() -> GraphCaptureScope | None:
    """The scope that is open on this thread, inert ones included."""
    return _state.scope


def set_current_scope(scope: GraphCaptureScope | None) -> None:
    """For the scope only."""
    _state.scope = scope


def note_failure(error: BaseException) -> None:
    """Tell the open scope, if any, that something inside it raised.

    Whoever catches the exception inside the scope cannot hide it: the scope ends as failed (G3). Backends call
    it for what their streams, events and recorders refuse.
    """
    scope = _state.scope
    if scope is not None:
        scope.poison(error)


def refuse_step_in_scope(what: str) -> None:
    """Refuse a step inside a scope of this thread, but for the host work of a break.

    Inert scopes refuse it too, since a switch makes no program legal (G2). ``what`` begins the message, such as
    "decode cannot be replayed".

    Raises:
        CaptureError: a scope is open, and no break of it runs.
    """
    scope = _state.scope
    if scope is None or scope.in_break:
        return
    error = CaptureError(
        f"{what} inside a capture",
        found=f"{scope.graph} is being captured on this thread",
        do="close the capture first, or run it in a break, on another workspace",
    )
    note_failure(error)
    raise error


def note_launch() -> None:
    """For op dispatch only: an opaque launch runs eagerly; who counts work cannot see into it."""
    _state.launches += 1


def launches_so_far() -> int:
    """Opaque launches that ran eagerly on this thread."""
    return _state.launches


def current_recorder() -> Recorder | None:
    """The recorder that is open on this thread; None in eager code and on backends that record by stream."""
    return _state.recorder


def set_current_recorder(
    recorder: Recorder | None, *, aside: Callable[[], AbstractContextManager[None]] | None = None
) -> None:
    """For graph drivers only: publish or withdraw the open recorder.

    Args:
        recorder: the recorder, or None when it closes.
        aside: only where the recording is thrown away (a dry run): gives a context in which work runs at
            once instead of being recorded.
    """
    _state.recorder = recorder
    _state.aside = aside
    _state.kept.clear()


def keep_until_closed(*values: Any) -> None:
    """Keep ``values`` alive until the dry run of this thread ends; nothing happens outside one.

    What a graph will pin must not die earlier in the dry run, or the plan would recycle its memory.
    """
    if _state.aside is not None:
        _state.kept.append(values)


@contextlib.contextmanager
def one_time_work() -> Generator[bool]:
    """Run first-time work (a trial, a table, growth of memory) for real, also inside a dry run.

    ``with one_time_work() as allowed:`` gives False inside a real capture, which allows none: the caller then
    does without, or refuses.
    """
    recorder, aside = _state.recorder, _state.aside
    if recorder is None:
        yield True
    elif aside is None:
        yield False
    else:
        _state.recorder = _state.aside = None
        try:
            with aside():
                yield True
        finally:
            _state.recorder, _state.aside = recorder, aside


open_captures: dict[int, str] = {}
"""Identity of each thread that captures -> what it captures. Empty nearly always, so asking costs nothing."""


def open_capture(what: str) -> None:
    """For graph drivers only: this thread captures from now on.

    Raises:
        CaptureError: a thread captures already; one does at a time.
    """
    if open_captures:
        raise CaptureError(
            "a capture is open already",
            asked=f"to capture {what}",
            found=[f"thread {thread} captures {other}" for thread, other in open_captures.items()],
            do="close it first; one thread captures at a time",
        )
    open_captures[threading.get_ident()] = what


def close_capture() -> None:
    """For graph drivers only: this thread captures no more; nothing happens if it did not."""
    open_captures.pop(threading.get_ident(), None)


_forbidden: dict[int, str] = {}


def forbid_work(why: str) -> None:
    """Refuse ops, streams and replays of this thread until :func:`allow_work`.

    For a scope whose segment is closed and will not be followed by another: a program that swallows the error
    must not go on for real, over state that a replay was to change.
    """
    ident = threading.get_ident()
    _forbidden[ident] = why
    open_captures.setdefault(ident, why)  # so that whoever asks "is any open?" goes on to ask for the reason


def allow_work() -> None:
    """Undo :func:`forbid_work`."""
    ident = threading.get_ident()
    if _forbidden.pop(ident, None) is not None:
        open_captures.pop(ident, None)


def refuse_other_thread(what: str) -> None:
    """Refuse work of a thread that does not capture while another one does, and of one that :func:`forbid_work`
    stopped.

    What records, records one thread, so this work would run at once, amid work that has not run yet. Ask
    ``if open_captures:`` first.

    Raises:
        CaptureError: another thread captures, or this one may not work now.
    """
    why = _forbidden.get(threading.get_ident())
    if why is not None:
        raise CaptureError(f"{what} was called where nothing may run", found=why, do="let the first error through")
    if open_captures and threading.get_ident() not in open_captures:
        raise CaptureError(
            f"{what} was called while another thread captures a graph",
            found=[f"thread {thread} captures {other}" for thread, other in open_captures.items()],
            do="wait until the capture is closed: captured work and this work touch the same device",
        )
