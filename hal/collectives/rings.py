"""Rings between attention and FFN ranks: pairwise, so that an idle rank blocks nobody (F15).

Every rank opens them together. Then attention ranks submit and collect, as part of a step, captured or not, and FFN
ranks look for items with their host and answer them; nobody waits for a rank that it has nothing from. They are closed
together, once everybody is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halma.hal.arena.arena import refuse_capturing
from halma.hal.arena.consensus import together
from halma.hal.arena.memory import SymmetricMemory
from halma.hal.collectives.group import Group, machine
from halma.hal.collectives.operands import check_bound
from halma.hal.collectives.ring_board import Board, Peers, open_boards
from halma.hal.collectives.ring_contract import (
    COUNTED,
    GivesRings,
    RingDriver,
    RingItem,
    RingNext,
    RingSite,
    RingStaging,
)
from halma.hal.collectives.ring_faults import fault_of, titles
from halma.hal.collectives.ring_plan import RingGeometry, RingPlan, require_equal, ring_epoch
from halma.hal.collectives.streams import OneStream
from halma.hal.errors import CollectiveError, RankError
from halma.hal.graph.current import current_recorder, current_scope, note_failure
from halma.hal.process import Home
from halma.hal.settings import settings

if TYPE_CHECKING:
    import torch

LOOKS_A_POLL = 16


class Rings:
    """This rank's ends of all rings; :meth:`open` makes them on every rank. Not thread-safe.

    Attributes:
        geometry: equal on all ranks.
        attends: whether this rank is an attention rank.
        number: of this rank within its role.
        nbytes: of memory that peers map, on this rank.
    """

    def __init__(
        self,
        group: Group,
        geometry: RingGeometry,
        plan: RingPlan,
        memory: SymmetricMemory,
        boards: Sequence[Board],
        peers: Peers,
        driver: RingDriver,
        bound: float,
    ) -> None:
        self.geometry = geometry
        self.attends = group.rank < geometry.attention
        self.number = group.rank if self.attends else group.rank - geometry.attention
        self.nbytes = plan.nbytes(group.rank)
        self.closed = False
        self._group, self._memory, self._boards, self._peers, self._driver = group, memory, boards, peers, driver
        self._bound = bound
        self._home = Home()
        self._stream = OneStream("rings", group.backend.device, lambda: self._refuse_closed("a replay"))
        self._open: tuple[object, deque[int]] = (None, deque())
        self._next = [1] * geometry.attention
        self._replied = [[0] * geometry.depth for _ in range(geometry.attention)]
        self._turn = self._idle = 0

    @classmethod
    def open(cls, group: Group, geometry: RingGeometry) -> Rings:
        """The rings of a group; all of its ranks call it, attention ranks first in its order.

        Raises:
            CollectiveError: on every rank: fields of the geometry that differ, named (F14), another number of ranks,
                several machines, a backend without rings.
            ArenaError: there is no memory for them; on every rank.
            RankError: a rank did not come.
        """
        refuse_capturing("rings are opened")
        ranks, backend = group.ranks, group.backend
        require_equal(ranks, geometry)
        _refuse_group(group, geometry)
        plan = RingPlan.of(geometry)
        boards: list[Board] = []
        memory: SymmetricMemory | None = None
        try:
            made, processes = open_boards(ranks, geometry.attention, geometry.depth)
            boards += made
            memory = SymmetricMemory.create(backend, ranks, plan.nbytes(group.rank), lambda _: None)
            peers = Peers(ranks, boards, processes, titles(geometry, ranks.names))
            bound = settings().collective_bound
            site = RingSite(
                group.rank, plan, memory.own, tuple(memory.peers), [board.file for board in boards],
                Board.headers(group.size), int(bound * 1e9),
            )  # fmt: skip
            # Every kernel is loaded on every rank, and all memory is zero, before the first item (C18, A10).
            drivers: list[RingDriver] = []
            maker = backend.collectives
            assert isinstance(maker, GivesRings)  # _refuse_group looked
            together(ranks, "the rings", lambda: drivers.append(maker.rings(site)))
        except BaseException:
            if memory is not None:
                memory.abandon()
            for board in boards:
                board.close()
            raise
        return cls(group, geometry, plan, memory, boards, peers, drivers[0], bound)

    # -- attention ranks ------------------------------------------------------------------------------

    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Send each row of a step to the FFN ranks that hold one of its experts, or its share of the shared one.

        Args:
            layer: the item's, below ``geometry.layers``.
            x: [M, D]; ids: int64 [M, k] of all experts, -1 for no choice; weights: [M, k].

        Raises:
            CollectiveError: nothing was sent: more rows than the declared worst case, other shapes or dtypes, no such
                layer, an FFN rank, or as many items under way as a ring has slots.
            RankError: a rank left, ended, or did not do its part in time.
        """
        try:
            self._check_item(layer, x, ids, weights)
            stream = self._call("submit()")
            under_way = self._under_way()
            if len(under_way) == self.geometry.depth:
                asked = f"another item beside {len(under_way)}"
                raise CollectiveError("the rings are full", asked=asked, do="collect() the oldest first")
            self._driver.submit(layer, x, ids, weights, stream)
            under_way.append(x.shape[0])
        except BaseException as error:
            note_failure(error)
            raise

    def collect(self, out: torch.Tensor) -> torch.Tensor:
        """The sum over FFN ranks, in their order, of what they made of the oldest item that is under way.

        Args:
            out: [M, D], M rows as they were submitted; any dtype of the carriers. Sums are made in the reply's dtype.

        Returns ``out``.

        Raises:
            CollectiveError: nothing is under way, or ``out`` does not fit.
            RankError: as :meth:`submit`.
        """
        try:
            stream = self._call("collect()")
            under_way = self._under_way()
            if not under_way:
                raise CollectiveError("no item is under way", asked="collect()", do="submit() one first")
            self._check("out", out, (under_way[0], self.geometry.hidden), None)
            self._driver.collect(out, stream)
            under_way.popleft()
        except BaseException as error:
            note_failure(error)
            raise
        return out

    def _under_way(self) -> deque[int]:
        """Rows of this program's items that were submitted and not collected; after a failed capture there are none."""
        scope = current_scope()
        program = None if scope is None else scope.graph
        if self._open[0] is not program:
            self._open = (program, deque())
        return self._open[1]

    def _call(self, asked: str) -> Any:
        self._refuse_closed(asked)
        device = self._group.backend.device
        stream = device.current_stream()
        if self._group.backend.graphs.is_capturing():
            self._stream.captured_call(stream)
        elif current_recorder() is None:  # a dry run is neither: its work is thrown away
            self.poll()
            self._stream.eager(stream)
        return stream

    def _check_item(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        g, rows = self.geometry, x.shape[0]
        if not self.attends:
            raise CollectiveError("an FFN rank submits nothing", asked="submit()", do="next_item(), take() and reply()")
        if not 1 <= rows <= g.max_tokens:
            raise CollectiveError(
                "a batch does not fit the declared worst case, and nothing was sent",
                asked=f"{rows} rows",
                found=f"the rings were opened for 1 to {g.max_tokens}",
                do="open them with a larger max_tokens, or take smaller steps",
            )
        if not 0 <= layer < g.layers:
            raise CollectiveError(f"there is no layer {layer}", found=f"{g.layers} layers were declared")
        self._check("x", x, (rows, g.hidden), g.payload)
        self._check("ids", ids, (rows, g.top_k), "int64")
        self._check("weights", weights, (rows, g.top_k), g.weights)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str | None) -> None:
        found = str(tensor.dtype).removeprefix("torch.")
        device = self._group.backend.device.torch_device
        fits = tuple(tensor.shape) == shape and (dtype is None or found == dtype) and tensor.device == device
        if not fits or not tensor.is_contiguous():
            raise CollectiveError(
                f"{name} does not fit the rings",
                asked=f"{dtype or 'any dtype'} {list(shape)}, contiguous, on {device}",
                found=f"{found} {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device}",
            )

    # -- FFN ranks --------------------------------------------------------------------------------------

    def next_item(self) -> RingItem | None:
        """The header of an item that came and was not taken yet, else None: a look at host memory, by turns.

        Faults are looked for in one of 16 looks without an item: after a fault no more items come, and a look is short.

        Raises:
            RankError: a header that cannot be; as :meth:`poll`.
        """
        board, count = self._boards[self._group.rank], self.geometry.attention
        for step in range(count):
            attention = (self._turn + step) % count
            item = board.header(attention, self._next[attention])
            if item is not None:
                self._turn = (attention + 1) % count
                self._refuse_header(item)
                self._next[attention] = ring_epoch(item.sequence, self.geometry.depth)
                return item
        self._idle += 1
        if not self._idle % LOOKS_A_POLL:
            self.poll()
        return None

    def take(self, item: RingItem, staging: RingStaging) -> None:
        """Queue the wait for the payload of ``item``, and its way to ``staging``. Items are taken as they came."""
        self._refuse_closed("take()")
        stream = self._group.backend.device.current_stream()
        self._stream.eager(stream)
        self._driver.take(item, staging, stream)

    def reply(self, item: RingItem, out: torch.Tensor) -> None:
        """Queue the answer: ``out`` [rows, D] of the reply's dtype; every row is what this rank adds to the sum."""
        self._refuse_closed("reply()")
        self._check("out", out, (item.rows, self.geometry.hidden), self.geometry.reply)
        slots, slot = self._replied[item.attention], item.sequence % self.geometry.depth
        self._driver.reply(item, out, slots[slot], self._group.backend.device.current_stream())
        slots[slot] = item.sequence

    def take_next(self, staging: RingStaging, seen: RingNext, patience: float) -> None:
        """Queue the wait for an item of any attention rank, whichever comes, and its way to ``staging``; may be
        captured. No host reads its header, so an FFN rank takes all of its items this way, or none.

        Args:
            patience: seconds after which there is an item of no rows that nobody sent, so that a host can look round.

        Raises:
            CollectiveError: this is an attention rank, or staging does not fit.
            RankError: as :meth:`poll`, outside of a capture.
        """
        g = self.geometry
        if self.attends:
            raise CollectiveError(
                "an attention rank is sent no items", asked="take_next()", do="submit() and collect()"
            )
        self._check("staging.rows", staging.rows, (g.max_tokens, g.hidden), g.payload)
        self._check("staging.ids", staging.ids, (g.max_tokens, g.top_k), "int64")
        self._check("staging.weights", staging.weights, (g.max_tokens, g.top_k), g.weights)
        self._check("seen.counted", seen.counted, (len(COUNTED),), "int64")
        stream = self._call("take_next()")
        self._driver.take_next(staging, seen, int(check_bound(patience) * 1e9), stream)

    def reply_next(self, out: torch.Tensor, beside: torch.Tensor | None = None) -> None:
        """Queue the answer to the item of the last :meth:`take_next`, if it has a sender; may be captured.

        Args:
            out: [max_tokens, D] of the reply's dtype.
            beside: float32 or float64 [S, D], the reply's dtype: added to the rows of the shared expert.

        Raises:
            CollectiveError: they do not fit.
        """
        g = self.geometry
        self._check("out", out, (g.max_tokens, g.hidden), g.reply)
        if beside is not None:
            self._check("beside", beside, (beside.shape[0], g.hidden), g.reply)
            if g.reply not in ("float32", "float64"):
                raise CollectiveError("rows are added in full precision alone", found=f"replies of {g.reply}")
        self._driver.reply_next(out, beside, self._call("reply_next()"))

    @property
    def all_done(self) -> bool:
        """Whether no attention rank asks anything more."""
        return all(self._peers.done(rank) for rank in range(self.geometry.attention) if rank != self._group.rank)

    def _refuse_header(self, item: RingItem) -> None:
        g = self.geometry
        wrong = [
            text
            for bad, text in (
                (not 0 <= item.layer < g.layers, f"layer {item.layer} of {g.layers}"),
                (item.rows > g.max_tokens, f"{item.rows} rows, {g.max_tokens} were declared"),
                (item.pairs > item.rows * g.top_k, f"{item.pairs} pairs of {item.rows} rows and {g.top_k} choices"),
                (item.shared_first + item.shared > item.rows, f"shared rows to {item.shared_first + item.shared}"),
            )
            if bad
        ]
        if wrong:
            raise RankError(
                f"attention rank {item.attention} sent a header that cannot be",
                asked=f"item {item.sequence}, {item.rows} rows",
                found=wrong,
                do="the ranks run different versions, or memory was written over",
            )

    # -- both -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Look for faults, and for peers that left or ended; waits for nothing.

        Raises:
            RankError: what was computed since means nothing; names the rank (F16).
        """
        record = self._driver.error()
        if record is not None:
            self._peers.check_left()  # which knows more
            if self._peers.gone(record.peer):
                raise self._peers.ended(record.peer)
            raise fault_of(record, titles(self.geometry, self._group.ranks.names), self._group.rank)
        self._peers.check()

    def set_bound(self, seconds: float) -> None:
        """How long waits may take from now on, those of captured calls included."""
        self._bound = check_bound(seconds)
        self._driver.set_bound(int(self._bound * 1e9))

    def finish(self) -> None:
        """This rank asks nothing more; until the same holds for all. Unbounded, but peers are watched.

        Raises:
            RankError: a peer left or ended, or the device found a fault.
        """
        self._group.backend.device.synchronize()
        self.poll()
        self._peers.say_done()
        self._peers.wait_done()

    def leave(self, reason: str) -> None:
        """This rank fails: peers hear why at their next look. Waits for nobody and raises nothing (G26)."""
        if not self.closed:
            self._peers.leave(reason)

    def close(self) -> None:
        """Give the memory back, together with all ranks. Graphs with submissions cannot be replayed any more.

        Raises:
            RankError: a peer did not come; everything is freed all the same.
        """
        if self.closed:
            return
        refuse_capturing("rings are closed")
        self.closed = True
        self._driver.close()
        try:
            self._memory.close(lambda: None)
        finally:
            for board in self._boards:
                board.close()

    def _refuse_closed(self, asked: str) -> None:
        self._home.refuse_other("the rings", asked, CollectiveError)
        if self.closed:
            raise CollectiveError("the rings are closed", asked=asked, do="close sessions before them")


def _refuse_group(group: Group, geometry: RingGeometry) -> None:
    if geometry.size != group.size:
        raise CollectiveError(
            "the roles are for another number of ranks",
            asked=f"{geometry.attention} attention and {geometry.ffn} FFN ranks",
            found=f"{group.size} ranks",
            do="as many processes as both roles have ranks",
        )
    maker = group.backend.collectives
    refusal = maker.unsupported() or group.backend.memory.not_exportable()
    if not isinstance(maker, GivesRings):
        refusal = f"the backend {group.backend.name} has no rings"
    facts = group.ranks.exchange("where roles run", (machine(), refusal or ""))
    machines = sorted({where for where, _ in facts})
    found = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(facts) if why]
    found += [f"the ranks are on {len(machines)} machines: {', '.join(machines)}"] if len(machines) > 1 else []
    if found:
        raise CollectiveError(
            "these ranks can have no rings between them", found=found, do="roles on one machine, whose memory maps"
        )
