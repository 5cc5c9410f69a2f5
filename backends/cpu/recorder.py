"""The dispatch mode that turns calls into nodes. Nothing runs while it is on, except views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from halma.backends.cpu.device import CpuDevice
from halma.backends.cpu.fast_calls import bind
from halma.backends.cpu.host_guard import HostGuard
from halma.backends.cpu.lines import program_line
from halma.backends.cpu.modes import DispatchMode, entered
from halma.backends.cpu.op_rules import Kind, Overload, Rule, masks_in, rule_of, tensors_in
from halma.backends.cpu.races import find_race
from halma.backends.cpu.results import FallbackUse, Placed, infer, pool_of
from halma.backends.cpu.streams import CaptureClock, CpuStream
from halma.backends.cpu.tape import Node, Template, Work
from halma.hal.errors import CaptureError
from halma.hal.workspace import POISON_BYTE, Workspace
from halma.hal.workspace_fallback import Fallback

_USE_WHERE = "use torch.where(..., out=) or masked_fill_ on the whole tensor, or gather by indices"
_MOVES = torch.ops.aten.copy_.default


class Recorder(DispatchMode):
    """Records one segment.

    Args:
        stream: the captured stream.
        device: says which stream is current.
        workspace: where results without a destination go.
        planning: a dry run, whose tape is thrown away: first-time work may run beside it, and in checked mode
            destinations are compared with the shapes of the results.
    """

    def __init__(self, stream: CpuStream, device: CpuDevice, workspace: Workspace, *, planning: bool) -> None:
        super().__init__()
        self.clock = CaptureClock(stream)
        self.guard = HostGuard(self.clock.fail)
        self.planning = planning
        self.workspace = workspace
        self.grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self._device = device
        self._pool = pool_of(workspace)
        self._nodes: list[Node] = []
        self._made_on: dict[Fallback, CpuStream] = {}
        self._fallbacks: list[FallbackUse] = []
        self._handlers: dict[Kind, Callable[[Overload, Rule, Sequence[Any], Mapping[str, Any]], Any]] = {
            Kind.COMPOSITE: self._decompose,
            Kind.REFUSED: self._refuse,
            Kind.CONSTANT: self._constant,
            Kind.EMPTY: self._empty,
            Kind.COPY: self._copy,
            Kind.WRITE: self._write,
            Kind.FRESH: self._fresh,
        }
        self._free_dead(poison=False)

    # -- what the dispatcher brings -----------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            rule = rule_of(func)
            if rule.kind is Kind.NOW:  # every other call of a program is a view
                return func(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunction():
                self._check(func, rule, args, kwargs or {})
                return self._handlers[rule.kind](func, rule, args, kwargs or {})
        except BaseException as error:
            self.clock.fail(error)
            raise

    def _check(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        gradients = torch.is_grad_enabled()
        for value in (*args, *kwargs.values()):
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                if not tensor.is_cpu:
                    raise CaptureError(
                        f"{rule.label} was given a tensor on {tensor.device} inside a capture of the cpu backend",
                        found=f"at {program_line()}",
                        do="keep everything that a program touches on its backend's device",
                    )
                if gradients and tensor.requires_grad:
                    raise CaptureError(
                        f"{rule.label} would record gradients inside a capture",
                        found=f"an argument requires grad, at {program_line()}",
                        do="capture and replay under torch.no_grad()",
                    )
        if rule.indexed and masks_in(args):
            self.guard.refuse(
                f"indexing with a mask ({rule_of(func).label}) has a size that only device values know", _USE_WHERE
            )

    def _refuse(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        called = f" (in {self.guard.calling})" if self.guard.calling else ""
        self.guard.refuse(
            f"{rule_of(func).label}{called} {rule.why}",
            "keep the value on the device, or do this before the capture or after the replay",
        )

    def _decompose(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _constant(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value: torch.Tensor = args[0]
        if value.dim() or self.guard.calling != "__setitem__":
            self.guard.refuse(
                f"a constant of host values{f' in {self.guard.calling}' if self.guard.calling else ''} "
                "would be baked into the graph",
                "make the tensor before the capture and refresh it, or use numbers (fill_) and slices",
            )
        # x[index] = 2.0: the number is an argument like any other, and a node may own no tensor.
        placed = self._place(func, value, out_variant=True)
        self._call(torch.ops.aten.fill_.Scalar, (placed.alias, value.item()), {})
        return placed.handed

    def _empty(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._place(func, infer(func, args, kwargs), out_variant=True).handed

    def _copy(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        placed = self._place(func, infer(func, args, kwargs), out_variant=True)
        source = self._on_tape(args[0])
        self._call(_MOVES, (placed.alias, source), {}, work=Work.COPY)
        return placed.handed

    def _write(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(name is None for name in rule.returns):
            return self._fresh(func, rule, args, kwargs)
        if self.planning and self.workspace.checked:
            # Meta kernels import torch's compiler, as slow as torch itself; unchecked, the first replay finds it.
            self._check_destination(func, rule, args, kwargs)
        work = Work.COPY if func is _MOVES else Work.KERNEL
        self._call(func, self._on_tape(args), self._on_tape(kwargs), work=work)
        given = dict(rule.bound(args, kwargs))
        results = tuple(given[name] for name in rule.returns if name is not None)
        return results[0] if len(results) == 1 else results or None

    def _check_destination(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            results = infer(func, args, kwargs)
        except CaptureError:
            return  # no meta kernel: the first replay checks instead
        found = [results] if isinstance(results, torch.Tensor) else list(results or ())
        given = dict(rule.bound(args, kwargs))
        for name, result in zip(rule.returns, found, strict=False):
            destination = given.get(name or "")
            if isinstance(destination, torch.Tensor) and destination.shape != result.shape:
                raise resized(rule_of(func).label, destination.shape, result.shape, program_line())

    def _fresh(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.guard.refuse(
                "repeat_interleave() by a tensor reads it on the host to know the size of its result",
                "pass output_size=",
            )
        aliased = dict(rule.bound(args, kwargs))
        metas = infer(func, args, kwargs)
        args, kwargs = self._on_tape(args), self._on_tape(kwargs)
        placed: list[Placed] = []

        def place(meta: Any) -> Any:
            if not isinstance(meta, torch.Tensor):
                return meta
            placed.append(self._place(func, meta, out_variant=rule.out_variant is not None))
            return placed[-1].handed

        if any(name is not None for name in rule.returns):  # some results are arguments, some are new
            sequence = metas if isinstance(metas, (list, tuple)) else (metas,)
            pairs = zip(rule.returns, sequence, strict=True)
            results: Any = tuple(place(meta) if name is None else aliased[name] for name, meta in pairs)
            results = results if len(results) > 1 else results[0]
            fresh = [position for position, name in enumerate(rule.returns) if name is None]
        else:
            results, fresh = tree_map(place, metas), None
        self._fill(func, rule, args, kwargs, [p.alias for p in placed], fresh)
        return results

    def _fill(
        self,
        func: Overload,
        rule: Rule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: list[torch.Tensor],
        fresh: list[int] | None,
    ) -> None:
        out = rule.out_variant
        if out is not None and len(rule_of(out).outs) == len(targets):
            its = rule_of(out)
            given = {name: value for name, value in kwargs.items() if name in its.names}
            self._call(out, args, {**given, **dict(zip(its.outs, targets, strict=True))})
            return
        call = partial(_run_and_copy, partial(func, *args, **kwargs), targets, fresh)
        self._add(
            Node(
                rule_of(func).label, call, Work.KERNEL, program_line(), self._stamp(), func, args, kwargs,
                writes=tuple(targets), allocations=len(targets),
            )
        )  # fmt: skip

    # -- opaque work --------------------------------------------------------------------------------

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Append one node that runs ``launch`` at replay; nothing runs now."""
        try:
            with self.aside():
                its_reads, its_writes = (tuple(self._pool.alias(t) for t in tensors) for tensors in (reads, writes))
                line, stamp = program_line(), self._stamp()
            self._add(
                Node(
                    name, launch, Work.KERNEL, line, stamp,
                    reads=its_reads, writes=its_writes, baked=tuple(parameters),
                )
            )  # fmt: skip
        except BaseException as error:
            self.clock.fail(error)
            raise

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Inside, work runs at once instead of being recorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    # -- the tape -----------------------------------------------------------------------------------

    def _call(self, func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any], work: Work = Work.KERNEL) -> None:
        call = bind(func, args, kwargs)
        self._add(Node(rule_of(func).label, call, work, program_line(), self._stamp(), func, args, kwargs))

    def _add(self, node: Node) -> None:
        self._free_dead(poison=True)
        node.raw = self.workspace.in_op == 0
        self._nodes.append(node)

    def _stamp(self) -> Any:
        return self.clock.stamp(self._device.current_stream())

    def _place(self, func: Overload, meta: torch.Tensor, *, out_variant: bool) -> Placed:
        self._free_dead(poison=True)
        placed = self._pool.place(meta)
        loan = self._pool.loan_of(placed.handed)
        if loan is not None:
            self._made_on[loan] = self._device.current_stream()
        self._fallbacks.append(FallbackUse(rule_of(func).label, placed.nbytes, program_line(), out_variant))
        return placed

    def _on_tape(self, values: Any) -> Any:
        if not self._pool.lends:
            return values
        return tree_map(lambda value: self._pool.alias(value) if isinstance(value, torch.Tensor) else value, values)

    def _free_dead(self, *, poison: bool) -> None:
        """Take back the memory of results whose tensors died since the last call."""
        dead = self._pool.dead
        while dead:
            loan = dead.popleft()
            maker = self._made_on.pop(loan, self.clock.origin)
            if not loan.give_back() or not (poison and self.workspace.checked):
                continue
            stream = self._device.current_stream()
            stream = stream if self.clock.takes_part(stream) else self.clock.origin
            if not self.clock.has_seen(stream, maker):
                continue  # its last use may still run there; poison from here would be a race of our own making
            stamp = self.clock.stamp(stream)
            call = partial(loan.memory.fill_, POISON_BYTE)
            self._nodes.append(
                Node("poison", call, Work.POISON, f"recycled in {loan.scope!r}", stamp, writes=(loan.memory,))
            )

    # -- the end ------------------------------------------------------------------------------------

    def finish(self) -> Template:
        """The template, once the modes are off.

        Raises:
            CaptureError: work was not joined, or two pieces of it race.
            BaseException: whatever made the capture invalid before, also if the program caught it.
        """
        if self.clock.failure is not None:
            raise self.clock.failure
        self._free_dead(poison=True)
        for stream in self.clock.unjoined():
            last = next(node for node in reversed(self._nodes) if node.stamp.stream is stream)
            raise CaptureError(
                f"unjoined work on stream {stream.name!r} at the end of the capture",
                found=f"its last piece is {last.name} at {last.where}",
                do=f"record an event on {stream.name!r} and let {self.clock.origin.name!r} wait for it",
            )
        self._refuse_race()
        return Template(self._nodes, self.workspace, self.grad_mode, self._fallbacks)

    def _refuse_race(self) -> None:
        if len({node.stamp.stream for node in self._nodes}) < 2:
            return
        race = find_race(access for position, node in enumerate(self._nodes) for access in node.accesses(position))
        if race is None:
            return
        first, second = (self._nodes[access.node] for access in race)
        shown = [
            f"{node.name} {'writes' if access.writes else 'reads'} it on stream {node.stamp.stream.name!r}, "
            f"at {node.where}"
            for node, access in zip((first, second), race, strict=True)
        ]
        raise CaptureError(
            "two streams touch the same memory in no order",
            found=(*shown, f"{min(race[0].end, race[1].end) - max(race[0].start, race[1].start):,} bytes lie in both"),
            do="fork before the first and join before the second: record an event on one, wait for it on the other",
        )


def resized(op: str, destination: Sequence[int], result: Sequence[int], where: str) -> CaptureError:
    """The refusal of a destination that does not fit."""
    return CaptureError(
        f"{op} would resize its destination, which a graph cannot allow",
        asked=f"a result of shape {list(result)} into a destination of shape {list(destination)}",
        found=f"at {where}",
        do="give a destination of the result's shape",
    )


def _run_and_copy(function: Callable[[], Any], targets: Sequence[torch.Tensor], fresh: Sequence[int] | None) -> None:
    results = function()
    found = list(tensors_in(results if fresh is None else [results[position] for position in fresh]))
    for target, result in zip(targets, found, strict=True):
        target.copy_(result)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Generator[None]:
    """Both modes on, and off again in order whatever happens."""
    with entered(recorder), entered(recorder.guard):
        yield
