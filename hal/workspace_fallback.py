"""Places in a workspace for results that the program did not take itself.

An ATen op without an out-variant, or written without ``out=``, makes its result. A graph must not allocate,
so whoever records it puts the result into the workspace, in places of their own: they come and go with the
tensors and must not shift the positions of :meth:`halma.hal.workspace.Workspace.take`.
"""

from __future__ import annotations

import torch


class FallbackSlot:
    """One place of a scope: the most bytes asked for, where it lies, whether it is lent.

    ``turn`` counts the loans that ended, so that whoever kept an old loan can be told.
    """

    __slots__ = ("free", "memory", "nbytes", "turn")

    def __init__(self) -> None:
        self.nbytes = 0
        self.memory: torch.Tensor | None = None
        self.free = True
        self.turn = 0

    def lend(self, nbytes: int, scope: str) -> Fallback:
        """A loan of the first ``nbytes`` bytes."""
        assert self.memory is not None
        self.free = False
        return Fallback(self, self.memory[:nbytes], scope)

    def close(self) -> None:
        """End the loan, if there is one."""
        if not self.free:
            self.free = True
            self.turn += 1


class Fallback:
    """A loan of workspace memory: ``memory`` is uint8 [nbytes]; ``scope`` is the path it was taken in."""

    __slots__ = ("_slot", "_turn", "memory", "scope")

    def __init__(self, slot: FallbackSlot, memory: torch.Tensor, scope: str) -> None:
        self._slot = slot
        self._turn = slot.turn
        self.memory = memory
        self.scope = scope

    @property
    def valid(self) -> bool:
        """Whether the loan runs; after its scope closed the memory is somebody else's."""
        return self._slot.turn == self._turn and not self._slot.free

    def give_back(self) -> bool:
        """End the loan early; False when it had ended already."""
        if not self.valid:
            return False
        self._slot.close()
        return True
