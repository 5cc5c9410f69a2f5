"""Capture sessions: a ladder's graphs on one workspace, from warm-up to replay.

A *persistent* session seals its workspace and keeps its graphs. A *scratch* session (profiling, a trial) works on
a workspace of its own and gives everything back when it closes (G19). Which of the two it is, is said when it is
made and never guessed: a profiling pass that sealed an arena for good broke a server before
(MooreThreads/vllm-musa#178).

    with CaptureSession(backend, workspace, "persistent") as session:
        for descriptor in decode_ladder(8):
            session.capture(descriptor, program_of(descriptor))
    outputs = session.replay(descriptor)

Every capture goes through the same stages: warm-up, synchronise, a vote of all ranks that is also their barrier,
capture, a vote on how it went. Memory is planned by all descriptors before the first capture, so no order of
capture changes addresses, results or size (G17, G18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from halma.hal.backend import Backend, Stream
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import CaptureError, HalmaError, RankLeft
from halma.hal.graph.agreement import Agreement, NoAgreement
from halma.hal.graph.arenas import SharedArena, Uses
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome
from halma.hal.graph.budget import MemoryBudget
from halma.hal.graph.capturing import Entry, InputsOf, Program, Stages, drop_all
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.eager import eager_step
from halma.hal.graph.executables import ExecutablePool, process_pool
from halma.hal.graph.inputs import InputSet
from halma.hal.graph.ladder import refuse_unfit
from halma.hal.graph.orders import ordered
from halma.hal.graph.scope import current_scope, why_unsupported
from halma.hal.graph.session_report import SessionReport, allocating_ops, row_of
from halma.hal.settings import GraphSwitch, settings
from halma.hal.workspace import Workspace

if TYPE_CHECKING:
    import torch

KINDS: Final = ("persistent", "scratch")


class CaptureSession:
    """Graphs of programs that share one workspace, by descriptor.

    As a context manager: leaving the block captures what was asked for; a scratch session then closes.

    Args:
        backend: captures and replays.
        workspace: what programs take their memory from. A scratch session makes a sibling of it; build programs
            on :attr:`workspace`.
        kind: ``persistent`` or ``scratch``.
        mode: ``PIECEWISE`` where programs have breaks; ``FULL`` refuses them (G5).
        switch: which roles are captured at all; by default what ``HALMA_GRAPH`` and its like say.
        strict: a step that would run eagerly though its role is captured is an error.
        budget: most bytes the session may hold, its workspace included; None: no limit.
        reserve: bytes of free device memory that captures must leave.
        agreement: the ranks that capture together; by default there is one.
        inputs: the programs' persistent inputs; a function where they depend on the descriptor.
        executables: the pool of live executables; by default the process's.
        arenas: memory that the programs' collectives share with other ranks. Their ranks then agree by default, the
            ladder is checked against their plans, and no graph is replayed before all ranks have found that they
            took the same (A5).

    Raises:
        CaptureError: no such kind; a budget that is not positive.
    """

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        kind: str,
        *,
        mode: CaptureMode = CaptureMode.FULL,
        switch: GraphSwitch | None = None,
        strict: bool = False,
        budget: int | None = None,
        reserve: int = 0,
        agreement: Agreement | None = None,
        inputs: InputSet | InputsOf | None = None,
        executables: ExecutablePool | None = None,
        arenas: Sequence[SharedArena] = (),
    ) -> None:
        if kind not in KINDS:
            raise CaptureError(f"no kind of session called {kind!r}", do="one of " + ", ".join(KINDS))
        self.backend = backend
        self.kind = kind
        self.mode = mode
        self.workspace = workspace.sibling() if kind == "scratch" else workspace
        self.switch = settings().graph_switch if switch is None else switch
        self.strict = strict
        self.inputs_of = _inputs_of(inputs)
        self.executables = process_pool(backend) if executables is None else executables  # an empty pool is false
        self.order = "as called"
        self.eager_steps: dict[str, int] = {}
        self._arenas = Uses(arenas, kind)
        if agreement is None:
            agreement = arenas[0].agreement() if arenas else NoAgreement()
        self._stages = Stages(
            backend,
            self.workspace,
            MemoryBudget(budget, reserve),
            self.executables,
            agreement,
            self.inputs_of,
            mode,
            self._arenas,
        )
        self._entries: dict[Descriptor, Entry] = {}
        self._waiting: list[Entry] = []
        self._last: SessionReport | None = None

    # -- capturing ----------------------------------------------------------------------------------

    def capture(self, descriptor: Descriptor, program: Program) -> BreakableGraph | None:
        """Plan ``program`` and capture it once the workspace is sealed: now if it is, else by :meth:`seal`.

        Returns the graph, or None where it waits or stays eager with its reason (switched off, not supported, no
        memory, failed before: never tried again until :meth:`forget`).

        Raises:
            CaptureError: the descriptor was captured already, a capture is open, or the capture failed.
        """
        self._refuse_use("capture()")
        known = self._entries.get(descriptor)
        # Switched off is no failure: asking twice is as wrong as where it is on.
        if known is not None and known.why_not and known.outcome is not Outcome.INERT:
            return None
        if known is not None:
            raise CaptureError(
                f"{descriptor} was captured already",
                found=f"{len(self._entries)} descriptors",
                do="every descriptor of a ladder is captured once; drop the duplicate",
            )
        entry = self._entries[descriptor] = Entry(descriptor, program)
        if self.workspace.sealed:
            self._stages.check_arenas(entry)
            graph = self._capture(entry)
            self._stages.settle_arenas()
            return graph
        self._stages.check_arenas(entry)
        self._stages.together(f"the plan of {descriptor}", lambda: self._stages.plan(entry), (str(descriptor),), entry)
        self._waiting.append(entry)
        return None

    def _capture(self, entry: Entry) -> BreakableGraph | None:
        self._stages.capture(entry, self.held, self.off_reason(entry.descriptor.role))
        return entry.graph

    def seal(self) -> None:
        """Seal the workspace, then capture what waits for it, in the order of the calls."""
        self._refuse_use("seal()")
        waiting, self._waiting = self._waiting, []
        try:
            self._stages.together("sealing", self._seal)
        except HalmaError as error:
            drop_all(waiting, f"sealing failed: {error.what}")  # on all ranks, which know
            raise
        by_size = {entry.descriptor: entry for entry in waiting}
        self._stages.prime_with(by_size[one] for one in ordered(list(by_size), "descending"))
        for entry in waiting:
            self._capture(entry)
        self._stages.settle_arenas()

    def capture_all(
        self,
        descriptors: Iterable[Descriptor],
        program_of: Callable[[Descriptor], Program],
        order: str = "descending",
        progress: Callable[[Descriptor], None] | None = None,
        *,
        plan: Sequence[Descriptor] | None = None,
        limit: int | None = None,
    ) -> None:
        """Plan every descriptor, seal the workspace if it is not, and capture one graph a descriptor.

        Args:
            descriptors: the ladder.
            program_of: makes the program of a descriptor; its inputs and state must outlive the session.
            order: see :data:`halma.hal.graph.orders.ORDERS`.
            progress: called after each descriptor.
            plan: descriptors to plan memory by, where fewer than all hold everything.
            limit: requests that the state holds.

        Raises:
            CaptureError: a duplicate, a descriptor wider than ``limit``, an unknown order; ranks disagree, or one
                of them failed.
        """
        self._refuse_use("capture_all()")
        wanted = list(descriptors)
        entries: dict[Descriptor, Entry] = {}
        subjects = self._subjects(wanted, order)
        self._stages.together(
            "the ladder", lambda: entries.update(self._accepted(wanted, program_of, order, limit)), subjects
        )
        if not self.workspace.sealed:
            largest_first = ordered(wanted if plan is None else plan, "descending")
            self._stages.together("planning", lambda: self._plan_and_seal(largest_first, entries, program_of))
        self.order = order
        for entry in entries.values():
            self._entries[entry.descriptor] = entry
            self._capture(entry)
            if progress is not None:
                progress(entry.descriptor)
        self._stages.settle_arenas()

    def _accepted(
        self, wanted: Sequence[Descriptor], program_of: Callable[[Descriptor], Program], order: str, limit: int | None
    ) -> dict[Descriptor, Entry]:
        """The ladder in order of capture, once nothing speaks against it."""
        refuse_unfit(wanted, limit=limit)
        self._arenas.check(wanted)
        for one in wanted:
            known = self._entries.get(one)
            if known is not None:
                raise CaptureError(
                    f"{one} was captured already" if known.graph is not None else f"{one} was tried already",
                    found=known.why_not or "its graph is in use",
                    do="capture a descriptor once; forget() one that stayed eager to have it tried again",
                )
        return {one: Entry(one, program_of(one)) for one in ordered(wanted, order)}

    def _subjects(self, wanted: Sequence[Descriptor], order: str) -> tuple[str, ...]:
        """What all ranks must have in common before anything is captured."""
        modes = [f"{role}: {self.off_reason(role) or 'captured'}" for role in sorted({one.role for one in wanted})]
        return (f"{self.kind}, {order}, {self.mode.value}", *modes, *map(str, wanted))

    def _plan_and_seal(
        self,
        largest_first: Sequence[Descriptor],
        entries: dict[Descriptor, Entry],
        program_of: Callable[[Descriptor], Program],
    ) -> None:
        planned = [entries.get(one) or Entry(one, program_of(one)) for one in largest_first]
        for entry in planned:
            self._stages.plan(entry)
        self._seal()
        self._stages.prime_with(planned)

    def _seal(self) -> None:
        self.workspace.seal()

    def _refuse_use(self, asked: str) -> None:
        if self._last is not None:
            raise CaptureError("the session is closed", asked=asked, do="make a new one")
        if current_scope() is not None:  # whether or not anything would be captured: a switch changes no rules
            raise CaptureError(
                "a capture is open on this thread already", asked=asked, do="leave the capture scope first"
            )

    # -- stepping -----------------------------------------------------------------------------------

    def off_reason(self, role: str) -> str | None:
        """Why steps of ``role`` are not captured at all, or None."""
        return self.switch.off_reason(role) or why_unsupported(self.backend, self.mode)

    def find(self, descriptor: Descriptor) -> BreakableGraph | None:
        """The graph captured for exactly this descriptor (G15); None is recorded with its reason.

        Raises:
            CaptureError: there is none, its role is captured, and the session is strict.
        """
        entry = self._entries.get(descriptor)
        if entry is not None and entry.graph is not None:
            return entry.graph
        reason = self._why_eager(descriptor, entry)
        if self.strict and self.switch.off_reason(descriptor.role) is None:
            raise CaptureError(
                f"{descriptor} would run eagerly, and HALMA_STRICT forbids it",
                found=(reason, f"{len(self)} descriptors are captured"),
                do="capture this descriptor, or unset HALMA_STRICT",
            )
        self.eager_steps[reason] = self.eager_steps.get(reason, 0) + 1
        decisions.record(Decision("graph", str(descriptor), "eager", (Candidate("eager", True, reason),)))
        return None

    def _why_eager(self, descriptor: Descriptor, entry: Entry | None) -> str:
        if self._last is not None:
            return "the session is closed"
        if entry is not None and entry.why_not:
            return entry.why_not
        if entry is not None and not self.workspace.sealed:
            return "nothing is captured before the session is sealed"
        return self.off_reason(descriptor.role) or f"no graph: {descriptor} was not captured"

    def replay(self, descriptor: Descriptor, stream: Stream | None = None, /, **rows: torch.Tensor) -> Any:
        """One step: the graph's replay, or the program itself, once, where there is none.

        Args:
            rows: this step's rows of persistent inputs, by name: ``session.replay(descriptor, x=rows)``.

        Returns the outputs, which the next step of any descriptor overwrites.

        Raises:
            CaptureError: the descriptor is unknown; an input was not refreshed; see :meth:`find`.
        """
        entry = self._entries.get(descriptor)
        if entry is None:
            raise CaptureError(
                f"{descriptor} is not part of the session",
                found=[str(one) for one in self._entries] or "it holds nothing",
                do="pad the step to a descriptor that is (fit() finds it), or capture this one",
            )
        inputs = self.inputs_of(descriptor)
        for name, fresh in rows.items():
            inputs[name].refresh(fresh)
        graph = self.find(descriptor)
        if graph is not None:
            return graph.replay(stream)
        return eager_step(entry.program, self.workspace, self.backend, step=descriptor, inputs=inputs, stream=stream)

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Everything that was asked for, captured or not; ``fit`` finds the one that holds a step."""
        return tuple(self._entries)

    @property
    def replays(self) -> int:
        """Steps that were replayed, over all descriptors."""
        return sum(entry.graph.replays for entry in self._entries.values() if entry.graph is not None)

    def __len__(self) -> int:
        return sum(entry.graph is not None for entry in self._entries.values())

    # -- life ---------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes that the session holds: its workspace, its graphs' pool and what the graphs took beyond both."""
        own = self.workspace.report().total + self._stages.pool_bytes()
        return own + sum(entry.bytes for entry in self._entries.values())

    def forget(self, descriptor: Descriptor | None = None) -> None:
        """Drop one descriptor that stayed eager from the negative cache, or all: it may be captured again."""
        for one in [d for d, entry in self._entries.items() if entry.why_not and descriptor in (None, d)]:
            del self._entries[one]

    def report(self) -> SessionReport:
        """Every descriptor in order of capture; after :meth:`close` as it was before."""
        if self._last is not None:
            return self._last
        return SessionReport(
            kind=self.kind,
            backend=self.backend.name,
            evidence=self.backend.evidence,
            order=self.order,
            rows=tuple(row_of(entry) for entry in self._entries.values()),
            workspace_bytes=self.workspace.report().total,
            graph_bytes=sum(entry.bytes for entry in self._entries.values()),
            measured=self._stages.meter.exact,
            free_fell=self._stages.free_fell,
            pool_bytes=self._stages.pool_bytes(),
            pool_growth=0 if self._stages.primed is None else self._stages.pool_bytes() - self._stages.primed,
            allocating=allocating_ops(self._entries.values(), self.backend),
            live_executables=len(self.executables),
            recycled_executables=self.executables.recycled,
            eager_steps=dict(self.eager_steps),
        )

    def close(self) -> None:
        """Destroy the graphs; a scratch session gives its workspace back too. The report stays."""
        if self._last is not None:
            return
        self._leave("it closed its session before sealing it")
        self._last = self.report()
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._entries.clear()
        self._waiting.clear()
        self._arenas.close()
        if self.kind == "scratch":
            self.workspace.discard()

    def _leave(self, reason: str) -> None:
        """The ranks that captured as much as this one are about to seal: they hear that it does not come (G26)."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._stages.leave(waiting, reason)

    def __enter__(self) -> CaptureSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Not while an exception is on its way: sealing votes, and the other ranks may be elsewhere.
            if error is None and self._waiting:
                self.seal()
            elif error is not None and not isinstance(error, RankLeft):  # that one was told to all
                self._leave(f"{type(error).__name__}: {error}")
        finally:
            if self.kind == "scratch":
                self.close()


def _inputs_of(inputs: InputSet | InputsOf | None) -> InputsOf:
    if isinstance(inputs, InputSet) or inputs is None:
        given = inputs or InputSet()
        return lambda descriptor: given
    return inputs
