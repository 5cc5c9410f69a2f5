"""Work on a side stream, with a join that cannot be forgotten (G8) and memory of its own (W6).

::

    with fork(side, workspace) as branch:
        with branch:
            shared = small_work(x)      # on the side stream, in the side's workspace lane
        routed = large_work(x)          # on the current stream, beside it
        branch.join()
        return add(routed, shared)      # the lane's memory lasts until the outer block ends

The join is done at the end of the outer block if the program did not; results that are used after the block must
be written into memory from outside it. In a capture, the scope joins what is still out before it closes a
segment.
"""

from __future__ import annotations

from types import TracebackType

from halma.hal.backend import DevicePart, Stream
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import counters
from halma.hal.graph.current import current_scope, note_failure
from halma.hal.workspace import Workspace


class OpenForks:
    """The forks of one segment that are not joined yet, by stream; a scope owns one."""

    def __init__(self) -> None:
        self._streams: dict[Stream, Fork | None] = {}

    def note(self, stream: Stream, fork: Fork | None = None) -> None:
        """Remember that ``stream`` was forked; again for the same stream keeps one entry."""
        if stream not in self._streams:
            counters.forks_tracked += 1
        self._streams[stream] = fork

    def forget(self, stream: Stream) -> None:
        """``stream`` was joined."""
        self._streams.pop(stream, None)

    def join_all(self, main: Stream, device: DevicePart) -> None:
        """Record on each, let ``main`` wait for each."""
        for stream, fork in list(self._streams.items()):
            event = device.new_event("join before a segment's end")
            stream.record(event)
            main.wait(event)
            del self._streams[stream]
            counters.forks_auto_joined += 1
            if fork is not None:
                fork.joined = True


def note_fork(stream: Stream) -> None:
    """Tell the open capture, if any, that ``stream`` was made to wait for the captured one by hand.

    The scope will join it before the segment closes unless :func:`note_join` comes first.
    """
    forks = _open_forks()
    if forks is not None:
        forks.note(stream)


def note_join(stream: Stream) -> None:
    """Tell the open capture, if any, that the captured stream waits for ``stream`` again."""
    forks = _open_forks()
    if forks is not None:
        forks.forget(stream)


def _open_forks() -> OpenForks | None:
    scope = current_scope()
    return scope.forks if scope is not None and scope.segment_open else None


class Fork:
    """See the module. Outside a capture the same streams and events do the same work.

    Args:
        stream: the side stream, another than the current one.
        workspace: whose lane, named after the stream, the branch takes from.
    """

    def __init__(self, stream: Stream, workspace: Workspace) -> None:
        self.stream = stream
        self.workspace = workspace
        self.joined = True
        self._main: Stream | None = None
        self._branch: Branch | None = None

    def __enter__(self) -> Branch:
        main = self._main = self.stream.device.current_stream()
        if main == self.stream:
            error = CaptureError(
                f"stream {main.name!r} cannot be forked from itself",
                found="it is the current stream",
                do="fork onto a stream of its own: backend.device.new_stream(name)",
            )
            note_failure(error)
            raise error
        self.start()
        self._branch = Branch(self)
        return self._branch

    def start(self) -> None:
        """Let the side stream wait for what the current one has been given so far."""
        assert self._main is not None
        event = self.stream.device.new_event(f"fork of {self.stream.name}")
        self._main.record(event)
        self.stream.wait(event)
        self.joined = False
        forks = _open_forks()
        if forks is not None:
            forks.note(self.stream, self)

    def join(self) -> None:
        """Let the stream that forked wait for the side; once is enough."""
        if self.joined:
            return
        assert self._main is not None
        event = self.stream.device.new_event(f"join of {self.stream.name}")
        self.stream.record(event)
        self._main.wait(event)
        self.joined = True
        forks = _open_forks()
        if forks is not None:
            forks.forget(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.join()
        except BaseException:
            if error is None:  # else the program's own error is the one to show
                raise
        finally:
            if self._branch is not None and self._branch.entered:
                self.workspace.release_lane(self.stream.name)


class Branch:
    """What the block of a fork gets: ``with branch:`` moves to the side stream and its lane, once."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._lane = fork.workspace.lane(fork.stream.name)
        self.entered = False

    def __enter__(self) -> Branch:
        fork = self._fork
        self._lane.__enter__()
        self.entered = True
        try:
            if fork.joined:  # a break came between; the side must wait for the segment that is open now
                fork.start()
            fork.stream.__enter__()
        except BaseException:
            self._lane.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fork.stream.__exit__(kind, error, trace)
        self._lane.__exit__(None, None, None)

    def join(self) -> None:
        """As the end of the fork's block does; the lane's memory stays until then."""
        self._fork.join()


def fork(stream: Stream, workspace: Workspace) -> Fork:
    """Fork onto ``stream``: ``with fork(side, workspace) as branch: ...``; the module shows how.

    Raises:
        CaptureError: ``stream`` is the current one.
        WorkspaceError: on entering the branch: its lane is in use by an earlier fork (W6).
    """
    return Fork(stream, workspace)
