"""What a capture session asks of the arenas that its programs' collectives live in.

An arena is memory that other ranks write to, so what a capture took of it is settled by all ranks: the ladder is
checked before the first capture, every captured call goes into a ledger, and no graph is replayed before the ledgers
were found equal. :mod:`halma.hal.arena` implements this; sessions need no more of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from halma.hal.graph.agreement import Agreement
from halma.hal.graph.descriptor import Descriptor


class ArenaUse(Protocol):
    """One session's part of one arena; see :class:`halma.hal.arena.use.Use`."""

    def check(self, descriptors: Sequence[Descriptor]) -> None:
        """Refuse descriptors that the arena's plan does not cover, or record that they fall back (A2)."""
        ...

    def recording(self, descriptor: Descriptor) -> AbstractContextManager[None]:
        """Captured calls inside belong to ``descriptor``."""
        ...

    def give_back(self, descriptor: Descriptor) -> None:
        """What ``descriptor`` took is free again; its graph does not exist."""
        ...

    def unsettled(self) -> tuple[str, ...]:
        """What must be found equal on all ranks before it is used."""
        ...

    def check_memory(self) -> None:
        """In checked mode: nobody wrote where nothing lies."""
        ...

    def settle(self) -> None:
        """All ranks had the same :meth:`unsettled`: its graphs may be replayed."""
        ...

    def refuse_replay(self, descriptor: Descriptor) -> None:
        """Raise unless ``descriptor`` was settled and the arena still lives (A5)."""
        ...

    def close(self) -> None:
        """Give back everything: the session's graphs are gone."""
        ...


class SharedArena(Protocol):
    """An arena; see :class:`halma.hal.arena.arena.Arena`."""

    def agreement(self) -> Agreement:
        """The ranks that share it."""
        ...

    def session(self, kind: str) -> ArenaUse:
        """A session's part of it, ``persistent`` or ``scratch``."""
        ...


class Uses:
    """A session's parts of all its arenas, which it treats alike."""

    def __init__(self, arenas: Sequence[SharedArena], kind: str) -> None:
        self._uses = [arena.session(kind) for arena in arenas]

    def __bool__(self) -> bool:
        return bool(self._uses)

    def check(self, descriptors: Sequence[Descriptor]) -> None:
        """See :meth:`ArenaUse.check`."""
        for use in self._uses:
            use.check(descriptors)

    @contextmanager
    def recording(self, descriptor: Descriptor) -> Generator[None]:
        """See :meth:`ArenaUse.recording`."""
        with ExitStack() as stack:
            for use in self._uses:
                stack.enter_context(use.recording(descriptor))
            yield

    def give_back(self, descriptor: Descriptor) -> None:
        """See :meth:`ArenaUse.give_back`."""
        for use in self._uses:
            use.give_back(descriptor)

    def unsettled(self) -> tuple[str, ...]:
        """See :meth:`ArenaUse.unsettled`; a rank on which nothing was captured has an empty one (A12)."""
        return tuple(line for use in self._uses for line in use.unsettled())

    def check_memory(self) -> None:
        """See :meth:`ArenaUse.check_memory`."""
        for use in self._uses:
            use.check_memory()

    def settle(self) -> None:
        """See :meth:`ArenaUse.settle`."""
        for use in self._uses:
            use.settle()

    def refuse_replay(self, descriptor: Descriptor) -> None:
        """See :meth:`ArenaUse.refuse_replay`."""
        for use in self._uses:
            use.refuse_replay(descriptor)

    def close(self) -> None:
        """See :meth:`ArenaUse.close`."""
        for use in self._uses:
            use.close()
