"""All calls of a channel lie on one path of a captured graph (C4).

Calls of a channel share buffers by the parity of one epoch: two that nothing orders could run at the same time, or in
another order than on the peers. Where a backend lists a graph's edges, the path is read from them. Where it does not,
a communicator admits one stream in a capture, and the calls of one stream are a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, runtime_checkable

from halma.hal.backend import GraphNode
from halma.hal.errors import CollectiveError

NODE: Final = "collective:"
"""A channel's node is called so, with the channel's name behind it."""


@runtime_checkable
class GivesEdges(Protocol):
    """A graph part that lists what orders a template's nodes."""

    def edges(self, template: Any) -> Sequence[tuple[int, int]]:
        """(earlier, later) positions in ``nodes(template)``; what follows from others may be left out."""
        ...

    def nodes(self, template: Any) -> Sequence[GraphNode]:
        """The nodes, in order of capture."""
        ...


def prove_path(nodes: Sequence[GraphNode], edges: Iterable[tuple[int, int]], channel: str) -> int:
    """How many calls of ``channel`` there are, once it is known that each comes after the one captured before it.

    Raises:
        CollectiveError: two neighbours that no path joins; both are named with their lines.
    """
    calls = [position for position, node in enumerate(nodes) if node.name == NODE + channel]
    after: dict[int, list[int]] = {}
    for earlier, later in edges:
        after.setdefault(earlier, []).append(later)
    for first, second in pairwise(calls):
        if not _reaches(after, first, second):
            raise CollectiveError(
                f"two calls of channel {channel!r} may run in any order",
                asked="one path through all calls of a channel",
                found=[f"{_call(nodes[one])}, at {nodes[one].where or 'an unknown line'}" for one in (first, second)],
                do="make both calls on one stream, or let the second's stream wait for the first's event",
            )
    return len(calls)


def _reaches(after: dict[int, list[int]], start: int, goal: int) -> bool:
    seen, waiting = {start}, [start]
    while waiting:
        for node in after.get(waiting.pop(), ()):
            if node == goal:
                return True
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return False


def _call(node: GraphNode) -> str:
    return str(next((pair[1] for pair in node.parameters if pair[0] == "call"), node.name))
