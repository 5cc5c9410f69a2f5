"""The stages of one capture: warm-up, synchronise, a vote that is also a barrier, capture, a vote on it.

A session says what is captured; here is how. Nothing here is kept but what :class:`Meter` learns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError, RankLeft
from halma.hal.graph.agreement import Agreement, Vote, settle
from halma.hal.graph.arenas import Uses
from halma.hal.graph.breakable import BreakableGraph, CaptureMode, Outcome
from halma.hal.graph.budget import MemoryBudget, Meter
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.executables import ExecutablePool, PooledBackend
from halma.hal.graph.inputs import InputSet
from halma.hal.graph.retire import lease
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace

Program = Callable[[], Any]
"""One step: takes its memory from the session's workspace and returns its outputs."""


InputsOf = Callable[[Descriptor], InputSet]
"""The persistent inputs that steps of a descriptor read."""


@dataclass
class Entry:
    """What is known about one descriptor. ``why_not`` is the negative cache: what stands there is not tried again."""

    descriptor: Descriptor
    program: Program
    graph: BreakableGraph | None = None
    outcome: Outcome = Outcome.EMPTY
    warm: bool = False
    milliseconds: float = 0.0
    bytes: int = 0
    held: int = 0
    why_not: str = ""


class Stages:
    """Takes descriptors through their stages.

    Args:
        backend, workspace: of the session.
        budget, executables: what a capture may need.
        agreement: the ranks that capture together.
        inputs_of: the programs' persistent inputs.
        mode: whether programs may have breaks.
        arenas: the memory that programs share with other ranks.
    """

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        budget: MemoryBudget,
        executables: ExecutablePool,
        agreement: Agreement,
        inputs_of: InputsOf,
        mode: CaptureMode,
        arenas: Uses,
    ) -> None:
        self.backend = backend
        self.workspace = workspace
        self.budget = budget
        self.executables = executables
        self.agreement = agreement
        self.inputs_of = inputs_of
        self.mode = mode
        self.arenas = arenas
        self.meter = Meter(exact=backend.capabilities.memory_info_exact is True)
        self.primed: int | None = None
        """Bytes of the graphs' pool after priming; None before, and where the backend has no such pool."""
        self.free_fell = 0
        """Bytes by which the device's free memory fell during captures: in the driver's steps, and other processes'
        too, so nothing is decided by it."""
        self._pooled = cast("Backend", PooledBackend(backend, executables))
        self._most_segments = 1
        self._primers: list[Entry] = []

    def prime_with(self, largest_first: Iterable[Entry]) -> None:
        """Before the first capture, capture the first entry of each role and variant once, and throw it away."""
        kinds = {(entry.descriptor.role, entry.descriptor.variant): entry for entry in reversed(list(largest_first))}
        self._primers = list(kinds.values())

    def pool_bytes(self) -> int:
        """Bytes of the pool that the session's graphs share beside the workspace."""
        return self.backend.graphs.pool_bytes(self.workspace) or 0

    def _prime(self) -> None:
        """Let what ops allocate themselves take its memory now, so that no later capture makes the pool grow (G10).

        An error is left to the capture of that descriptor, which will meet it again and say whose it is.
        """
        primers, self._primers = self._primers, []
        if not primers or self.backend.graphs.pool_bytes(self.workspace) is None:
            return
        for entry in primers:
            graph = self._graph(entry)
            with suppress(Exception):
                self._fill(graph, entry)
            graph.reset()
            self.arenas.give_back(entry.descriptor)
        self.primed = self.pool_bytes()

    def _graph(self, entry: Entry) -> BreakableGraph:
        graph = BreakableGraph(self._pooled, str(entry.descriptor))
        graph.inputs, graph.descriptor = self.inputs_of(entry.descriptor), entry.descriptor
        return graph

    def _fill(self, graph: BreakableGraph, entry: Entry) -> None:
        self.workspace.start()
        with self.arenas.recording(entry.descriptor), GraphCaptureScope(graph, self.workspace, mode=self.mode):
            graph.set_outputs(entry.program())

    def plan(self, entry: Entry) -> None:
        """Show the workspace every take. A backend that has to run the program for that has warmed it up, too."""
        with lease(self.workspace, f"the warm-up of {entry.descriptor}"):
            self.inputs_of(entry.descriptor).valid_work()
            self.workspace.start()
            self.backend.graphs.dry_run(entry.program, self.workspace)
        entry.warm = True

    def capture(self, entry: Entry, held: int, off: str | None) -> None:
        """Take ``entry`` from warm-up to its graph, or to the reason why it stays eager.

        Args:
            held: bytes that the session holds already.
            off: why its role is not captured at all, or None.

        Raises:
            CaptureError, or what the program raised: it failed, here or on another rank.
        """
        name, begin = str(entry.descriptor), time.perf_counter()
        subjects = (name, off or "captured")
        try:
            reason = self.together(f"the warm-up of {name}", lambda: off or self._warm_up(entry, held), subjects, entry)
            if reason is None:
                reason = self.together(f"the capture of {name}", lambda: self._record(entry, held), subjects, entry)
            entry.milliseconds = (time.perf_counter() - begin) * 1e3
            if reason is not None:
                _drop(entry, reason, Outcome.INERT if off else Outcome.EMPTY)
        finally:
            if entry.graph is None:
                self.arenas.give_back(entry.descriptor)
        entry.held = held + entry.bytes

    def _warm_up(self, entry: Entry, held: int) -> str:
        """Everything before the first call to the driver. Returns why this rank stays eager, or nothing."""
        device, predicted = self.backend.device, self.meter.predicted()
        refusal = self.budget.refusal(held=held, predicted=predicted, memory=device.memory_info())
        refusal = refusal or self.executables.refusal(self._most_segments)
        if refusal:
            return refusal
        if not entry.warm:
            self.plan(entry)
        self._prime()
        # Work of the warm-up that still runs when recording begins would be part of neither.
        device.synchronize()
        return ""

    def _record(self, entry: Entry, held: int) -> str:
        """Capture. Returns why the graph must go again, or nothing."""
        device = self.backend.device
        before = device.memory_info()
        graph = entry.graph = self._graph(entry)
        if self.arenas:
            graph.refuse_replay = partial(self.arenas.refuse_replay, entry.descriptor)
        self._fill(graph, entry)
        after = device.memory_info()
        entry.outcome = graph.outcome
        entry.bytes = self.meter.charge(before, after)
        self.free_fell += before.free - after.free
        self._most_segments = max(self._most_segments, len(graph.segments))
        refusal = self.budget.refusal(held=held + entry.bytes, predicted=0, memory=after)
        return f"it took {entry.bytes:,} bytes: {refusal}" if refusal else ""

    def check_arenas(self, entry: Entry) -> None:
        """Have every rank look for ``entry`` in the arenas' plans, before anything is done about it (A2)."""
        if self.arenas:
            one = entry.descriptor
            self.together(f"the arenas' plans for {one}", lambda: self.arenas.check((one,)), (str(one),), entry)

    def settle_arenas(self) -> None:
        """Have the ranks compare what captured calls took from the arenas; then their graphs may be replayed.

        Raises:
            CaptureError: they took different things; the first difference is named.
        """
        if self.arenas:
            self.together("the arenas' ledger", self.arenas.check_memory, self.arenas.unsettled())
            self.arenas.settle()

    def leave(self, waiting: Iterable[Entry], reason: str) -> None:
        """Tell the ranks that come to the next vote that this one does not, and why (G26)."""
        drop_all(waiting, f"the session was left before it was sealed: {reason}")
        self.agreement.leave(reason)

    def together(
        self,
        stage: str,
        work: Callable[[], str | None],
        subjects: tuple[str, ...] = (),
        entry: Entry | None = None,
    ) -> str | None:
        """Do ``work``, then vote on it with the other ranks; only then raise what went wrong.

        Returns why all ranks stay eager: the text that ``work`` returned on one of them.
        """
        failure: Exception | None = None
        refusal: str | None = None
        try:
            refusal = work()
        except Exception as error:
            failure = error
            self.workspace.reset()
        except BaseException as error:  # an interrupt, say: no vote is waited for
            self.agreement.leave(f"{type(error).__name__} at {stage}")
            raise
        text = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        vote = Vote(stage, subjects, refusal or "", text)
        try:
            reason = settle(self.agreement, vote)
        except (CaptureError, RankLeft) as disagreement:
            if entry is not None:
                _drop(entry, disagreement.what, Outcome.FAILED)
            raise
        if failure is not None:
            if entry is not None:
                _drop(entry, f"it failed: {text}", Outcome.FAILED)
            raise failure
        return reason


def drop_all(waiting: Iterable[Entry], why_not: str) -> None:
    """What was to be captured is not, and the session knows why."""
    for entry in waiting:
        _drop(entry, why_not, Outcome.FAILED)


def _drop(entry: Entry, why_not: str, outcome: Outcome) -> None:
    if entry.graph is not None:
        entry.graph.reset()
    entry.graph, entry.bytes = None, 0
    entry.why_not, entry.outcome = why_not, outcome
