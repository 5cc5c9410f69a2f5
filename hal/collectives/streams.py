"""One stream a channel: its calls, captured and eager, come one after another, on this rank as on the others.

Two streams on one channel would make its order a matter of timing, and ranks that wait for each other in another
order wait for ever (pytorch/pytorch#189228).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from halma.hal.backend import DevicePart, Stream
from halma.hal.collectives.order import GivesEdges, prove_path
from halma.hal.errors import CollectiveError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.current import current_scope


class OneStream:
    """The stream that a channel's work is on, apart for eager work and for the capture that is open.

    Args:
        replaying: called before each replay of a graph with calls of the channel; raises what speaks against it.
    """

    def __init__(self, channel: str, device: DevicePart, replaying: Callable[[], None]) -> None:
        self.channel = channel
        self._device = device
        self._replaying = replaying
        self._eager: Stream | None = None
        self._graph: weakref.ref[BreakableGraph] | None = None
        self._captured: Stream | None = None

    def eager(self, stream: Stream) -> None:
        """Work is about to be queued on ``stream``.

        Raises:
            CollectiveError: the channel's work is on another one.
        """
        if self._eager is None:
            self._eager = stream
        elif stream != self._eager:
            raise self._refusal(self._eager, stream)

    def captured_call(self, stream: Stream) -> None:
        """A call is about to be captured on ``stream``; the graph will ask again at each replay.

        Raises:
            CollectiveError: the channel's calls in this capture are on another one.
        """
        scope = current_scope()
        if scope is None:
            return
        if self._graph is None or self._graph() is not scope.graph:
            self._graph, self._captured = weakref.ref(scope.graph), stream
            scope.graph.users[id(self)] = self
        elif self._captured is not None and stream != self._captured:
            raise self._refusal(self._captured, stream)

    def hand_over(self, stream: Stream, capturing: bool) -> None:
        """Go on on ``stream``, which waits for what the channel did so far."""
        before = self._captured if capturing else self._eager
        if before is not None and before != stream:
            event = self._device.new_event(f"channel {self.channel}")
            before.record(event)
            stream.wait(event)
        if capturing:
            self._captured = stream
        else:
            self._eager = stream

    def before_replay(self, stream: Stream) -> None:
        """A graph with calls of the channel is about to be replayed on ``stream``; as :meth:`eager`."""
        self.eager(stream)
        self._replaying()

    def captured(self, graph: BreakableGraph) -> None:
        """A capture with calls of the channel ends.

        Raises:
            CollectiveError: they do not lie on one path (C4).
        """
        graphs = graph.backend.graphs
        if isinstance(graphs, GivesEdges):
            for segment in graph.segments:
                prove_path(graphs.nodes(segment.template), graphs.edges(segment.template), self.channel)

    def _refusal(self, one: Stream, two: Stream) -> CollectiveError:
        return CollectiveError(
            f"channel {self.channel!r} is used on two streams",
            asked=f"work on stream {two.name!r}",
            found=f"its work so far is on {one.name!r}, and nothing orders the two",
            do="communicator.hand_over(stream) before it, or a channel of its own for each stream",
        )
