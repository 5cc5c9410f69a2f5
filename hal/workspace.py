"""The sealed memory that a program's intermediates live in.

A workspace is a tree of scopes. Inside a scope the n-th ``take`` always has the same address, whatever
the descriptor: the plan keeps the largest size seen for it, so a smaller descriptor gets a prefix (W2).
All takes of a scope lie side by side; its child scopes start behind them and overlap one another, because
only one of them is open at a time (W3). A *lane* is a second tree with memory of its own, for work on a
side stream (W6).

Life: *planning* (every take may grow, each from an allocation of its own) -> :meth:`Workspace.seal` (one
allocation, growth raises). Code may run eagerly in both states.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from halma.hal.errors import WorkspaceError
from halma.hal.graph.current import note_failure
from halma.hal.graph.outputs import Generations
from halma.hal.workspace_fallback import Fallback, FallbackSlot
from halma.hal.workspace_plan import ALIGNMENT as ALIGNMENT
from halma.hal.workspace_plan import Scope, Take, aligned_bytes, end_fallbacks

POISON_BYTE = 0xFF
"""Every float format that we use reads 0xFF.. as NaN, every signed integer as -1."""


@dataclass(frozen=True)
class WorkspaceReport:
    """Bytes of a workspace: ``total`` allocated, by lane, and the number of takes and fallbacks planned."""

    sealed: bool
    total: int
    lanes: dict[str, int]
    takes: int
    fallbacks: int = 0


@dataclass(frozen=True)
class Place:
    """A place of a running program in its workspace, from :meth:`Workspace.place`."""

    scope: Scope
    next: int


class Workspace:
    """Scratch and output memory of programs, with addresses that never move once sealed.

    Args:
        device: where the memory is.
        checked: poison the takes of every scope when it closes, and everything when sealing.

    Not thread-safe: one program runs at a time. A tensor from :meth:`take` is valid until the scope it
    was taken in closes; a view kept longer reads poison in checked mode and other data otherwise.
    """

    def __init__(self, device: torch.device | str = "cpu", *, checked: bool = False) -> None:
        self.device = torch.device(device)
        self.checked = checked
        self.sealed = False
        self.in_op = 0
        """Depth of op calls and of the workspace's own work: at 0, arithmetic is a program's own (W5)."""
        self.generations = Generations()
        """Replays that wrote into this memory (G14)."""
        self.refuse_recycled: Callable[[torch.Tensor], None] = lambda _: None
        """Set by who lends results from here (:meth:`take_fallback`): raises for one whose scope closed."""
        self._roots: dict[str, Scope] = {"main": Scope("main", None)}
        self._current = self._roots["main"]
        self._lanes_in_use: set[str] = set()
        self._buffer: torch.Tensor | None = None
        self._discarded = False

    # -- taking -------------------------------------------------------------------------------------

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for ``shape``, contiguous, 256-byte aligned, until the current scope closes.

        Raises:
            WorkspaceError: sealed, and the plan holds nothing (or less) at this place.
        """
        scope = self._current
        position = scope.next
        scope.next = position + 1
        if position < len(scope.takes):
            take = scope.takes[position]
        else:
            take = self._grow(scope, shape, dtype)
        key = (tuple(shape), dtype)
        view = take.views.get(key)
        return view if view is not None else self._view(take, key, scope)

    def _grow(self, scope: Scope, shape: Sequence[int], dtype: torch.dtype) -> Take:
        if self.sealed:
            raise self._refusal(scope, shape, dtype, "the plan ends before this take")
        take = Take()
        scope.takes.append(take)
        return take

    def _view(self, take: Take, key: tuple[tuple[int, ...], torch.dtype], scope: Scope) -> torch.Tensor:
        shape, dtype = key
        nbytes = math.prod(shape) * dtype.itemsize
        if take.memory is None or nbytes > take.nbytes:
            if self.sealed:
                raise self._refusal(scope, shape, dtype, f"{take.nbytes:,} bytes were planned at this place")
            take.nbytes = nbytes
            take.memory = aligned_bytes(nbytes, self.device)
            if self.checked:
                take.memory.fill_(POISON_BYTE)
            # Views of the smaller memory stay alive through the tensors that hold them.
            take.views.clear()
        view = take.memory[:nbytes].view(dtype).view(shape)
        take.views[key] = view
        return view

    def take_fallback(self, nbytes: int) -> Fallback:
        """Memory for a result that a graph recorder must place itself; apart from the positions of :meth:`take`.

        It is free again when the scope closes or the caller gives it back, whichever comes first.

        Raises:
            WorkspaceError: sealed, and no free place of this scope is large enough.
        """
        scope = self._current
        # The lowest free place: the dry run then chooses the same as the capture, so the plan always fits.
        for slot in scope.fallbacks:
            if slot.free and (slot.nbytes >= nbytes or not self.sealed):
                break
        else:
            if self.sealed:
                raise self._no_growth(
                    scope,
                    f"{nbytes:,} bytes for the result of an op that does not write where it is told",
                    f"{len(scope.fallbacks)} such results were planned here, none that is free is large enough",
                )
            slot = FallbackSlot()
            scope.fallbacks.append(slot)
        if slot.memory is None or nbytes > slot.nbytes:
            slot.nbytes = nbytes
            slot.memory = aligned_bytes(nbytes, self.device)
        return slot.lend(nbytes, scope.path())

    def _refusal(self, scope: Scope, shape: Sequence[int], dtype: torch.dtype, why: str) -> WorkspaceError:
        nbytes = math.prod(shape) * dtype.itemsize
        return self._no_growth(scope, f"{nbytes:,} bytes for {str(dtype).removeprefix('torch.')}{list(shape)}", why)

    def _no_growth(self, scope: Scope, asked: str, why: str) -> WorkspaceError:
        if self._discarded:
            error = WorkspaceError(
                "the workspace was given back",
                asked=asked,
                found="its scratch session closed, or discard() was called",
                do="make a new session, and build the program on that one's workspace",
            )
        else:
            error = WorkspaceError(
                f"the sealed workspace cannot grow in {scope.path()!r}",
                asked=asked,
                found=(why, f"{self.report().total:,} bytes are sealed in all"),
                do="include this descriptor in the dry run before seal(), or run it outside the sealed workspace",
            )
        note_failure(error)
        return error

    # -- scopes and lanes ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, name: str) -> Generator[None]:
        """A nested scope; what is taken inside is recycled (and poisoned in checked mode) at its end."""
        node = self.enter(name)
        try:
            yield
        finally:
            self.leave(node)

    def enter(self, name: str) -> Scope:
        """Open a scope without the cost of a context manager (about 1 us); pair with :meth:`leave`."""
        parent = self._current
        node = parent.children.get(name)
        if node is None:
            if self.sealed:
                raise self._no_growth(parent, f"a scope {name!r}", "the plan has no such scope here")
            node = parent.children[name] = Scope(name, parent)
        node.next = 0
        self._current = node
        return node

    def leave(self, node: Scope) -> None:
        """Close the scope that :meth:`enter` opened, and every scope left open inside it.

        Raises:
            WorkspaceError: it is not open.
        """
        current = self._current
        while True:
            parent = current.parent
            if parent is None:
                raise WorkspaceError(
                    f"the workspace scope {node.path()!r} is not open",
                    asked="leave()",
                    found=f"open is {self._current.path()!r}",
                    do="pair every enter() with one leave(), or use scope()",
                )
            if current.fallbacks:
                end_fallbacks(current)
            if self.checked:
                self._poison(current)
            self._current = parent
            if current is node:
                return
            current = parent

    @contextlib.contextmanager
    def lane(self, name: str) -> Generator[None]:
        """Take from the lane ``name`` until the block ends; the lane stays busy until :meth:`release_lane`.

        Raises:
            WorkspaceError: the lane is busy: its fork was not joined yet (W6), or the plan lacks it.
        """
        if name in self._lanes_in_use:
            raise WorkspaceError(
                f"the workspace lane {name!r} is still in use",
                asked=f"a second fork on lane {name!r}",
                found="its first fork has not been joined, so its memory may still be read",
                do="join the first fork, or name another lane",
            )
        root = self._roots.get(name)
        if root is None:
            if self.sealed:
                raise self._no_growth(self._current, f"a lane {name!r}", "the plan has no such lane")
            root = self._roots[name] = Scope(name, None)
        outer = self._current
        root.next = 0
        self._lanes_in_use.add(name)
        self._current = root
        try:
            yield
        finally:
            self._current = outer

    def release_lane(self, name: str) -> None:
        """Say that the fork on ``name`` was joined; poisons the lane's memory in checked mode."""
        self._lanes_in_use.discard(name)
        if name in self._roots:
            end_fallbacks(self._roots[name])
            if self.checked:
                self._poison(self._roots[name])

    def _poison(self, scope: Scope) -> None:
        whole = scope.memory
        pieces = [whole] if whole is not None else [take.memory for take in scope.takes]
        self.in_op += 1
        for piece in pieces:
            if piece is not None and piece.numel():
                piece.fill_(POISON_BYTE)
        self.in_op -= 1

    # -- places ---------------------------------------------------------------------------------------

    def place(self) -> Place:
        """Where a program stands now: the open scope and its next take."""
        return Place(self._current, self._current.next)

    @contextlib.contextmanager
    def standing_at(self, place: Place) -> Generator[None]:
        """Take from ``place`` until the block ends, then stand where one stood before.

        So that host work between two segments takes the same memory at each replay as at the capture.
        """
        outer = self.place()
        self._current, place.scope.next = place.scope, place.next
        try:
            yield
        finally:
            self._current, outer.scope.next = outer.scope, outer.next

    def bytes_in_use(self) -> int:
        """Bytes planned for the open scopes of the current lane."""
        total, scope = 0, self._current
        while scope is not None:
            total, scope = total + scope.own_bytes(), scope.parent
        return total

    # -- plan ---------------------------------------------------------------------------------------

    def sibling(self) -> Workspace:
        """An empty workspace of the same kind, with a plan and memory of its own: for work to be given back."""
        return Workspace(self.device, checked=self.checked)

    def discard(self) -> None:
        """Give all memory back, for good: every later take is refused. Tensors still held keep theirs alive."""
        self.reset()
        self._roots = {"main": Scope("main", None)}
        self._current = self._roots["main"]
        self._buffer = None
        self.sealed = self._discarded = True

    def reset(self) -> None:
        """Close whatever an exception left open; addresses and plan stay."""
        node: Scope | None = self._current
        while node is not None:
            end_fallbacks(node)
            node = node.parent
        for name in (*self._lanes_in_use, "main"):
            end_fallbacks(self._roots[name])
        self.in_op = 0
        if self.checked:
            scope: Scope | None = self._current
            while scope is not None:
                self._poison(scope)
                scope = scope.parent
            for name in self._lanes_in_use:
                self._poison(self._roots[name])
        self._current = self._roots["main"]
        self._current.next = 0
        self._lanes_in_use.clear()

    def start(self) -> None:
        """Begin a program: the next take is the first of the main scope again.

        Raises:
            WorkspaceError: a scope is still open.
        """
        if self._current is not self._roots["main"]:
            raise WorkspaceError(
                "a program cannot start inside another program's scope",
                asked="start()",
                found=f"scope {self._current.path()!r} is open",
                do="leave it first; after an exception call reset()",
            )
        end_fallbacks(self._current)
        self._current.next = 0

    def seal(self) -> int:
        """Allocate everything planned in one piece and forbid growth. Returns the bytes allocated.

        Call it outside every scope, after the dry run at the largest descriptor; addresses handed out
        while planning are void afterwards.
        """
        if self.sealed:
            raise WorkspaceError(
                "the workspace is sealed already",
                asked="a second seal()",
                found="graphs may hold addresses of the first",
                do="make a new Workspace",
            )
        self.start()
        if self._lanes_in_use:
            raise WorkspaceError(
                "the workspace cannot be sealed while a lane is in use",
                asked="seal()",
                found=f"lanes not joined: {', '.join(sorted(self._lanes_in_use))}",
                do="join every fork first",
            )
        sizes = {name: root.total_bytes() for name, root in self._roots.items()}
        buffer = aligned_bytes(sum(sizes.values()), self.device)
        if self.checked:
            buffer.fill_(POISON_BYTE)
        base = 0
        for name, root in self._roots.items():
            root.place(base, buffer)
            base += sizes[name]
        self._buffer = buffer
        self.sealed = True
        return sum(sizes.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the sealed allocation."""
        buffer = self._buffer
        return buffer is not None and tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where ``tensor`` starts in the sealed allocation, in bytes; None when it lies elsewhere."""
        buffer = self._buffer
        if buffer is None or not self.holds(tensor):
            return None
        return int(tensor.storage_offset()) * tensor.itemsize - int(buffer.storage_offset())

    def path(self) -> str:
        """The open scopes, outermost first, for errors and reports."""
        return self._current.path()

    def report(self) -> WorkspaceReport:
        """What is planned or sealed, in bytes."""

        def every(scope: Scope) -> Iterator[Scope]:
            yield scope
            for child in scope.children.values():
                yield from every(child)

        lanes = {name: root.total_bytes() for name, root in self._roots.items()}
        scopes = [scope for root in self._roots.values() for scope in every(root)]
        takes, fallbacks = sum(len(s.takes) for s in scopes), sum(len(s.fallbacks) for s in scopes)
        return WorkspaceReport(self.sealed, sum(lanes.values()), lanes, takes, fallbacks)
