"""What ``_MUSAGraph`` refuses in 2.7.1, the same whatever stands behind it."""

from __future__ import annotations

from typing import Any, Final

from halma.backends.musa.simulator.records import refuse_mode

EMPTY_GRAPH: Final = "The MUSA Graph is empty: nothing was queued on the stream that was captured"
"""What ``capture_end()`` warns of; the backend knows it by the words before the colon."""


class GraphState:
    """How far a graph has come: begun, with a template, with an executable. Subclasses do the work.

    Errors have 2.7.1's types, at its moments; the words are ours.
    """

    _debug = False

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: tuple[int, int] = (0, 0)
        self._template = False
        self._executable = False

    def _need_beginning(self, mode: str, *, default_stream: bool) -> None:
        refuse_mode(mode)
        if self._executable:
            raise RuntimeError("this MUSAGraph holds a capture already; another one needs an object of its own")
        if default_stream:
            raise RuntimeError("the default stream cannot be captured into a MUSAGraph, only replayed on")

    def _need_stream(self, current: Any) -> None:
        if current != self._stream:
            raise RuntimeError("a MUSAGraph's capture ends on the stream on which it began")

    def _need_executable(self, asked: str) -> None:
        if not self._executable:
            raise RuntimeError(f"MUSAGraph.{asked}() needs a capture that ended well and was not reset")

    def _need_both(self) -> None:
        if not (self._template and self._executable):
            raise RuntimeError("MUSAGraph.reinstantiate_graph() needs the template and executable of a capture")

    def pool(self) -> tuple[int, int]:
        self._need_executable("pool")
        return self._pool

    def enable_debug_mode(self) -> None:
        GraphState._debug = True

    def debug_dump(self, debug_path: str) -> None:
        """As with a toolkit older than 4.2, whose runtime cannot print graphs (MooreThreads/torch_musa#97)."""
        if GraphState._debug:
            raise NotImplementedError("this toolkit's runtime does not print graphs")
