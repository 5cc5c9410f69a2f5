"""A communicator: the collectives of one channel, as a program calls them.

Every rank makes the same calls in the same order; captured calls, replays and eager ones mix freely on one stream,
without a wait of the host. A call that no channel does goes to the vendor's collective, and the reason is recorded.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from halma.hal.backend import Backend, Stream
from halma.hal.collectives import vendor
from halma.hal.collectives.choice import Table, name_of
from halma.hal.collectives.contract import (
    FLIGHT_BYTES,
    Call,
    ChannelDriver,
    ChannelSite,
    Choice,
    FlightEntry,
    Kind,
    Operands,
    Refusal,
)
from halma.hal.collectives.deciding import VENDOR, Deciding
from halma.hal.collectives.operands import (
    call_of,
    check_apart,
    check_bound,
    check_eps,
    check_like,
    check_root,
    check_tensor,
)
from halma.hal.collectives.operands import name_of as dtype_name
from halma.hal.collectives.ranks import AnsweringRanks
from halma.hal.collectives.report import Answers, ChannelFault, channel_fault
from halma.hal.collectives.streams import OneStream
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, current_scope, note_failure
from halma.hal.settings import settings

if TYPE_CHECKING:
    import torch

    from halma.hal.arena.arena import Arena

FLIGHT_ENTRIES: Final = 256
ANSWER_SECONDS: Final = 5.0
"""How long a report waits for the others' flight recorders; they faulted at about the same time, or never will."""

F = TypeVar("F", bound=Callable[..., Any])

_ids = itertools.count(1)
live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
"""Open communicators by id, for the custom op."""


def _noted(method: F) -> F:
    """A capture inside which a call was refused ends as failed, also if the program swallows the error (G3)."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            note_failure(error)
            raise

    return call  # pyright: ignore[reportReturnType]


class Communicator:
    """The collectives of one channel on this rank. Not thread-safe.

    Args:
        backend, ranks: the group's.
        arena: where the channel lies; None: every call is the vendor's, for the reason ``why_vendor``.
        channel: its name in the arena's plan.
        group: the torch.distributed group that takes what no channel does.
        why_vendor: why this group has no channel.
        table: measured choices, equal on every rank.
        first_epoch: the channel's epoch before its first call; for tests of the wrap.

    Raises:
        ArenaError: the arena is closed, or the channel has a communicator that is not closed.
        CollectiveError: ranks disagree on the table or the channel; or all channels' grids do not fit the device
            together (C16).
        RankError: a rank did not come.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: AnsweringRanks,
        arena: Arena | None,
        channel: str = "main",
        *,
        group: Any = None,
        why_vendor: str = "",
        table: Table = (),
        first_epoch: int = 0,
    ) -> None:
        now = settings()
        self.id = next(_ids)
        self.channel = channel
        self.rank, self.size = ranks.rank, ranks.size
        self.descriptor = ""
        self._backend, self._ranks, self._arena, self._group = backend, ranks, arena, group
        self._checked = now.checked
        self._calls: dict[Call, Call] = {}
        self._known: dict[int, str] = {}
        self._filed: list[str] = []
        self._eager_calls = 0
        self._stream = OneStream(channel, backend.device, self._before_replay)
        self._fault: ChannelFault | None = None
        self._arms = 0
        self._bound = now.collective_bound
        self._nothing = backend.memory.empty((0,), _uint8())
        self._driver: ChannelDriver | None = None
        self._deciding = Deciding(
            channel, self.size, None if arena is None else arena.layout(channel), backend.capabilities,
            channels=0 if arena is None else len(arena.plan.channels),
            table=table, strict=now.strict, why_vendor=why_vendor,
        )  # fmt: skip
        if arena is not None:
            again = arena.occupy(channel)
            try:
                self._driver = self._open(arena, first_epoch, table, again)
            except BaseException:
                arena.vacate(channel)
                raise
        live[self.id] = self

    def _open(self, arena: Arena, first_epoch: int, table: Table, again: bool) -> ChannelDriver:
        self._recorder = self._backend.memory.pinned((FLIGHT_ENTRIES * FLIGHT_BYTES,), _uint8())
        self._recorder.zero_()
        capability = self._backend.capabilities.dependent_launch
        driver = self._backend.collectives.channel(
            ChannelSite(
                rank=self.rank,
                size=self.size,
                layout=arena.layout(self.channel),
                own=arena.own,
                peers=arena.peers,
                bound_ns=int(self._bound * 1e9),
                dependent=capability is True,
                recorder=self._recorder,
                first_epoch=first_epoch,
                channels=len(arena.plan.channels),
            )
        )
        if again:
            # The one before left flags of the same epochs, maybe a fault. Once all are here nobody sends any more.
            self._backend.device.synchronize()
            self._ranks.exchange(f"channel {self.channel} is opened again", None)
            driver.rearm(first_epoch)
            self._backend.device.synchronize()
        # Every kernel is loaded on every rank before the first call can spin (C18).
        terms = (self.channel, first_epoch, tuple(table), self._checked)
        self._refuse_difference("the channel", self._ranks.exchange(f"channel {self.channel} is loaded", terms))
        return driver

    # -- calls --------------------------------------------------------------------------------------

    @_noted
    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of every rank's ``x`` [any shape], in place or into ``out``; returns where it is.

        The same bits on every rank and by every algorithm: float32, in order of ranks, rounded once (C1).

        Raises:
            CollectiveError: a tensor that cannot be taken, or calls that differ between ranks (checked mode).
            RankError: the channel's sticky fault.
        """
        kind, out = Kind.ALL_REDUCE, x if out is None else out
        self._check(kind, x=x, out=out)
        check_like(kind, "out", out, tuple(x.shape), x.dtype)
        check_apart(kind, ("x", x), ("out", out), same=True)
        self._make(call_of(kind, x, descriptor=self._where()), Operands(x, out))
        return out

    @_noted
    def all_reduce_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor
    ) -> torch.Tensor:
        """``residual`` [..., H] becomes itself plus the sum of every rank's ``x``; ``out`` the RMS norm of it.

        ``weight`` [H] has x's dtype or float32. No two of the tensors share memory. Returns ``out``.

        Raises:
            As :meth:`all_reduce`.
        """
        kind = Kind.ALL_REDUCE_NORM
        self._check(kind, x=x, residual=residual, weight=weight, out=out)
        eps = check_eps(kind, eps)
        if not x.dim() or not x.shape[-1] or not x.is_floating_point():
            raise CollectiveError(
                "all_reduce_norm cannot take x",
                found=f"{dtype_name(x.dtype)}{list(x.shape)}",
                do="give it rows [..., H] of floating numbers",
            )
        for name, tensor in (("residual", residual), ("out", out)):
            check_like(kind, name, tensor, tuple(x.shape), x.dtype)
        wide = weight.dtype if weight.dtype == _float32() else x.dtype
        check_like(kind, "weight", weight, (x.shape[-1],), wide)
        named = (("x", x), ("residual", residual), ("weight", weight), ("out", out))
        for one, two in itertools.combinations(named, 2):
            check_apart(kind, one, two)
        detail = f"rows of {x.shape[-1]}, eps {eps!r}, weight {dtype_name(weight.dtype)}"
        operands = Operands(x, residual, residual, weight, out, eps=eps, row_length=x.shape[-1])
        self._make(call_of(kind, x, detail=detail, descriptor=self._where()), operands)
        return out

    @_noted
    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x`` [any shape] into ``out`` [ranks, ...], by rank; any dtype. Returns ``out``.

        Raises:
            As :meth:`all_reduce`.
        """
        kind = Kind.ALL_GATHER
        self._check(kind, x=x, out=out)
        check_like(kind, "out", out, (self.size, *x.shape), x.dtype)
        check_apart(kind, ("x", x), ("out", out))
        self._make(call_of(kind, x, descriptor=self._where()), Operands(x, out))
        return out

    @_noted
    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """``x`` of rank ``root`` of the group, in place on every rank; any dtype. Returns ``x``.

        Raises:
            As :meth:`all_reduce`; there is no such rank.
        """
        self._check(Kind.BROADCAST, x=x)
        check_root(root, self.size)
        self._make(call_of(Kind.BROADCAST, x, root=root, descriptor=self._where()), Operands(x, x))
        return x

    @_noted
    def barrier(self) -> None:
        """Nothing behind it runs, on this rank's device, before every rank's device has come to it.

        Raises:
            As :meth:`all_reduce`.
        """
        self._make(Call(Kind.BARRIER, 0, "uint8", descriptor=self._where()), Operands(self._nothing, self._nothing))

    def _check(self, kind: Kind, **tensors: Any) -> None:
        for name, value in tensors.items():
            check_tensor(kind, name, value, self._backend.device.torch_device)

    def _make(self, call: Call, operands: Operands) -> None:
        self._refuse_closed(call.describe)
        call = self._calls.get(call) or self._first(call)
        choice = self._deciding.choice(call)
        capturing = self._backend.graphs.is_capturing()
        eager = not capturing and current_recorder() is None  # a dry run is neither: its work is thrown away
        if eager and self._driver is not None:
            self.poll()
        if eager and self._checked:
            self._agree(call, choice)
        if isinstance(choice, Refusal):
            vendor.run(call, operands, self._group, self.size)
            return
        assert self._driver is not None and self._arena is not None
        stream = self._backend.device.current_stream()
        if capturing:
            self._stream.captured_call(stream)
        elif eager:
            self._stream.eager(stream)
        box = self._arena.take(call, choice.algorithm, self.channel) if capturing else None
        if capturing:
            self._filed.append(f"{call.describe()} by {name_of((choice.algorithm, choice.wire))}")
        self._driver.launch(call, choice, operands, box, stream)

    def _first(self, call: Call) -> Call:
        """One object stands for all equal calls: drivers keep what they prepared for it by its identity."""
        self._known[call.digest] = call.describe()
        return self._calls.setdefault(call, call)

    def choice(self, call: Call) -> Choice | Refusal:
        """How a call is, or would be, done; a pure function of agreed values (C5)."""
        return self._deciding.choice(call)

    def epoch(self) -> int:
        """The channel's epoch, once the device is idle; 0 where there is no channel."""
        self._backend.device.synchronize()
        return 0 if self._driver is None else self._driver.epoch()

    # -- one stream ---------------------------------------------------------------------------------

    @_noted
    def hand_over(self, stream: Stream) -> None:
        """Declare that the channel's next calls are made on ``stream``: it waits for the calls made so far."""
        self._stream.hand_over(stream, self._backend.graphs.is_capturing())

    # -- ranks that disagree ------------------------------------------------------------------------

    def _agree(self, call: Call, choice: Choice | Refusal) -> None:
        """Checked mode: compare an eager call with the other ranks' before anybody waits on the device (C6, C12)."""
        self._eager_calls += 1
        way = VENDOR if isinstance(choice, Refusal) else name_of((choice.algorithm, choice.wire))
        mine = (call.describe(), way)
        stage = f"eager call {self._eager_calls} of channel {self.channel}"
        self._refuse_difference(stage, self._ranks.exchange(stage, mine))

    def _before_replay(self) -> None:
        """See :class:`OneStream`. In checked mode the first replay compares all that was captured (C6)."""
        if self.id not in live:
            raise CollectiveError(
                "a graph has calls of a communicator that is closed",
                asked="a replay",
                do="close sessions before their communicators, and those before their arena",
            )
        if self._arena is not None:
            self._arena.refuse_closed("a replay of a graph with calls of a channel")
        if self._checked and self._filed:
            self.compare_captured()

    def compare_captured(self) -> int:
        """Compare the calls captured since the last comparison with the other ranks'; all ranks come. Returns how many.

        Sessions over an arena do so with its ledger, by kind, size, dtype and algorithm; this compares all of a call.
        In checked mode the first replay does it.

        Raises:
            CollectiveError: the first difference.
        """
        filed, self._filed = self._filed, []
        lists = self._ranks.exchange(f"captured calls of channel {self.channel}", filed)
        for position in range(max(map(len, lists))):
            rows = [one[position] if position < len(one) else "nothing" for one in lists]
            self._refuse_difference(f"captured call {position + 1}", rows)
        return len(filed)

    def _refuse_difference(self, what: str, values: Sequence[Any]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise CollectiveError(
                    f"ranks do not agree on {what}: rank {rank} ({self._ranks.names[rank]}) differs from rank 0",
                    found=(f"rank 0: {_shown(values[0])}", f"rank {rank}: {_shown(value)}"),
                    do="every rank makes the same calls, with the same shapes, in the same order",
                )

    def _where(self) -> str:
        scope = current_scope()
        return str(scope.graph) if scope is not None and scope.graph.name else self.descriptor

    @contextmanager
    def step(self, descriptor: object) -> Generator[None]:
        """Eager calls inside belong to ``descriptor``: in reports, and in what ranks must have in common."""
        before, self.descriptor = self.descriptor, str(descriptor)
        try:
            yield
        finally:
            self.descriptor = before

    # -- faults -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Raise the channel's sticky fault, if there is one; waits for nothing where there is none.

        Raises:
            ChannelFault: a :class:`RankError` with the record and every answering rank's last calls.
        """
        if self._fault is None and self._driver is not None:
            record = self._driver.error()
            if record is not None:
                seconds = min(ANSWER_SECONDS, 2 * self._bound + 1)
                stage = f"fault {self._arms} of channel {self.channel}"  # ranks may have faulted in different calls
                answers = Answers(self.size, self._ranks.answers(stage, self.flight(), seconds))
                self._fault = channel_fault(
                    self.channel, self.rank, self._ranks.names, record, answers, self._known
                )
        if self._fault is not None:
            raise self._fault

    def flight(self) -> list[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        return [] if self._driver is None else list(self._driver.flight())

    def set_bound(self, seconds: float) -> None:
        """How long waits may take from now on, those of captured calls included.

        Raises:
            CollectiveError: no number of seconds above 0, as ``HALMA_COLLECTIVE_BOUND`` takes.
        """
        self._bound = check_bound(seconds)
        if self._driver is not None:
            self._driver.set_bound(int(self._bound * 1e9))

    def rearm(self) -> None:
        """Forget the fault and go on, without another capture. Every rank calls it; what is queued drains first.

        Raises:
            RankError: a rank did not come: then the channel stays as it is.
            CollectiveError, ArenaError: the communicator or its arena is closed.
        """
        self._refuse_closed(lambda: "rearm()")
        if self._driver is None:
            return
        self._backend.device.synchronize()
        epoch = max(self._ranks.exchange(f"rearm of channel {self.channel}", self._driver.epoch()))
        self.rearm_from(epoch)

    def rearm_from(self, epoch: int) -> None:
        """As :meth:`rearm`, from an epoch that the caller says is every rank's; for tests of the wrap."""
        assert self._driver is not None
        self._driver.rearm(epoch)
        self._backend.device.synchronize()
        self._ranks.exchange(f"channel {self.channel} is armed", None)
        self._fault = None
        self._arms += 1

    def close(self) -> None:
        """Let go of the channel; the arena frees its memory. Calls and the custom op with its id raise from now on."""
        live.pop(self.id, None)
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            if self._arena is not None:
                self._arena.vacate(self.channel)

    def _refuse_closed(self, asked: Callable[[], str]) -> None:
        if self.id not in live:
            raise CollectiveError("the communicator is closed", asked=asked(), do="make a new one")
        if self._arena is not None and self._arena.closed:
            self._arena.refuse_closed(asked())


def _shown(value: Any) -> str:
    return ", by ".join(map(str, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else str(value)


def _uint8() -> Any:
    import torch

    return torch.uint8


def _float32() -> Any:
    import torch

    return torch.float32
