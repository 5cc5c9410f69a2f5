"""Layouts that outlive their dispatch: where each routed row goes is worked out once and used again.

    kept = exchange.new_layout()
    handed = exchange.dispatch(x, ids, weights, keep=kept)      # sorts, and leaves the layout there
    out = exchange.combine(parts, handed)
    handed = exchange.dispatch(other, layout=kept)              # the same routing: rows travel, nothing is sorted

Choices are neither sent nor sorted again. It is what a public exchange calls a cached handle (deepseek-ai/DeepEP), used
there for the way back of training. Here: a second payload of the same tokens, also through an exchange of another
payload or hidden size, so long as ranks, tokens, choices, experts and alignment are the same.

When it may be used, of what the host can know:

* It was filled by a dispatch that ended without a fault known then, and :meth:`Exchange.rearm` was not called since
  (after a fault one rank may have slots and another none), unless it was declared stable.
* With as many tokens as it was filled with; its bound goes with it. All ranks use the layout of the same dispatch: its
  number is in the call's digest, so that another one is a mismatch, not a wait.
* In a capture: it was filled in the same capture, or is declared stable. Then a replay never reads what an eager call
  wrote in between. What a graph fills belongs to that graph for as long as it lives.
* It is not freed; a graph that uses it keeps it from being freed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from halma.hal.collectives.exchange_contract import Layout
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_scope

if TYPE_CHECKING:
    from halma.hal.graph.breakable import BreakableGraph
    from halma.hal.graph.scope import GraphCaptureScope

ROUTING: Final = ("ranks", "max_tokens", "top_k", "experts", "alignment", "accumulator")
"""Of a geometry, what a layout depends on."""
NUMBERS: Final = 1 << 10
"""After so many numbers they begin again, so that the calls of a long run are finitely many."""


class KeptLayout:
    """Memory of one layout; :meth:`halma.hal.collectives.exchange.Exchange.new_layout` makes it.

    Args:
        tensors: of full size.
        peers: what ranks of one group have in common, and no other group has.
    """

    def __init__(self, tensors: Layout, geometry: Geometry, peers: object, rank: int) -> None:
        self._tensors: Layout | None = tensors
        self._geometry, self._peers, self._rank = geometry, peers, rank
        self._filled: tuple[int, int, int] | None = None  # tokens, bound, number
        self._capture: weakref.ref[GraphCaptureScope] | None = None  # that it was filled in
        self._users: list[weakref.ref[BreakableGraph]] = []
        self._stable = False

    def __str__(self) -> str:
        if self._tensors is None:
            return "a layout that was freed"
        if self._filled is None:
            return "a layout that no dispatch has filled"
        tokens, bound, number = self._filled
        where = " in a graph" if self._capture is not None else ", declared stable" if self._stable else ""
        return f"layout {number} of {tokens} tokens, at most {bound} a rank, filled{where}"

    def declare_stable(self) -> None:
        """It is an input of captures from now on: no dispatch fills it again. Wait for the exchange first
        (:meth:`Exchange.wait`), which raises where the dispatch that filled it met a fault.

        Raises:
            CollectiveError: nothing eager has filled it.
        """
        self._need()
        if self._filled is None or self._capture is not None:
            raise self._refusal("it cannot be declared stable", "fill it by an eager dispatch first")
        self._stable = True

    def free(self) -> None:
        """Let go of the memory; twice is once.

        Raises:
            CollectiveError: a graph that uses it is still there.
        """
        if any(self._living()):
            raise self._refusal("it cannot be freed", "reset or drop the graphs that use it first")
        self._tensors, self._filled = None, None

    # -- by an exchange -------------------------------------------------------------------------------

    def to_fill(self, geometry: Geometry, peers: object, rank: int, asked: str, capturing: bool, eager: bool) -> Layout:
        """Where a dispatch may write.

        Raises:
            CollectiveError: it is freed, of other ranks or sizes, declared stable, or a graph's.
        """
        tensors = self._need(asked)
        self._need_same(geometry, peers, rank, asked)
        if self._stable:
            raise self._refusal("it cannot be filled", "it is declared stable: take another one", asked)
        if eager and any(self._living()):
            raise self._refusal("an eager dispatch cannot fill it", "a graph fills it: take another one", asked)
        if capturing and any(graph is not _scope(asked).graph for graph in self._living()):
            raise self._refusal("this graph cannot fill it", "another graph fills it: take another one", asked)
        return tensors

    def fill(self, tokens: int, bound: int, number: int, capturing: bool) -> None:
        """A dispatch was queued that fills it."""
        self._filled = (tokens, bound, number)
        self._capture = None
        if capturing:
            scope = _scope("a captured dispatch")
            self._capture = weakref.ref(scope)
            self._hold(scope.graph)

    def to_use(
        self, geometry: Geometry, peers: object, rank: int, tokens: int, capturing: bool, eager: bool
    ) -> tuple[Layout, int, int]:
        """(tensors, bound, number) of a dispatch of as many tokens with the same routing.

        Raises:
            CollectiveError: by the rules of this module.
        """
        asked = f"a dispatch of {tokens} tokens"
        tensors = self._need(asked)
        self._need_same(geometry, peers, rank, asked)
        if self._filled is None:
            raise self._refusal("it cannot be used", "fill it first: dispatch(x, ids, weights, keep=...)", asked)
        count, bound, number = self._filled
        if tokens != count:
            raise self._refusal("it is of another number of tokens", "as many as it was filled with", asked)
        if eager and self._capture is not None:
            raise self._refusal("an eager dispatch cannot use it", "use it in the graph that fills it", asked)
        if capturing:
            scope = _scope(asked)
            if not self._stable and (self._capture is None or self._capture() is not scope):
                raise self._refusal(
                    "this graph cannot use it", "fill it in the same capture, or declare_stable() before", asked
                )
            self._hold(scope.graph)
        return tensors, bound, number

    def forget(self) -> None:
        """After a fault: what it holds may be another layout than on other ranks."""
        if not self._stable and self._capture is None:
            self._filled = None

    # -- guards ---------------------------------------------------------------------------------------

    def _need(self, asked: str = "") -> Layout:
        if self._tensors is None:
            raise self._refusal("it was freed", "take a new one: exchange.new_layout()", asked)
        return self._tensors

    def _need_same(self, geometry: Geometry, peers: object, rank: int, asked: str) -> None:
        if peers is not self._peers or rank != self._rank:
            raise self._refusal("it is of another group of ranks", "take one of an exchange of this group", asked)
        wrong: list[str] = []
        for name in ROUTING:
            mine, other = getattr(self._geometry, name), getattr(geometry, name)
            if mine != other:
                wrong.append(f"{name}: {mine} of the layout, {other} of the exchange")
        if wrong:
            raise CollectiveError(
                "a kept layout is of another geometry", asked=asked, found=wrong, do="take one of this exchange"
            )

    def _living(self) -> list[BreakableGraph]:
        return [graph for graph in (one() for one in self._users) if graph is not None and not graph.empty]

    def _hold(self, graph: BreakableGraph) -> None:
        if all(one() is not graph for one in self._users):
            self._users = [one for one in self._users if one() is not None] + [weakref.ref(graph)]

    def _refusal(self, what: str, do: str, asked: str = "") -> CollectiveError:
        fields: dict[str, Any] = {"asked": asked} if asked else {}
        return CollectiveError(f"a kept layout: {what}", found=str(self), do=do, **fields)


def _scope(asked: str) -> GraphCaptureScope:
    scope = current_scope()
    if scope is None:
        raise CollectiveError(
            "a kept layout cannot be used in a capture that nobody knows", asked=asked, do="open a GraphCaptureScope"
        )
    return scope
