"""One capture session's part of an arena: whose call is being captured, what it took, what may be replayed.

A *persistent* session keeps what its descriptors took until it closes. A *scratch* session may capture a descriptor
again, which gives the first capture's slots back, and gives everything back when it closes: a profiling pass that
seals an arena for good keeps the real one from starting (MooreThreads/vllm-musa#178).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from halma.hal.arena.coverage import check_ladder
from halma.hal.arena.ledger import Ledger, LedgerEntry
from halma.hal.collectives.contract import Algorithm, Box, Call
from halma.hal.errors import ArenaError
from halma.hal.graph.descriptor import Descriptor

if TYPE_CHECKING:
    from halma.hal.arena.arena import Arena


class Use:
    """Made by :meth:`Arena.session`; not thread-safe."""

    def __init__(self, arena: Arena, kind: str) -> None:
        self.arena = arena
        self.kind = kind
        self.ledger = Ledger()
        self.captured: set[Descriptor] = set()
        self.settled: set[Descriptor] = set()
        self.closed = False

    # -- capturing ----------------------------------------------------------------------------------

    def check(self, descriptors: Sequence[Descriptor]) -> None:
        """Check a ladder against the plan; see :func:`halma.hal.arena.coverage.check_ladder`."""
        check_ladder(self.arena.plan, descriptors, self.arena.policy)

    @contextmanager
    def recording(self, descriptor: Descriptor) -> Generator[None]:
        """Calls that are captured inside belong to ``descriptor``. After an exception it has taken nothing.

        Raises:
            ArenaError: another descriptor is being captured; this one was (A6); the session or arena is closed; or,
                at the end, there were not as many calls as the plan has slots.
        """
        self._refuse_closed(f"a capture of {descriptor}")
        if self.arena.recording is not None:
            raise ArenaError(
                "captures on one arena do not nest",
                asked=f"a capture of {descriptor}",
                found=f"{self.arena.recording} is being captured",
                do="end that capture first",
            )
        self._refuse_taken(descriptor)
        self.give_back(descriptor)
        self.arena.start_recording(self, descriptor)
        try:
            yield
            self._refuse_odd_count(descriptor)
        except BaseException:
            self.give_back(descriptor)
            raise
        finally:
            self.arena.end_recording()
        self.captured.add(descriptor)

    def _refuse_taken(self, descriptor: Descriptor) -> None:
        holder = self if descriptor in self.captured else self.arena.holder(descriptor)
        if holder is None or (holder is self and self.kind == "scratch"):
            return
        where = "this session" if holder is self else f"another, {holder.kind} session"
        raise ArenaError(
            f"{descriptor} was captured already",
            asked=f"to capture it in a {self.kind} session",
            found=f"{where} holds what its calls took: a graph may still use it",
            do="close that session first; profiling belongs into a scratch session, before the persistent one",
        )

    def _refuse_odd_count(self, descriptor: Descriptor) -> None:
        """Fewer calls than planned bring a slot's next use closer than its readers may be late."""
        table = self.arena.plan.slots
        if table is None or descriptor not in table.runs:
            return
        made, planned = self.ledger.count(descriptor), table.runs[descriptor].calls
        if made != planned:
            raise ArenaError(
                f"{descriptor} made {made} calls, and {planned} slots are planned for it",
                asked=f"{planned} calls a descriptor",
                found=f"{made} captured calls",
                do=f"plan_slots(calls_per_descriptor={made}), or find the calls that are missing",
            )

    def take(self, descriptor: Descriptor, call: Call, algorithm: Algorithm, channel: str) -> Box | None:
        """File a captured call, and its slot where the plan has them. For :meth:`Arena.take`."""
        reason = self.arena.plan.refusal(descriptor)
        if reason is not None:
            raise ArenaError(
                f"{descriptor} may not use the arena",
                asked=call.describe(),
                found=reason,
                do="this descriptor's calls take the vendor's collectives; check the ladder before capture",
            )
        ordinal = self.ledger.count(descriptor)
        box, table = None, self.arena.plan.slots
        if table is not None:
            run = table.runs[descriptor]
            if call.nbytes > run.nbytes:
                raise ArenaError(
                    f"a slot of {descriptor} is too small",
                    asked=call.describe(),
                    found=f"slots of {run.nbytes:,} bytes: {table.bytes_per_token:,} a token",
                    do="plan with a larger bytes_per_token",
                )
            box = run.box(ordinal)
        offset = -1 if box is None else box.offset
        self.ledger.add(
            LedgerEntry(descriptor, ordinal, channel, call.kind, call.nbytes, call.dtype, algorithm, offset)
        )
        return box

    def give_back(self, descriptor: Descriptor) -> None:
        """Its graph does not exist: its slots are free."""
        self.ledger.forget(descriptor)
        self.captured.discard(descriptor)
        self.settled.discard(descriptor)

    # -- settling and replaying -----------------------------------------------------------------------

    def unsettled(self) -> tuple[str, ...]:
        """The ledger of what was captured since the last :meth:`settle`."""
        part = Ledger(one for one in self.ledger.entries if one.descriptor not in self.settled)
        return (f"{self.kind} session on an arena of {self.arena.plan.fingerprint}", *part.lines())

    def check_memory(self) -> None:
        """See :meth:`Arena.check_guards`; only in checked mode."""
        if self.arena.checked:
            self.arena.check_guards()

    def settle(self) -> None:
        """The ledgers were found equal: what was captured may be replayed, and no session captures it again."""
        self.settled |= self.captured

    def refuse_replay(self, descriptor: Descriptor) -> None:
        """Refuse to replay what was not settled (A5).

        Raises:
            ArenaError: not settled, or the session or the arena is closed.
        """
        self._refuse_closed(f"a replay of {descriptor}")
        if descriptor not in self.settled:
            raise ArenaError(
                f"{descriptor} cannot be replayed yet",
                asked=f"a replay of {descriptor}",
                found="the ranks have not compared what its calls took from the arena",
                do="leave the session's block, or seal() it, first",
            )

    # -- life ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back everything; twice is once."""
        self.closed = True
        self.ledger.clear()
        self.captured.clear()
        self.settled.clear()
        self.arena.forget_use(self)

    def _refuse_closed(self, asked: str) -> None:
        if self.arena.closed or self.closed:
            what = "the arena" if self.arena.closed else "the session on the arena"
            raise ArenaError(f"{what} is closed", asked=asked, do="make a new one")
