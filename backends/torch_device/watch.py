"""Watches a capture from the dispatcher: what is recorded, what it allocates, and what it must not do.

The driver records kernels; it does not know which op and which line of the program made one, nor which host values
went into it. So each ATen call is noted with its arguments, as the CPU backend notes them, and calls that would read
the device on the host are refused before they reach the driver, which would only say that the capture is invalid.
Launches that come neither from ATen nor from this backend's kernels (Triton's, a library's) are not seen here: the
driver counts them, and their host values are listed only where the route declares them (an opaque route does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from halma.backends.cpu.lines import program_line
from halma.backends.cpu.modes import DispatchMode
from halma.backends.cpu.op_rules import Kind, Overload, Rule, masks_in, rule_of, tensors_in
from halma.backends.torch_device.faults import translated
from halma.hal.backend import GraphNode, PoolUse
from halma.hal.errors import CaptureError, HostReadError
from halma.hal.workspace import Workspace

_KEEP = "keep the value on the device, or do this before the capture or after the replay"
_PINNED = "copy from backend.memory.pinned(), or before the capture: a replay reads the host's memory again"


class CaptureWatch(DispatchMode):
    """The dispatch mode of one segment, and its recorder for opaque routes.

    Args:
        workspace: whose memory is named by offset.
        fail: told of every error, so that a program that catches it cannot hide it (G3).
        on_device: whether a tensor lies on a device of the family.
    """

    def __init__(
        self,
        workspace: Workspace,
        fail: Callable[[BaseException], None],
        on_device: Callable[[torch.Tensor], bool],
    ) -> None:
        super().__init__()
        self._on_device = on_device
        self.nodes: list[GraphNode] = []
        self.uses: list[PoolUse] = []
        self.random = False
        """A random number generator was used: its state is the graph's, and torch must replay it."""
        self._workspace = workspace
        self._fail = fail
        self._quiet = 0
        self._places: dict[int, int] = {}

    # -- what the dispatcher brings -----------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func, args = self._number_filled(func, args)
        rule = rule_of(func)
        if rule.kind in (Kind.NOW, Kind.CONSTANT):  # views, and values that stay on the host
            return func(*args, **kwargs)
        try:
            if rule.kind is Kind.COMPOSITE:
                with self:
                    return func.decompose(*args, **kwargs)
            self._refuse_host_work(func, rule, args, kwargs)
            return self._run(func, rule, args, kwargs)
        except BaseException as error:
            shown = translated(error, f"{rule.label} at {program_line()}")
            self._fail(shown)
            if shown is error:
                raise
            raise shown from error

    def _run(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = {_storage(t) for value in (*args, *kwargs.values()) for t in tensors_in(value)}
        described = None if self._quiet or rule.kind is Kind.EMPTY else self._described(rule, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if self._on_device(tensor) and tensor.numel() and _storage(tensor) not in given:
                nbytes = tensor.untyped_storage().nbytes()
                self.uses.append(PoolUse(rule.label, nbytes, program_line()))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if described is not None and self._touches_device(args, kwargs, result):
            self.nodes.append(GraphNode(rule.label, described, program_line(), self._workspace.in_op == 0))
        return result

    def _touches_device(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        return any(self._on_device(t) for value in (*args, *kwargs.values(), result) for t in tensors_in(value))

    def _number_filled(self, func: Overload, args: Any) -> tuple[Overload, Any]:
        """``x[index] = 2.0`` copies a scalar of the host, which no capture allows; as a fill its number is baked in."""
        if func is not torch.ops.aten.copy_.default:
            return func, args
        into, source = args[:2]
        if self._on_device(into) and source.is_cpu and source.dim() == 0 and not source.is_pinned():
            return torch.ops.aten.fill_.Scalar, (into, source.item())
        return func, args

    # -- refusals -----------------------------------------------------------------------------------

    def _refuse_host_work(self, func: Overload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not any(self._on_device(t) for value in (*args, *kwargs.values()) for t in tensors_in(value)):
            return
        if rule.kind is Kind.REFUSED:
            self._refuse(f"{rule.label} {rule.why}", _KEEP, reads="size" in rule.why or "reads" in rule.why)
        if rule.indexed and masks_in(args):
            self._refuse(
                f"indexing with a mask ({rule.label}) has a size that only device values know",
                "use torch.where(..., out=) or masked_fill_ on the whole tensor, or gather by indices",
            )
        if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._refuse(
                "repeat_interleave() by a tensor reads it on the host to know the size of its result",
                "pass output_size=",
            )
        self._refuse_copy(func, args, kwargs)

    def _refuse_copy(self, func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func is torch.ops.aten._to_copy.default:
            to = kwargs.get("device")
            if self._on_device(args[0]) and to is not None and torch.device(to).type == "cpu":
                self._refuse("a copy to the host reads the device", _KEEP)
        elif func is torch.ops.aten.copy_.default:
            into, source = args[:2]
            if self._on_device(into) and source.is_cpu and source.numel() and not source.is_pinned():
                self._refuse("a copy of pageable host memory into the device is not capturable", _PINNED, reads=False)
            if into.is_cpu and self._on_device(source) and not into.is_pinned():
                self._refuse("a copy to the host reads the device", _KEEP)

    def _refuse(self, what: str, do: str, *, reads: bool = True) -> NoReturn:
        kind = HostReadError if reads else CaptureError
        raise kind(f"{what}, inside a capture", found=f"at {program_line()}", do=do)

    # -- nodes --------------------------------------------------------------------------------------

    def _described(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple((name, self._value(value)) for name, value in rule.bound(args, kwargs))

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._value(item) for item in value)
        return "a generator" if isinstance(value, torch.Generator) else value

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Memory named by where it lies in the workspace, or by the order in which the program first touched it."""
        geometry = (str(tensor.dtype), tuple(tensor.shape), tensor.stride())
        if tensor.is_cpu:
            held = tensor.tolist() if tensor.numel() == 1 else ()
            return ("host", held, *geometry)
        offset = self._workspace.offset_of(tensor)
        if offset is not None:
            return ("workspace", offset, *geometry)
        number = self._places.setdefault(tensor.untyped_storage().data_ptr(), len(self._places))
        return ("external", number, tensor.storage_offset(), *geometry)

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Launch an opaque route into the capture, as one node with the host values that it declares."""
        try:
            places = [("reads", self._place(t)) for t in reads] + [("writes", self._place(t)) for t in writes]
            self.nodes.append(GraphNode(name, (*parameters, *places), program_line(), self._workspace.in_op == 0))
            self._quiet += 1
            try:
                launch()
            finally:
                self._quiet -= 1
        except BaseException as error:
            shown = translated(error, f"{name} at {program_line()}")
            self._fail(shown)
            if shown is error:
                raise
            raise shown from error

    def note_launch(self, name: str, parameters: Sequence[tuple[str, Any]]) -> None:
        """A kernel of this backend was launched into the capture; part of an opaque node it is no node of its own."""
        if not self._quiet:
            self.nodes.append(GraphNode(name, tuple(parameters), program_line(), self._workspace.in_op == 0))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
