"""Work on two streams that touches the same memory, one of it writing, with nothing that orders it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from halma.backends.cpu.streams import Stamp

_MASK_LIMIT = 1 << 28
"""Bytes. Beyond it interleaved views are taken to overlap, instead of being compared byte by byte."""


@dataclass(frozen=True)
class Access:
    """One tensor that a node reads or writes; ``node`` is its position on the tape."""

    node: int
    stamp: Stamp
    tensor: torch.Tensor
    writes: bool
    start: int
    end: int

    @staticmethod
    def of(node: int, stamp: Stamp, tensor: torch.Tensor, writes: bool) -> Access:
        """With the absolute byte range that the tensor spans."""
        start = tensor.data_ptr()
        steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        return Access(node, stamp, tensor, writes, start, start + (1 + steps) * tensor.itemsize)


def find_race(accesses: Iterable[Access]) -> tuple[Access, Access] | None:
    """The first two accesses, in order of address, that race; None if all is ordered."""
    open_: list[Access] = []
    for access in sorted((a for a in accesses if a.tensor.numel()), key=lambda a: (a.start, a.node)):
        open_ = [other for other in open_ if other.end > access.start]
        for other in open_:
            if _conflict(other, access):
                return (other, access) if other.node < access.node else (access, other)
        open_.append(access)
    return None


def _conflict(a: Access, b: Access) -> bool:
    if a.stamp.stream is b.stamp.stream or not (a.writes or b.writes):
        return False
    if a.stamp.before(b.stamp) or b.stamp.before(a.stamp):
        return False
    return _share_bytes(a, b)


def _share_bytes(a: Access, b: Access) -> bool:
    """Exact where it is affordable: columns of one matrix span the same range and share nothing."""
    start, end = min(a.start, b.start), max(a.end, b.end)
    if (_dense(a) and _dense(b)) or end - start > _MASK_LIMIT:
        return True
    marks: Callable[[Access], torch.Tensor] = lambda access: _marks(access, start, end)  # noqa: E731
    return bool((marks(a) & marks(b)).any())


def _dense(access: Access) -> bool:
    return access.end - access.start == access.tensor.numel() * access.tensor.itemsize


def _marks(access: Access, start: int, end: int) -> torch.Tensor:
    mask = torch.zeros(end - start, dtype=torch.bool)
    size = access.tensor.itemsize
    strides: Sequence[int] = [step * size for step in access.tensor.stride()]
    mask.as_strided((*access.tensor.shape, size), (*strides, 1), access.start - start).fill_(True)
    return mask
