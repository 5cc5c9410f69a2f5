"""Memory that every rank of a group has a piece of, and all have mapped: from allocation to the last barrier.

    memory   allocate, zero, fill, wait for the device, exchange handles
    peers    map the others' pieces; a barrier, and only then may anybody use them (A10)
    end      a barrier, unmap the peers, a barrier, free (A9)

One rank's failure at any stage reaches all with its message, and leaves nothing allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from halma.hal.arena.consensus import together
from halma.hal.backend import Backend, SharedMemory
from halma.hal.collectives.contract import Ranks
from halma.hal.errors import ArenaError, RankError

if TYPE_CHECKING:
    import torch

Prepare = Callable[["torch.Tensor"], None]


class SymmetricMemory:
    """One rank's view; :meth:`create` makes it on all of them.

    Attributes:
        own: this rank's piece.
        peers: every rank's, by rank of the group; ``peers[rank]`` is ``own``.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self._backend = backend
        self._ranks = ranks
        self._own: SharedMemory | None = None
        self.peers: list[SharedMemory] = []

    @classmethod
    def create(cls, backend: Backend, ranks: Ranks, nbytes: int, prepare: Prepare) -> SymmetricMemory:
        """``nbytes`` on every rank, zero but for what ``prepare`` writes, mapped by all.

        Raises:
            ArenaError: on every rank, where one could not allocate or map. What failed is raised there.
            RankError: a rank did not come.
        """
        made = cls(backend, ranks)
        try:
            handles = together(ranks, "the arena's memory", lambda: made._allocate(nbytes, prepare))
        except BaseException:
            made._free()  # nobody has mapped it: handles only went round if all ranks had memory
            raise
        try:
            together(ranks, "the arena's peers", lambda: made._map(handles))
        except BaseException as error:
            made._undo(error)
            raise
        return made

    @property
    def own(self) -> SharedMemory:
        """This rank's piece."""
        assert self._own is not None
        return self._own

    def close(self, last: Callable[[], None]) -> None:
        """Do ``last`` while everything is still mapped, then give it all back.

        Raises:
            ArenaError: ``last``, or an unmapping, failed on another rank; everything is freed all the same.
            RankError: a peer did not come. It is gone or hangs, so the memory is freed without it.
            What failed on this rank.
        """
        failure: BaseException | None = None
        try:
            together(self._ranks, "the arena's end", lambda: self._finish(last))
        except BaseException as error:
            failure = error
        failure = self._undo(failure)
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Give everything back without a word to the peers, on an error path (G26); they free theirs by themselves."""
        for peer in self.peers:
            if peer is not self._own:
                peer.close()
        self.peers = []
        self._free()

    def _allocate(self, nbytes: int, prepare: Prepare) -> bytes:
        try:
            self._own, handle = self._backend.memory.exportable(nbytes)
        except MemoryError as error:
            free = self._backend.device.memory_info().free
            raise ArenaError(
                "there is no memory for the arena",
                asked=f"{nbytes:,} bytes",
                found=(f"{free:,} bytes are free", *str(error).splitlines()),
                do="a smaller largest message or fewer descriptors, or free memory first",
            ) from error
        self._own.tensor.zero_()
        prepare(self._own.tensor)
        self._backend.device.synchronize()
        return handle

    def _map(self, handles: list[bytes]) -> None:
        for rank, handle in enumerate(handles):
            self.peers.append(self.own if rank == self._ranks.rank else self._backend.memory.open(handle))

    def _finish(self, last: Callable[[], None]) -> None:
        self._backend.device.synchronize()
        last()

    def _undo(self, failure: BaseException | None) -> BaseException | None:
        """Unmap, wait until all have, free. Without the wait where a rank is lost, or this one is told to stop.

        Returns what should be raised: ``failure``, else the first that went wrong here. Nothing of it keeps the rest
        from being given back, or a peer waiting.
        """
        for peer in self.peers:
            if peer is not self._own:
                try:
                    peer.close()
                except Exception as error:
                    failure = failure or error
        self.peers = []
        if failure is None or (isinstance(failure, Exception) and not isinstance(failure, RankError)):
            try:
                self._ranks.exchange("the arena's peers unmapped", None)
            except Exception as error:
                failure = failure or error
        try:
            self._free()
        except Exception as error:
            failure = failure or error
        return failure

    def _free(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()
