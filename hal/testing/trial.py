"""The checks of the admission suite, one function each: (trial, example) -> number of comparisons made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import Ops, OpSpec, OpTable, RouteSpec, Spec, like
from halma.hal.graph.current import current_recorder, set_current_recorder
from halma.hal.routes import REFERENCE
from halma.hal.testing.examples import Arguments, OpExample
from halma.hal.testing.poison import Failed as Failed
from halma.hal.testing.poison import Fill, FilledWorkspace, check_real_rows, same_bits
from halma.hal.testing.watch import AllocationWatch, flat_tensors
from halma.hal.workspace import Workspace

PAYLOADS = (float("nan"), float("inf"), -3e38, 0.0)
"""What padding rows hold in turn; the real rows must come out the same under each."""

_GUARD = 64
"""Elements before and behind an output that must stay untouched."""


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``; records keep their type. On the CPU it is ``value`` itself."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in cast("tuple[Any, ...]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts)
    return value


def given_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a caller gave: a record's own (addresses of its weights, say) are its maker's."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in cast("Sequence[Any]", value) for tensor in given_tensors(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for f in dataclasses.fields(value) if f.init for tensor in given_tensors(getattr(value, f.name))]
    return flat_tensors(value)


class Result:
    """Outputs of a call and the state it left, on the CPU, in memory of their own.

    ``whole`` is every output; ``outputs`` what may be read of them.
    """

    def __init__(self, outputs: Any, arguments: Arguments, example: OpExample) -> None:
        whole = flat_tensors(outputs)
        read = whole if example.defined is None else example.defined(arguments, whole)
        self.whole = [like(tensor) for tensor in whole]
        self.outputs = [tensor.cpu().clone() for tensor in read]
        state = [tensor for position in example.state for tensor in flat_tensors(arguments[position])]
        self.state = [tensor[1:].cpu().clone() if example.null_row else tensor.cpu().clone() for tensor in state]
        self.state_by_row = bool(set(example.state) & set(example.by_row))

    def real(self, rows: int) -> list[torch.Tensor]:
        """What must not depend on padding: the first rows of the outputs, and the state."""
        state = [tensor[:rows] for tensor in self.state] if self.state_by_row else self.state
        return [tensor[:rows] for tensor in self.outputs] + state


class _Launches:
    """Stands in for a graph: keeps the launches of opaque routes."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] = []

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.kept.append(launch)


class Trial:
    """A route beside its op's reference. The reference runs on the CPU, whatever the backend."""

    def __init__(self, spec: OpSpec, route: RouteSpec, backend: Backend) -> None:
        self.route = route
        self.backend = backend
        self.device = backend.device.torch_device
        self.spec = spec
        self._table = OpTable()
        self._table.ops[spec.name] = dataclasses.replace(spec, routes=[route])

    def applies(self, check: str) -> bool:
        """Whether ``check`` means anything for this route and backend."""
        if check == "allocation":
            return not self.route.opaque
        if check == "replay":
            return self.route.opaque
        if check == "row invariance":
            return bool(self.backend.capabilities.row_invariant)
        if check == "poison":
            return self.spec.padded
        return True

    def ops(self, route: str, device: torch.device, fill: Fill | None = None) -> Ops:
        """A dispatcher that runs one route in a poisoning workspace of its own, or in one that holds ``fill``."""
        workspace = Workspace(device, checked=True) if fill is None else FilledWorkspace(device, fill)
        return Ops(workspace, backend=self.backend.name, routes={self.spec.name: route}, ops=self._table)

    def call(self, ops: Ops, arguments: Arguments, **more: Any) -> Any:
        """The op, called."""
        return getattr(ops, self.spec.name)(*arguments, **more)

    def run(self, example: OpExample, arguments: Arguments, fill: Fill | None = None) -> Result:
        """The route once, in a fresh workspace."""
        here = tuple(moved(value, self.device) for value in arguments)
        return Result(self.call(self.ops(self.route.name, self.device, fill), here), here, example)

    def reference(self, example: OpExample, arguments: Arguments) -> Result:
        """What the reference gives for the same arguments, on the CPU."""
        return Result(self.call(self.ops(REFERENCE, torch.device("cpu")), arguments), arguments, example)


def _need_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], why: str) -> None:
    if len(found) != len(wanted):
        raise Failed(f"{len(found)} results instead of {len(wanted)} {why}")
    for position, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if not same_bits(a, b):
            raise Failed(f"result {position} has other bits {why}")


def _need_close(found: Result, wanted: Result, tolerance: float, why: str) -> None:
    pairs = zip(found.outputs + found.state, wanted.outputs + wanted.state, strict=True)
    for position, (a, b) in enumerate(pairs):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Failed(f"result {position} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}")
        if not b.is_floating_point():
            if not torch.equal(a, b):
                raise Failed(f"result {position} differs in {int((a != b).sum())} of {a.numel()} integers {why}")
            continue
        a, b = a.double(), b.double()
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            raise Failed(f"result {position} is finite where the reference is not, or the reverse, {why}")
        if not finite.any():
            continue
        largest = float(b[finite].abs().max())
        worst = float((a[finite] - b[finite]).abs().max())
        if worst > tolerance * largest:
            raise Failed(f"result {position} is off by {worst:.3g} with values up to {largest:.3g} {why}")


# -- the checks -----------------------------------------------------------------------------------------


def numerics(trial: Trial, example: OpExample) -> int:
    """Agrees with the reference."""
    for rows in example.rows:
        for seed in (0, 1):
            wanted = trial.reference(example, example.build(seed, rows))
            found = trial.run(example, example.build(seed, rows))
            _need_close(found, wanted, example.tolerance, f"at {rows} rows, seed {seed}")
    return 2 * len(example.rows)


def arguments_kept(trial: Trial, example: OpExample) -> int:
    """Writes to nothing but its outputs and state."""
    rows = max(example.rows)
    arguments = tuple(moved(value, trial.device) for value in example.build(0, rows))
    trial.call(trial.ops(trial.route.name, trial.device), arguments)
    for position, (ours, theirs) in enumerate(zip(arguments, example.build(0, rows), strict=True)):
        if position not in example.state:
            kept = [tensor.cpu() for tensor in given_tensors(ours)]
            _need_same(kept, given_tensors(theirs), f"in argument {position}")
    return len(arguments)


def out_variant(trial: Trial, example: OpExample) -> int:
    """Writes every element of ``out=`` and nothing beside it, whatever lay there."""
    if trial.spec.out is None:
        return 0
    rows = max(example.rows)
    wanted = trial.run(example, example.build(0, rows))
    for byte in (0xFF, 0x00):
        arguments = tuple(moved(value, trial.device) for value in example.build(0, rows))
        guarded = [_Guarded(tensor, byte, trial.device) for tensor in wanted.whole]
        views = tuple(one.view for one in guarded)
        given = trial.call(
            trial.ops(trial.route.name, trial.device), arguments, out=views[0] if len(views) == 1 else views
        )
        if [t.data_ptr() for t in flat_tensors(given)] != [view.data_ptr() for view in views]:
            raise Failed("the results do not lie in out=")
        _need_same(Result(given, arguments, example).outputs, wanted.outputs, f"in an out= that held bytes {byte:#04x}")
        for one in guarded:
            one.check()
    return 2


class _Guarded:
    """An output with guard elements round it, all filled with one byte."""

    def __init__(self, like: Spec, byte: int, device: torch.device) -> None:
        self._byte = byte
        size = math.prod(like.shape)
        self._memory = torch.empty(size + 2 * _GUARD, dtype=like.dtype, device=device)
        self._memory.view(torch.uint8).fill_(byte)
        self._inside = slice(_GUARD, _GUARD + size)
        self.view = self._memory[self._inside].view(like.shape)

    def check(self) -> None:
        ends = (self._memory[:_GUARD], self._memory[self._inside.stop :])
        if any(bool((end.view(torch.uint8) != self._byte).any()) for end in ends):
            raise Failed("it writes outside of out=")


def allocation(trial: Trial, example: OpExample) -> int:
    """Takes no memory but the workspace's: sealed after the first call, the second makes nothing fresh."""
    for rows in sorted(example.rows, reverse=True):
        ops = trial.ops(trial.route.name, trial.device)
        trial.call(ops, tuple(moved(value, trial.device) for value in example.build(0, rows)))
        ops.workspace.seal()
        ops.workspace.start()
        arguments = tuple(moved(value, trial.device) for value in example.build(0, rows))
        with AllocationWatch() as watch:
            trial.call(ops, arguments)
        if watch.fresh:
            raise Failed(f"{watch.fresh[0]} ({len(watch.fresh)} such calls at {rows} rows)")
    return len(example.rows)


def replay(trial: Trial, example: OpExample) -> int:
    """An opaque launch runs again on the same addresses, follows new inputs and takes no scratch of its own."""
    rows = max(example.rows)
    if current_recorder() is not None:
        raise Failed("a graph is being captured: try it outside")
    ops = trial.ops(trial.route.name, trial.device)
    trial.call(ops, tuple(moved(value, trial.device) for value in example.build(0, rows)))
    ops.workspace.seal()
    ops.workspace.start()
    arguments = tuple(moved(value, trial.device) for value in example.build(0, rows))
    launches = _Launches()
    set_current_recorder(launches)
    try:
        outputs = trial.call(ops, arguments)
    finally:
        set_current_recorder(None)
    if len(launches.kept) != 1:
        raise Failed(f"{len(launches.kept)} launches were recorded instead of one")
    for seed in (1, 0, 0):
        for mine, theirs in zip(given_tensors(arguments), given_tensors(example.build(seed, rows)), strict=True):
            mine.copy_(theirs)
        launches.kept[0]()
        wanted = trial.run(example, example.build(seed, rows))
        found = Result(outputs, arguments, example)
        _need_same(found.outputs + found.state, wanted.outputs + wanted.state, "when its launch is replayed")
    return 3


def padding(trial: Trial, example: OpExample) -> int:
    """Real rows come out bit for bit the same, whatever the padding rows hold."""
    rows = max(example.rows)
    compared = 0
    if not example.by_row and example.padding is None:
        return 0
    for real in sorted({1, rows // 2, rows - 1} - {0, rows}):
        results: list[list[torch.Tensor]] = []
        for payload in PAYLOADS:
            arguments = example.build(0, rows)
            example.pad(arguments, real, payload)
            results.append(trial.run(example, arguments).real(real))
            _need_same(results[-1], results[0], f"with {payload} in the rows from {real} on")
            compared += 1
    return compared


def poison(trial: Trial, example: OpExample) -> int:
    """Nothing beside the real rows matters, nor what scratch and outputs held (:mod:`halma.hal.testing.poison`)."""
    rows = max(example.rows)
    real = max(rows // 2, 1)
    if example.poison is None and not example.floating_rows(example.build(0, rows)):
        return 0

    def make(fill: Fill) -> Arguments:
        arguments = example.build(0, rows)
        if example.poison is not None:
            example.poison(arguments, fill)
        else:
            for tensor in example.floating_rows(arguments):
                fill(tensor[real:])
        return arguments

    def run(arguments: Arguments, fill: Fill) -> list[torch.Tensor]:
        result = trial.run(example, arguments, fill)
        return result.real(real) if example.poison is None else result.outputs + result.state

    return check_real_rows(make, run)


def determinism(trial: Trial, example: OpExample) -> int:
    """The same call gives the same bits."""
    rows = max(example.rows)
    first = trial.run(example, example.build(0, rows))
    for _ in range(2):
        again = trial.run(example, example.build(0, rows))
        _need_same(again.outputs + again.state, first.outputs + first.state, "when run again")
    return 2


def extreme_values(trial: Trial, example: OpExample) -> int:
    """Zeros, tiny and large inputs: finite where the reference is, and close to it."""
    rows = max(example.rows)

    def scaled(factor: float) -> Arguments:
        arguments = example.build(0, rows)
        for tensor in example.floating_rows(arguments):
            tensor.mul_(factor)
        return arguments

    if not example.floating_rows(example.build(0, rows)):
        return 0
    for factor in example.scales:
        wanted = trial.reference(example, scaled(factor))
        _need_close(trial.run(example, scaled(factor)), wanted, example.tolerance, f"with inputs times {factor:g}")
    return len(example.scales)


def row_invariance(trial: Trial, example: OpExample) -> int:
    """A row's bits do not depend on how many rows stand beside it (K7), where the backend says so."""
    if not example.by_row:
        return 0
    rows = max(example.rows)
    together = trial.run(example, example.build(0, rows)).real(rows)
    for row in range(rows):
        arguments = list(example.build(0, rows))
        for position in example.by_row:
            arguments[position] = cast(torch.Tensor, arguments[position])[row : row + 1].clone()
        alone = trial.run(example, tuple(arguments)).real(1)
        _need_same(alone, [tensor[row : row + 1] for tensor in together], f"in row {row} alone and among {rows}")
    return rows


CHECKS: dict[str, Callable[[Trial, OpExample], int]] = {
    "numerics": numerics,
    "arguments kept": arguments_kept,
    "out variant": out_variant,
    "allocation": allocation,
    "replay": replay,
    "padding": padding,
    "poison": poison,
    "determinism": determinism,
    "extreme values": extreme_values,
    "row invariance": row_invariance,
}
"""Every check by name. ``allocation`` is for transparent routes, ``replay`` for opaque ones, ``poison`` for ops with
padding of their own (``padded``): there it must have run."""
