"""The plan of a workspace: its tree of scopes, and what is taken in each."""

from __future__ import annotations

import torch

from halma.hal.graph.current import one_time_work
from halma.hal.workspace_fallback import FallbackSlot

ALIGNMENT = 256
"""Bytes. The coarsest alignment that a vector load or a bulk copy of our targets asks for."""


def _align(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def aligned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    with one_time_work():  # a dry run that only records must still get real memory
        # PyTorch's CPU allocator promises 64 bytes only, so ask for more and cut.
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


class Take:
    """One position in a scope: the most bytes asked for, where it lies, and the views handed out."""

    __slots__ = ("memory", "nbytes", "views")

    def __init__(self) -> None:
        self.nbytes = 0
        self.memory: torch.Tensor | None = None
        self.views: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}


class Scope:
    __slots__ = ("children", "fallbacks", "memory", "name", "next", "parent", "takes")

    def __init__(self, name: str, parent: Scope | None) -> None:
        self.name = name
        self.parent = parent
        self.children: dict[str, Scope] = {}
        self.takes: list[Take] = []
        self.fallbacks: list[FallbackSlot] = []
        self.next = 0
        self.memory: torch.Tensor | None = None  # the bytes of all takes and fallbacks, once sealed

    def path(self) -> str:
        return self.name if self.parent is None else f"{self.parent.path()}/{self.name}"

    def own_bytes(self) -> int:
        return sum(_align(piece.nbytes) for piece in (*self.takes, *self.fallbacks))

    def total_bytes(self) -> int:
        return self.own_bytes() + max((child.total_bytes() for child in self.children.values()), default=0)

    def place(self, base: int, buffer: torch.Tensor) -> None:
        own = self.own_bytes()
        self.memory = buffer[base : base + own]
        offset = base
        for take in self.takes:
            take.memory = buffer[offset : offset + take.nbytes]
            take.views.clear()
            offset += _align(take.nbytes)
        for slot in self.fallbacks:
            slot.memory = buffer[offset : offset + slot.nbytes]
            offset += _align(slot.nbytes)
        for child in self.children.values():
            child.place(offset, buffer)


def end_fallbacks(scope: Scope) -> None:
    for slot in scope.fallbacks:
        slot.close()
