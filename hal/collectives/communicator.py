"""A communicator: the collectives of one channel, as a program calls them.

Every rank makes the same calls in the same order; captured calls, replays and eager ones mix freely on one stream,
without a wait of the host. A call that no channel does goes to the vendor's collective, and the reason is recorded.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.compiler import is_dynamo_compiling

from halma.hal.backend import Backend, Stream
from halma.hal.collectives import vendor
from halma.hal.collectives.choice import Table
from halma.hal.collectives.comparing import Comparing
from halma.hal.collectives.contract import (
    Call,
    ChannelDriver,
    Choice,
    FlightEntry,
    Kind,
    Operands,
    Refusal,
    StreamMix,
)
from halma.hal.collectives.deciding import Deciding
from halma.hal.collectives.faults import Faults
from halma.hal.collectives.mix_operands import stream_call, stream_operands
from halma.hal.collectives.opening import open_channel
from halma.hal.collectives.operands import call_of, check_apart, check_like, check_root, check_tensor, norm_operands
from halma.hal.collectives.ranks import AnsweringRanks
from halma.hal.collectives.remembered import Calls
from halma.hal.collectives.streams import OneStream
from halma.hal.collectives.tracing import traced
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, current_scope, note_failure
from halma.hal.process import Home
from halma.hal.settings import settings

if TYPE_CHECKING:
    import torch

    from halma.hal.arena.arena import Arena

F = TypeVar("F", bound=Callable[..., Any])

_ids = itertools.count(1)
live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
"""Open communicators by id, for the custom op."""


def _noted(method: F) -> F:
    """A capture inside which a call was refused ends as failed, also if the program swallows the error (G3).

    Where torch.compile traces Python code, an op stands for the call.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # 0.1 us
            return traced(method.__name__, args[0].id, *args[1:], **kwargs)
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
        self._home = Home()
        self._checked = now.checked
        self._calls = Calls()
        self._comparing = Comparing(channel, ranks)
        self._stream = OneStream(channel, backend.device, self._before_replay)
        self._nothing = backend.memory.empty((0,), _uint8())
        self._driver: ChannelDriver | None = None
        self._deciding = Deciding(
            channel, self.size, None if arena is None else arena.layout(channel), backend.capabilities,
            channels=0 if arena is None else len(arena.plan.channels),
            table=table, strict=now.strict, why_vendor=why_vendor,
        )  # fmt: skip
        if arena is not None:
            self._driver = open_channel(
                backend, ranks, arena, channel,
                bound=now.collective_bound, first_epoch=first_epoch, table=table, checked=now.checked,
            )  # fmt: skip
        self._faults = Faults(channel, backend, ranks, self._driver, now.collective_bound, self._calls.names)
        live[self.id] = self

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
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float = 1e-6,
        out: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``residual`` [..., H] becomes itself plus the sum of every rank's ``x``; ``out`` the RMS norm of it.

        ``weight`` [H] has x's dtype or float32. No two of the tensors share memory. Returns ``out``.

        Args:
            scale: float32 [..., H / 128]; then ``out`` is float8_e4m3fn, the norm by 128 columns over their scale
                (:mod:`halma.hal.collectives.arithmetic`).

        Raises:
            As :meth:`all_reduce`.
        """
        kind = Kind.ALL_REDUCE_NORM
        self._check(kind, x=x, residual=residual, weight=weight, out=out, **({} if scale is None else {"scale": scale}))
        operands, detail = norm_operands(x, residual, weight, eps, out, scale)
        self._make(call_of(kind, x, detail=detail, descriptor=self._where()), operands)
        return out

    @_noted
    def all_reduce_streams(
        self, x: torch.Tensor, mix: StreamMix, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor
    ) -> torch.Tensor:
        """The end of one sublayer and the beginning of the next, in a model with four residual streams (mHC).

        The sum of every rank's ``x`` [M, D] goes back into ``mix.streams``, in place; ``out`` [M, D] becomes the RMS
        norm of the next sublayer's mix of them, and ``mix.mixes`` what that one needs for its own way back. As
        ``all_reduce``, ``hc_post``, ``hc_pre`` and ``rms_norm`` of :mod:`halma.ops` one after the other, but for fp32
        rounding (docs/collectives.md). ``weight`` [D] has x's dtype or float32. Returns ``out``.

        Nobody else does it where no channel can: ask :meth:`why_not_streams` first.

        Raises:
            As :meth:`all_reduce`; no channel can do it.
        """
        operands, detail = stream_operands(x, mix, weight, eps, out, self._backend.device.torch_device)
        self._make(stream_call(x.shape[0], x.shape[1], x.dtype, detail, self._where()), operands)
        return out

    def why_not_streams(self, rows: int, row_length: int, dtype: torch.dtype) -> str | None:
        """Why :meth:`all_reduce_streams` cannot be called for [rows, row_length], or None; pure, as :meth:`choice`."""
        choice = self._deciding.choice(stream_call(rows, row_length, dtype))
        return choice.why if isinstance(choice, Refusal) else None

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
        call = self._calls.one(call)
        choice = self._deciding.choice(call)
        if isinstance(choice, Refusal) and call.kind is Kind.ALL_REDUCE_STREAMS:
            raise CollectiveError(
                "no channel can do this call as a whole, and the vendor has none like it",
                asked=call.describe(),
                found=choice.why,
                do="ask why_not_streams() first, and make it of all_reduce and the ops where there is a reason",
            )
        capturing = self._backend.graphs.is_capturing()
        eager = not capturing and current_recorder() is None  # a dry run is neither: its work is thrown away
        if eager and self._driver is not None:
            self.poll()
        if eager and self._checked:
            self._comparing.eager(call, choice)
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
            self._comparing.file(call, choice)
            self._calls.captured(call)
        self._driver.launch(call, choice, operands, box, stream)

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

    def _before_replay(self) -> None:
        """See :class:`OneStream`. In checked mode the first replay compares all that was captured (C6)."""
        self._home.refuse_other("the communicator", "a replay", CollectiveError)
        if self.id not in live:
            raise CollectiveError(
                "a graph has calls of a communicator that is closed",
                asked="a replay",
                do="close sessions before their communicators, and those before their arena",
            )
        if self._arena is not None:
            self._arena.refuse_closed("a replay of a graph with calls of a channel")
        if self._checked and self._comparing.filed:
            self.compare_captured()

    def compare_captured(self) -> int:
        """Compare the calls captured since the last comparison with the other ranks'; all ranks come. Returns how many.

        Sessions over an arena do so with its ledger, by kind, size, dtype and algorithm; this compares all of a call.
        In checked mode the first replay does it.

        Raises:
            CollectiveError: the first difference.
        """
        return self._comparing.captured()

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
        self._faults.poll()

    def wait(self) -> None:
        """Wait for the device, then :meth:`poll`: what is read behind it is of calls that went well.

        A call that meets a mismatch may leave sums that look valid in a part of its result; but no call ends on the
        device before its headers were compared, so behind a wait the fault is always known.

        Raises:
            ChannelFault: as :meth:`poll`.
        """
        self._backend.device.synchronize()
        self.poll()

    def flight(self) -> list[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        return self._faults.flight()

    def set_bound(self, seconds: float) -> None:
        """How long waits may take from now on, those of captured calls included.

        Raises:
            CollectiveError: no number of seconds above 0, as ``HALMA_COLLECTIVE_BOUND`` takes.
        """
        self._home.refuse_other("the communicator", "set_bound()", CollectiveError)
        self._faults.set_bound(seconds)

    def rearm(self) -> None:
        """Forget the fault and go on, without another capture. Every rank calls it; what is queued drains first.

        Raises:
            RankError: a rank did not come: then the channel stays as it is.
            CollectiveError, ArenaError: the communicator or its arena is closed.
        """
        self._refuse_closed(lambda: "rearm()")
        self._faults.rearm()

    def rearm_from(self, epoch: int) -> None:
        """As :meth:`rearm`, from an epoch that the caller says is every rank's; for tests of the wrap."""
        self._faults.rearm_from(epoch)

    def close(self) -> None:
        """Let go of the channel; the arena frees its memory. Calls and the custom op with its id raise from now on."""
        live.pop(self.id, None)
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            self._faults.close()
            if self._arena is not None:
                self._arena.vacate(self.channel)

    def _refuse_closed(self, asked: Callable[[], str]) -> None:
        self._home.refuse_other("the communicator", asked, CollectiveError)
        if self.id not in live:
            raise CollectiveError("the communicator is closed", asked=asked(), do="make a new one")
        if self._arena is not None and self._arena.closed:
            self._arena.refuse_closed(asked())


def _uint8() -> Any:
    import torch

    return torch.uint8
