"""What every op's tests share: an allocation guard, row invariance (K7), poison, and the op contract."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halma.hal.dispatch import Ops, bind
from halma.hal.workspace import Workspace

ROW_COUNTS = (1, 2, 3, 5, 8, 16, 17, 64)
"""Where BLAS changes kernels: fp32 products were seen to change bits at 2, 8 and 16 rows."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


forced_routes: dict[str, str] = {}
"""Op name to route name, for every call made here; filled by the fixture ``chosen_routes``."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors inside nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _AllocationGuard(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func._schema.is_mutable
        given = tensors_of((args, kwargs or {}))
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                self.fresh.append(f"{func} made {tensor.dtype}{list(tensor.shape)}")
            elif storage.nbytes() != storages[storage._cdata]:
                self.fresh.append(f"{func} resized its output to {tensor.dtype}{list(tensor.shape)}")
        return result


@contextlib.contextmanager
def no_allocation() -> Iterator[_AllocationGuard]:
    """Fails when an ATen call inside returns memory that none of its arguments brought.

    Run the code once before, so that plans and self-checks are made. Yields an object whose ``calls``
    counts the ATen calls that write (views are free, and a replayed graph has none).
    """
    guard = _AllocationGuard()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with guard:
            yield guard
    assert not guard.fresh, "allocations inside an op:\n  " + "\n  ".join(guard.fresh)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers: tells NaN payloads and -0 apart."""
    flat = tensor.detach().contiguous()
    return flat if flat.dtype == torch.bool else flat.view(_BITS[flat.dtype.itemsize])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, infinities and the largest numbers in turn; for integers the extremes."""
    out = torch.empty(tuple(shape), dtype=dtype)
    flat = out.view(-1)
    if dtype.is_floating_point:
        top = torch.finfo(dtype).max
        values: list[float] = [float("nan"), float("inf"), top, -float("inf"), -top]
    else:
        values = [torch.iinfo(dtype).max, -1, torch.iinfo(dtype).min]
    for position, value in enumerate(values):
        flat[position :: len(values)] = value
    return out


def fresh_ops(*, checked: bool = True, **kwargs: Any) -> Ops:
    """The op table over a workspace of its own (poisoning unless told otherwise)."""
    return bind(Workspace(checked=checked), **{"routes": dict(forced_routes), **kwargs})


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an op once in a workspace of its own; returns copies of its outputs (None for in-place ops)."""
    return _copies(getattr(fresh_ops(), name)(*args, **kwargs))


def _copies(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(tensor.clone() for tensor in result)
    return None if result is None else result.clone()


def check_contract(name: str, make_args: Callable[[], tuple[Any, ...]], **kwargs: Any) -> int:
    """The promises of every op: the same bits each time, in a sealed workspace, without allocation, into ``out=``.

    Args:
        make_args: builds the arguments anew (an op may write into them); every tensor leaf in them, together
            with the outputs, is compared between runs. Records such as weights or stores are not looked into:
            pass their tensors' owners through ``make_args`` and compare state in the test itself.

    Returns the number of writing ATen calls of one call: the nodes of a graph.
    """
    ops = fresh_ops()
    workspace = ops.workspace
    call = getattr(ops, name)

    def once(**more: Any) -> list[torch.Tensor]:
        args = make_args()
        result = call(*args, **kwargs, **more)
        return [tensor.clone() for tensor in tensors_of((result, args))]

    expected = once()
    once()  # a second plan, should the first call have changed an argument's shape: it must not
    workspace.seal()
    workspace.start()
    args = make_args()
    workspace.checked = False  # its poison would be counted
    with no_allocation() as guard:
        result = call(*args, **kwargs)
    workspace.checked = True
    found = [[tensor.clone() for tensor in tensors_of((result, args))]]  # the workspace reuses the result below
    if result is not None:
        destination = tuple(poisoned(t.shape, t.dtype) for t in tensors_of(result))
        workspace.start()
        given = call(*(args := make_args()), out=destination if isinstance(result, tuple) else destination[0], **kwargs)
        for ours, theirs in zip(tensors_of(given), destination, strict=True):
            assert ours.data_ptr() == theirs.data_ptr(), f"{name} did not write into out="
        found.append(tensors_of((given, args)))
    for other in found:
        assert len(other) == len(expected)
        for a, b in zip(expected, other, strict=True):
            assert same_bits(a, b), f"{name} gave other bits the second time"
    return guard.calls


def rows_are_invariant(
    call: Callable[..., Any],
    *rows: torch.Tensor,
    counts: Sequence[int] = ROW_COUNTS,
    poison: bool = True,
) -> None:
    """K7: a row's bits depend on nothing but the row.

    Args:
        call: takes tensors like ``rows`` with any number M of rows, returns a tensor or a tuple of tensors with M
            leading rows (clones: see :func:`run`).
        rows: at least ``max(counts)`` rows each, row i of all of them belongs together.
        poison: also check with every other row of the floating inputs poisoned.
    """
    total = max(counts)
    assert all(len(tensor) >= total for tensor in rows), "give at least as many rows as the largest count"
    alone = [tensors_of(call(*(tensor[i : i + 1].clone() for tensor in rows))) for i in range(total)]
    for count in counts:
        together = tensors_of(call(*(tensor[:count].clone() for tensor in rows)))
        for index in range(count):
            _compare(together, alone[index], index, f"{count} rows")
        if poison and count > 1:
            for index in {0, count // 2, count - 1}:
                given = [_all_but(tensor[:count], index) for tensor in rows]
                _compare(tensors_of(call(*given)), alone[index], index, f"{count} rows, the others poisoned")


def _compare(together: list[torch.Tensor], alone: list[torch.Tensor], index: int, where: str) -> None:
    for position, (whole, one) in enumerate(zip(together, alone, strict=True)):
        assert same_bits(whole[index : index + 1], one), f"output {position}, row {index} has other bits among {where}"


def _all_but(tensor: torch.Tensor, index: int) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor.clone()
    out = poisoned(tensor.shape, tensor.dtype)
    out[index] = tensor[index]
    return out
