"""Results that the program did not place: their shapes, and their memory in the workspace.

A result is lent twice. The program gets a tensor with a storage of its own, so that its death tells when the
memory is free again; the tape gets an alias that lies in the workspace and keeps nothing alive. That is how a
caching allocator behaves under capture on a GPU, and a kept weak alias misbehaves here just as it does there.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halma.backends.cpu.op_rules import Overload, describe, rule_of
from halma.hal.errors import CaptureError
from halma.hal.workspace import Workspace
from halma.hal.workspace_fallback import Fallback

# -- shapes ------------------------------------------------------------------------------------------------

_KEEP_SHAPES = 20_000
_shapes: dict[Any, Any] = {}


def infer(func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``func`` would return, with meta tensors for tensors; computed once per shape, strides and dtype.

    Raises:
        CaptureError: the op has no meta kernel, so its results are unknown before it runs.
        RuntimeError, TypeError, ...: what torch says about wrong arguments.
    """
    try:
        key = (func, _key(args), _key(tuple(sorted(kwargs.items()))))
        known = _shapes.get(key)
    except TypeError:  # something that cannot be hashed, such as a generator of an odd kind
        key = known = None
    if known is None:
        known = _infer(func, args, kwargs)
        if len(_shapes) >= _KEEP_SHAPES:
            _shapes.clear()
        if key is not None:
            _shapes[key] = known
    return known


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    return (type(value), value)


def _infer(func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    rule = rule_of(func)
    meta = {name: _to_meta(value) for name, value in kwargs.items() if name not in ("pin_memory", "generator")}
    if meta.get("device") is not None or (rule.factory and "device" in rule.names):
        meta["device"] = torch.device("meta")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resized destination: the caller compares and refuses
            return func(*[_to_meta(value) for value in args], **meta)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "no fake impl registered" not in str(error):
            raise
        raise CaptureError(
            f"{describe(func)} cannot be captured: the shapes of its results are unknown before it runs",
            found=f"it has no meta kernel ({str(error).splitlines()[0]})",
            do="register a fake implementation for it (torch.library.register_fake), or give it an out argument",
        ) from error


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    return None if isinstance(value, torch.Generator) else value


# -- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FallbackUse:
    """One result placed in the workspace: the op that made it, its bytes, the line, and how it gets there."""

    op: str
    nbytes: int
    where: str
    out_variant: bool
    """False: the op has none, so a replay allocates the result and copies it."""


@dataclass(frozen=True)
class Placed:
    """A result's two faces: ``handed`` goes to the program, ``alias`` to the tape."""

    handed: torch.Tensor
    alias: torch.Tensor
    nbytes: int


class ResultPool:
    """The lent results of one workspace, over all segments captured with it."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = weakref.ref(workspace)
        self._live: dict[int, Fallback] = {}  # by the address of the storage object
        self.dead: deque[Fallback] = deque()
        """Loans whose tensor died, oldest first; whoever records takes them out and gives them back."""

    @property
    def lends(self) -> bool:
        """Whether any result is alive."""
        return bool(self._live)

    def place(self, meta: torch.Tensor) -> Placed:
        """Workspace memory for a result of ``meta``'s geometry.

        Raises:
            WorkspaceError: the sealed plan holds no place for it.
        """
        size, stride, dtype = tuple(meta.shape), meta.stride(), meta.dtype
        if meta.numel() == 0:
            nothing = torch.empty_strided(size, stride, dtype=dtype)
            return Placed(nothing, nothing, 0)
        span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        nbytes = span * dtype.itemsize
        workspace = self._workspace()
        assert workspace is not None
        loan = workspace.take_fallback(nbytes)
        handed = self._own_storage(loan, nbytes).view(dtype).as_strided(size, stride)
        return Placed(handed, _at(loan, dtype, size, stride, 0), nbytes)

    def _own_storage(self, loan: Fallback, nbytes: int) -> torch.Tensor:
        window = (ctypes.c_uint8 * nbytes).from_address(loan.memory.data_ptr())
        tensor = torch.frombuffer(window, dtype=torch.uint8)
        identity = tensor.untyped_storage()._cdata
        self._live[identity] = loan
        # The storage owns the window, so the window dies with the last view, wherever that is held. The
        # finalizer holds the loan, and the loan the memory.
        weakref.finalize(window, self._died, identity, loan).atexit = False
        return tensor

    def _died(self, identity: int, loan: Fallback) -> None:
        # At any moment and on any thread: only notes it.
        self._live.pop(identity, None)
        self.dead.append(loan)

    def loan_of(self, tensor: torch.Tensor) -> Fallback | None:
        """The loan that ``tensor`` lies in, or None."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as the tape keeps it: itself, or where it lies in the workspace if it was lent.

        Raises:
            CaptureError: its loan ended with the scope it was made in.
        """
        self.refuse_ended(tensor)
        loan = self.loan_of(tensor)
        if loan is None:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError(
                "a lazily conjugated or negated result cannot be captured", do="write it out with out=, or resolve it"
            )
        return _at(loan, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def refuse_ended(self, tensor: torch.Tensor) -> None:
        """Refuse a result whose memory is free again.

        Raises:
            CaptureError: its loan ended with the scope it was made in.
        """
        loan = self.loan_of(tensor)
        if loan is not None and not loan.valid:
            raise CaptureError(
                f"a result made in the scope {loan.scope!r} is used after the scope closed",
                found=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}; its memory is recycled by now",
                do="take the destination in the outer scope and write the result there",
            )


def _at(loan: Fallback, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    memory = loan.memory
    start = int(memory.storage_offset()) // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), start, tuple(size), tuple(stride))


_pools: weakref.WeakKeyDictionary[Workspace, ResultPool] = weakref.WeakKeyDictionary()


def pool_of(workspace: Workspace) -> ResultPool:
    """The pool of a workspace, made at first use."""
    pool = _pools.get(workspace)
    if pool is None:
        pool = _pools[workspace] = ResultPool(workspace)
        workspace.refuse_recycled = pool.refuse_ended
    return pool
