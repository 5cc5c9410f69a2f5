"""Dispatch and combine: tokens to the ranks that have their experts, and sums back (F1 to F4, F11 to F13, F16).

    exchange = Exchange.open(group, max_tokens=128, hidden=4096, top_k=6, experts=256, payload="fp8")
    handed = exchange.dispatch(x, ids, weights)      # ExpertRows: a row once a rank, slots by expert, device counts
    parts = grouped_ffn(handed.rows, handed.scales, handed.index, handed.weights, handed.counts, ...)
    out = exchange.combine(parts, handed)            # [M, hidden]

*Worst-token mode* (the default) has shapes from ``max_tokens`` alone; no call reads, writes or waits on the host, so
eager calls, captures and replays mix freely. *Host-synced mode* (``host_counts=True``, eager only) reads the sizes of
its own dispatch from tensors of its own; the two modes share no counter (F1).

Every rank makes the same calls in the same order, with as many tokens as it has, none included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakSet

import torch

from halma.hal.arena.memory import SymmetricMemory
from halma.hal.collectives.contract import FlightEntry
from halma.hal.collectives.exchange_checks import check_alone, check_ids, check_outgoing, check_returning
from halma.hal.collectives.exchange_contract import (
    ExchangeCall,
    ExchangeDriver,
    Layout,
    Outgoing,
    Returning,
    Step,
)
from halma.hal.collectives.exchange_geometry import LIMIT, Geometry
from halma.hal.collectives.exchange_kept import NUMBERS, KeptLayout
from halma.hal.collectives.exchange_memory import layout_tensors, open_driver, prepare, refuse_written_guards
from halma.hal.collectives.exchange_opening import Terms, agreed
from halma.hal.collectives.exchange_sizes import Sizes
from halma.hal.collectives.exchange_tuning import TABLE, Key, Tuning
from halma.hal.collectives.exchange_turns import Dispatched, Turns, handed_out, not_combined
from halma.hal.collectives.exchange_vendor import TorchExchange
from halma.hal.collectives.expert_rows import ExpertRows
from halma.hal.collectives.faults import Faults
from halma.hal.collectives.group import Group
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_failure
from halma.hal.process import Home
from halma.hal.settings import settings

NAME: Final = "exchange"


class Exchange:
    """Dispatch and combine among the ranks of a group; :meth:`open` makes it on all of them. Not thread-safe.

    Attributes:
        geometry: what all ranks have in common.
        why_vendor: why it goes through torch.distributed; empty where ranks share memory.
        key, tuning: how it is launched.
    """

    def __init__(self, group: Group, terms: Terms, epoch: int) -> None:
        now = settings()
        geometry, why_vendor = terms.geometry, terms.why_vendor
        self.geometry, self.key, self.tuning, self.why_vendor = geometry, terms.key, terms.tuning, why_vendor
        self.rank, self.size = group.rank, group.size
        self.descriptor = ""
        self._backend, self._checked = group.backend, now.checked
        self._home, self._closed = Home(), False
        self._carrier, self._acc = (getattr(torch, name) for name in (geometry.given, geometry.accumulator))
        self._memory: SymmetricMemory | None = None
        self._driver: ExchangeDriver
        sent = getattr(torch, geometry.sent)
        if why_vendor:
            empty = self._backend.memory.empty
            self._rows = empty((geometry.landing, geometry.hidden), sent)
            self._scales = empty((geometry.landing, geometry.groups), torch.float32) if geometry.groups else None
            self._driver = TorchExchange(geometry, group.world, group.rank, self._rows, self._scales)
        else:
            places = geometry.places
            self._memory = SymmetricMemory.create(
                group.backend, group.ranks, places.end, lambda memory: prepare(memory, places)
            )
            own = self._memory.own.tensor
            rows = own[places.rows.offset :][: places.rows.nbytes]
            self._rows = rows.view(sent).view(geometry.landing, geometry.hidden)
            scales = own[places.scales.offset :][: places.scales.nbytes].view(torch.float32)
            self._scales = scales.view(geometry.landing, geometry.groups) if geometry.groups else None
            self._driver = open_driver(
                group, terms, self._memory, self._rows, self._scales, bound=now.collective_bound, epoch=epoch
            )
        self._group, self._kept = group, WeakSet[KeptLayout]()
        self._layouts = {host: layout_tensors(group, geometry) for host in (False, True)}
        self._calls: dict[tuple[Step, int, bool, int], ExchangeCall] = {}
        self._fills = 0
        self._names: dict[int, str] = {}
        self._turns = Turns(NAME, group.backend, self._refuse_closed)
        self._faults = Faults(NAME, group.backend, group.ranks, self._driver, now.collective_bound, self._names)

    @classmethod
    def open(
        cls,
        group: Group,
        *,
        max_tokens: int,
        hidden: int,
        top_k: int,
        experts: int,
        payload: str = "bf16",
        alignment: int = 1,
        limit: int = LIMIT,
        table: Mapping[Key, Tuning] = TABLE,
        first_epoch: int = 0,
    ) -> Exchange:
        """An exchange on every rank of ``group``; all of them call it, and nothing is allocated before they agree.

        Args:
            max_tokens: most tokens that a rank sends in one call; memory is sized by it.
            experts: of all ranks together; each has a run of them, uneven where they do not divide.
            payload: ``bf16``, ``fp8`` (bf16 in, e4m3fn with a power-of-two scale per 128 columns on the way out,
                bf16 back), or ``fp32`` and ``fp64`` for exact arithmetic.
            alignment: of an expert's first slot.
            limit: most bytes of a rank's memory.
            table: measured launch numbers.
            first_epoch: before the first call; for tests of the wrap.

        Raises:
            CollectiveError: on every rank: a geometry that cannot be, ranks that differ in a field (by its name), or
                launch numbers that do not hold here.
            ArenaError: a rank has not the memory.
            RankError: a rank did not come.
        """
        asked = (max_tokens, hidden, top_k, experts, payload, alignment)
        terms = agreed(group, lambda: Geometry(group.size, *asked), limit, table, first_epoch)
        made = cls(group, terms, first_epoch)
        made._backend.device.synchronize()
        # Every kernel is loaded on every rank before the first call can spin (C18).
        group.ranks.exchange("an exchange is open", None)
        return made

    def new_layout(self) -> KeptLayout:
        """Memory for a layout that outlives its dispatch (:mod:`halma.hal.collectives.exchange_kept`)."""
        self._refuse_closed("new_layout()")
        made = KeptLayout(layout_tensors(self._group, self.geometry), self.geometry, self._group.ranks, self.rank)
        self._backend.device.synchronize()
        self._kept.add(made)
        return made

    # -- calls --------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        bound: int | None = None,
        host_counts: bool = False,
        keep: KeptLayout | None = None,
        layout: KeptLayout | None = None,
    ) -> Dispatched:
        """Send every token to the ranks that have its experts; what they have sent here is handed out.

        Args:
            x: [M, hidden], M from 0 to ``bound``; rows whose ids are all -1 are never read.
            ids: int64 [M, k], experts of all ranks; -1: none. Others outside count as none, and are refused where the
                host looks: in host-synced mode and with ``HALMA_CHECKED``.
            weights: acc [M, k].
            bound: most tokens of any rank in this call, the same on all; by default ``max_tokens``. Slots and their
                scratch are sized by it.
            host_counts: host-synced mode.
            keep: where the layout goes instead of memory that the next dispatch writes again.
            layout: a kept one, of the same routing: no ids and weights then, and nothing is sorted; the bound is its.

        Returns:
            Rows and slots; ``index`` and ``weights`` have ``geometry.capacity(bound)`` slots, or in host-synced mode
            just those up to the last expert's end.

        Raises:
            CollectiveError: operands or a bound that cannot be, before anything is sent; or the dispatch before has no
                combine.
            RankError: the sticky fault.
        """
        try:
            if layout is not None:
                return self._dispatch_kept(x, layout, (ids, weights, bound, keep), host_counts)
            if ids is None or weights is None:
                raise CollectiveError("a dispatch needs ids and weights", do="or layout=, a kept one")
            return self._dispatch(x, ids, weights, bound, host_counts, keep)
        except BaseException as error:
            note_failure(error)
            raise

    def _dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        bound: int | None,
        host: bool,
        keep: KeptLayout | None,
    ) -> Dispatched:
        geometry = self.geometry
        call = self._call(Step.DISPATCH, geometry.max_tokens if bound is None else bound, host)
        self._refuse_closed(call.describe())
        count = check_outgoing(geometry, call, self._backend.device.torch_device, x, ids, weights)
        capturing, eager = self._open(call, host)
        if host and keep is not None:
            raise CollectiveError("a kept layout is of worst-token mode", do="leave host_counts out")
        layout = self._layouts[host]
        if keep is not None:
            layout = keep.to_fill(geometry, self._group.ranks, self.rank, call.describe(), capturing, eager)
        if eager and (host or self._checked):
            check_ids(ids, geometry.experts)
        handed = self._send(call, count, Outgoing(x, ids, weights, self._cut(layout, call.bound)), capturing, eager)
        if keep is not None and (capturing or eager):
            self._fills += 1
            keep.fill(count, call.bound, self._fills % NUMBERS + 1, capturing)
        return handed

    def _dispatch_kept(self, x: torch.Tensor, layout: KeptLayout, others: tuple[Any, ...], host: bool) -> Dispatched:
        check_alone(host, others)
        geometry = self.geometry
        self._refuse_closed("a dispatch by a kept layout")
        capturing, eager = self._how()
        count = x.shape[0] if x.dim() == 2 else 0
        tensors, bound, number = layout.to_use(geometry, self._group.ranks, self.rank, count, capturing, eager)
        call = self._call(Step.DISPATCH, bound, False, number)
        check_outgoing(geometry, call, self._backend.device.torch_device, x)
        self._open(call, False)
        return self._send(call, count, Outgoing(x, None, None, self._cut(tensors, bound)), capturing, eager)

    def _open(self, call: ExchangeCall, host: bool) -> tuple[bool, bool]:
        """(captured, eager) of a dispatch whose turn it is."""
        capturing, eager = self._how()
        if host and not eager:
            raise CollectiveError(
                "host-synced dispatch cannot be captured",
                asked=call.describe(),
                do="leave host_counts out: sizes then stay on the device, and shapes come from the bound",
            )
        if (capturing or eager) and (before := self._turns.opened(capturing)) is not None:
            raise not_combined(before, call.describe())
        if eager:
            self.poll()
        return capturing, eager

    def _send(self, call: ExchangeCall, count: int, operands: Outgoing, capturing: bool, eager: bool) -> Dispatched:
        self._driver.dispatch(call, operands, self._stream(capturing, eager))
        handed = handed_out(self.geometry, self._rows, self._scales, call, count, operands.layout)
        if call.host:
            handed = self._sized(handed)
        if capturing or eager:
            self._turns.turn(capturing, handed)
        return handed

    def _cut(self, layout: Layout, bound: int) -> Layout:
        return layout.cut(self.geometry.capacity(bound))

    def _sized(self, handed: Dispatched) -> Dispatched:
        self._backend.device.synchronize()
        self.poll()
        layout = handed.layout
        counts, offsets, (total,) = _numbers(layout.counts), _numbers(layout.offsets), _numbers(layout.total)
        sizes = Sizes.checked(counts, offsets, total, self.geometry.alignment, layout.index.shape[0])
        return handed_out(self.geometry, self._rows, self._scales, handed.call, handed.count, layout, sizes)

    def combine(self, parts: torch.Tensor, handed: ExpertRows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Add up what experts made of every token, and bring it back to where the token came from.

        A rank's slots of a token are added in the order of the choices, from 0, in acc, and rounded to the given
        dtype; the source adds ranks in rank order, from 0, in acc. So a token's bits do not depend on where it came
        from.

        Args:
            parts: [C, hidden], carrier or acc, C as ``handed.index``; slots without a row are never read.
            handed: what :meth:`dispatch` handed out last; sizes come from it and from nothing else (F2).
            out: [M, hidden], carrier or acc; by default new memory of the accumulator's type. Captured programs give
                one.

        Raises:
            CollectiveError: operands that cannot be, or rows that were not handed out last.
            RankError: the sticky fault.
        """
        try:
            return self._combine(parts, handed, out)
        except BaseException as error:
            note_failure(error)
            raise

    def _combine(self, parts: torch.Tensor, handed: ExpertRows, out: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(handed, Dispatched):
            raise CollectiveError(
                "combine takes what dispatch handed out", found=type(handed).__name__, do="out = combine(parts, handed)"
            )
        call = self._call(Step.COMBINE, handed.call.bound, handed.call.host)
        self._refuse_closed(call.describe())
        capturing, eager = self._how()
        if (capturing or eager) and self._turns.opened(capturing) is not handed:
            raise CollectiveError(
                "these rows were not handed out last",
                asked=call.describe(),
                found="they were combined already, or come from another graph or exchange",
                do="combine each dispatch once, before the next one, in the same graph",
            )
        shape = (handed.count, self.geometry.hidden)
        out = torch.empty(shape, dtype=self._acc, device=parts.device) if out is None else out
        device = self._backend.device.torch_device
        check_returning(self.geometry, device, handed.index.shape[0], handed.count, parts, out)
        if eager:
            self.poll()
        stream = self._stream(capturing, eager)
        self._driver.combine(call, Returning(parts, out, handed.layout), stream)
        if capturing or eager:
            self._turns.turn(capturing, None)
        return out

    def _call(self, step: Step, bound: int, host: bool, kept: int = 0) -> ExchangeCall:
        # One object for all equal calls: drivers find what they prepared by its identity.
        call = self._calls.get((step, bound, host, kept))
        if call is None:
            call = self._calls[step, bound, host, kept] = ExchangeCall(step, bound, host, kept)
            self._names[call.digest] = call.describe()
        return call

    def _how(self) -> tuple[bool, bool]:
        """(captured, eager); neither in a dry run, whose work is thrown away."""
        capturing = self._backend.graphs.is_capturing()
        return capturing, not capturing and current_recorder() is None

    def _stream(self, capturing: bool, eager: bool) -> Any:
        stream = self._backend.device.current_stream()
        if capturing:
            self._turns.captured_call(stream)
        elif eager:
            self._turns.eager(stream)
        return stream

    # -- faults, end ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Raise the sticky fault, if there is one; waits for nothing where there is none.

        Raises:
            ChannelFault: with the rank that is missing, the flag that was waited for, expected and seen.
        """
        self._faults.poll()

    def wait(self) -> None:
        """Wait for the device, then :meth:`poll`."""
        self._backend.device.synchronize()
        self.poll()

    def flight(self) -> list[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        return self._faults.flight()

    def set_bound(self, seconds: float) -> None:
        """How long waits may take from now on, those of captured calls included."""
        self._home.refuse_other("the exchange", "set_bound()", CollectiveError)
        self._faults.set_bound(seconds)

    def rearm(self) -> None:
        """Forget the fault, what was dispatched and kept, and go on; every rank calls it, captures stay good."""
        self._refuse_closed("rearm()")
        self._turns.forget()
        for kept in self._kept:
            kept.forget()
        self._faults.rearm()

    def epoch(self) -> int:
        """How many calls there were, once the device is idle; 0 where torch.distributed makes them."""
        self._backend.device.synchronize()
        return self._driver.epoch()

    def close(self) -> None:
        """Give the memory back; all ranks call it, twice is once. Graphs with its calls cannot be replayed any more.

        Raises:
            CollectiveError: in checked mode, and when all is freed: a guard zone was written to.
        """
        self._home.refuse_other("the exchange", "close()", CollectiveError)
        if self._closed:
            return
        self._closed = True
        self._backend.device.synchronize()
        self._driver.close()
        self._faults.close()
        if (memory := self._memory) is not None:
            places = self.geometry.places
            memory.close(lambda: refuse_written_guards(memory.own.tensor, places) if self._checked else None)

    def _refuse_closed(self, asked: str) -> None:
        self._home.refuse_other("the exchange", asked, CollectiveError)
        if self._closed:
            raise CollectiveError("the exchange is closed", asked=asked, do="open a new one")


def _numbers(tensor: torch.Tensor) -> list[int]:
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
