"""What is being captured on this thread, if anything, and whether another thread captures.

Apart from the scope so that op dispatch and the workspace, which ask often, import nothing else.
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


_state = _State()


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
        set_current_recorder(None)
        try:
            with aside():
                yield True
        finally:
            set_current_recorder(recorder, aside=aside)


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


def refuse_other_thread(what: str) -> None:
    """Refuse work of a thread that does not capture while another one does.

    What records, records one thread, so this work would run at once, amid work that has not run yet. Ask
    ``if open_captures:`` first.

    Raises:
        CaptureError: another thread captures.
    """
    if open_captures and threading.get_ident() not in open_captures:
        raise CaptureError(
            f"{what} was called while another thread captures a graph",
            found=[f"thread {thread} captures {other}" for thread, other in open_captures.items()],
            do="wait until the capture is closed: captured work and this work touch the same device",
        )
