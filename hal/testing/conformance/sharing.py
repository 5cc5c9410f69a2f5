"""Ranks that are threads of this process, or mirror images of one, and memory that is watched as they share it.

A handle that was made by a process may be opened by the same process, so what an arena does with memory can be shown
on any backend without a second process. Work on devices across real processes is for the collectives' own tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from halma.hal.backend import Backend, SharedMemory
from halma.hal.errors import RankError

T = TypeVar("T")
SECONDS = 30
"""Bound of every wait for another rank."""
DIRT = 0xEE
"""What memory holds when an arena gets it: whoever relies on zeros must have written them."""


class ThreadGroup:
    """A group whose ranks are threads.

    Args:
        names: how each is called outside of the group.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.changed = threading.Condition()
        self.rounds: list[dict[int, tuple[str, Any]]] = []
        self.ended: set[int] = set()

    def run(self, work: Callable[[ThreadRanks], T]) -> list[Ended[T]]:
        """``work`` on every rank at once; what each returned or raised, by rank."""
        found: list[Ended[T]] = [Ended() for _ in self.names]

        def on(rank: int) -> None:
            try:
                found[rank].value = work(ThreadRanks(self, rank))
            except Exception as error:
                found[rank].error = error
            finally:
                with self.changed:
                    self.ended.add(rank)
                    self.changed.notify_all()

        threads = [threading.Thread(target=on, args=(rank,), daemon=True) for rank in range(len(self.names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive(), "a rank did not end"
        return found


class Ended(Generic[T]):
    """How a rank ended: with a value, or an error."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: Exception | None = None

    @property
    def message(self) -> str:
        """Of the error; empty where there was none."""
        return str(self.error) if self.error is not None else ""

    def get(self) -> T:
        """The value; raises the error where there was one."""
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


class ThreadRanks:
    """One rank's view of a :class:`ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = len(group.names)
        self.names: Sequence[str] = group.names
        self.exchanges = 0

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's value; an error as soon as a rank has ended that should have come."""
        group, number = self._group, self.exchanges
        self.exchanges += 1
        with group.changed:
            while len(group.rounds) <= number:
                group.rounds.append({})
            here = group.rounds[number]
            here[self.rank] = (stage, value)
            group.changed.notify_all()
            group.changed.wait_for(lambda: len(here) == self.size or bool(group.ended - set(here)), SECONDS)
            missing = [self.names[rank] for rank in range(self.size) if rank not in here]
        if missing:
            raise RankError(f"{missing[0]} did not come to {stage!r}", asked=stage, found=missing, do="look at it")
        if len({stage for stage, _ in here.values()}) > 1:
            raise RankError("ranks are at different stages", asked=stage, found=[stage for stage, _ in here.values()])
        return [here[rank][1] for rank in range(self.size)]


    def leave(self, reason: str) -> None:
        """This rank does not come; the others see it by its end."""


class MirrorRanks:
    """Rank 0 of a group whose other ranks say what it says, or what ``alter`` makes of it.

    ``alter(stage, rank, value)`` is asked for every other rank.
    """

    rank = 0

    def __init__(self, size: int = 2, alter: Callable[[str, int, Any], Any] | None = None) -> None:
        self.size = size
        self.names: Sequence[str] = [f"rank {rank}" for rank in range(size)]
        self.alter: Callable[[str, int, Any], Any] = alter or _same
        self.stages: list[str] = []

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """This rank's value, and the others'."""
        self.stages.append(stage)
        return [value, *(self.alter(stage, rank, value) for rank in range(1, self.size))]

    def leave(self, reason: str) -> None:
        """Noted as a stage."""
        self.stages.append(f"left: {reason}")


class Machine:
    """Memory that ranks share, watched: what happened in which order, and what is still held."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.log: list[tuple[str, int]] = []
        self.pieces: dict[bytes, torch.Tensor] = {}
        self.lock = threading.Lock()

    def note(self, event: str, rank: int) -> None:
        """Write ``event`` down."""
        with self.lock:
            self.log.append((event, rank))

    def when(self, event: str) -> list[int]:
        """Places of an event in the log."""
        return [place for place, (name, _) in enumerate(self.log) if name == event]

    @property
    def held(self) -> int:
        """Pieces and mappings that were not given back."""
        ends = {"allocate": 1, "map": 1, "unmap": -1, "free": -1}
        return sum(ends.get(event, 0) for event, _ in self.log)

    def on(self, rank: int, **faults: Any) -> Any:
        """The backend as rank ``rank`` sees it.

        Args:
            faults: ``not_exportable`` (a reason), ``exportable`` or ``open`` (exceptions to raise).
        """
        return _OnRank(self, rank, faults)


class _OnRank:
    def __init__(self, machine: Machine, rank: int, faults: dict[str, Any]) -> None:
        backend = machine.backend
        self.name, self.evidence, self.capabilities = backend.name, backend.evidence, backend.capabilities
        self.device, self.graphs = backend.device, backend.graphs
        self.memory = _WatchedMemory(machine, rank, faults)


class _WatchedMemory:
    """The backend's memory for ranks; plain memory where it has none that can be exported."""

    def __init__(self, machine: Machine, rank: int, faults: dict[str, Any]) -> None:
        self._machine = machine
        self._rank = rank
        self._faults = faults
        self._inner = machine.backend.memory

    def not_exportable(self) -> str | None:
        self._machine.note("ask", self._rank)
        return self._faults.get("not_exportable")

    def exportable(self, nbytes: int) -> tuple[SharedMemory, bytes]:
        if "exportable" in self._faults:
            raise self._faults["exportable"]
        if hasattr(self._inner, "exportable") and self._inner.not_exportable() is None:
            piece, handle = self._inner.exportable(nbytes)
            tensor, close = piece.tensor, piece.close
        else:
            tensor, close = self._inner.empty((nbytes,), torch.uint8), _nothing
            handle = f"piece {id(tensor)}".encode()
            self._machine.pieces[handle] = tensor
        tensor.fill_(DIRT)
        self._machine.note("allocate", self._rank)
        return _Watched(self._machine, self._rank, "free", tensor, close), handle

    def open(self, handle: bytes) -> SharedMemory:
        if "open" in self._faults:
            raise self._faults["open"]
        tensor, close = self._machine.pieces.get(handle), _nothing
        if tensor is None:
            piece = self._inner.open(handle)
            tensor, close = piece.tensor, piece.close
        self._machine.note("map", self._rank)
        return _Watched(self._machine, self._rank, "unmap", tensor, close)


class _Watched:
    def __init__(
        self, machine: Machine, rank: int, event: str, tensor: torch.Tensor, close: Callable[[], None]
    ) -> None:
        self._machine, self._rank, self._event, self._close = machine, rank, event, close
        self.tensor = tensor
        self.closed = False

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._machine.note(self._event, self._rank)
            self._close()


def _same(stage: str, rank: int, value: Any) -> Any:
    return value


def _nothing() -> None:
    pass
