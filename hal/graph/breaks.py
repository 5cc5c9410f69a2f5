"""Points of a program where the host must act: they split a piecewise capture in two.

``with break_point(out=cell) as host: y = host(fn, x)`` or ``@eager_break(out=Cell)`` over a function. In a
piecewise capture the segment ends before the break; ``fn`` runs now, on whatever its inputs hold, since nothing
captured has run; and it is filed to run again at each replay between the two segments, with the very same
arguments, which the graph keeps alive (G7). A full capture refuses breaks (G5). Everywhere else ``fn`` just runs.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeAlias

from torch.utils._python_dispatch import TorchDispatchMode

from halma.hal.backend import GraphNode
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import counters, made_current
from halma.hal.graph.cells import Cell, holds_tensors, host_values, leaves, pinned, write
from halma.hal.graph.current import current_scope, keep_until_closed, note_failure, one_time_work
from halma.hal.workspace import Place, Workspace

P = ParamSpec("P")


class OutForm(enum.Enum):
    """How a break declares its output where it has no cell (G6)."""

    IN_PLACE = "in place"
    """``fn`` writes into memory that it is given, and returns None."""
    NO_WRITE_BACK = "no write-back"
    """``fn`` may return anything; captured work goes on using what it returned at the capture."""


IN_PLACE: Final = OutForm.IN_PLACE
NO_WRITE_BACK: Final = OutForm.NO_WRITE_BACK
Out: TypeAlias = OutForm | Cell


@dataclass(eq=False)
class HostCall:
    """One call of a break: strong references to its arguments and result, and the memory it stood at."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: Place
    result: Any
    cell: Cell | None = None
    destination: Any = None


class Break:
    """What a graph files for one break; the seam builds it, never the program.

    Args:
        name: for messages, with the line that made it.
        out: how its output was declared.
        workspace: of the capture; host calls take the same memory at each replay.
    """

    def __init__(self, name: str, out: Out = IN_PLACE, workspace: Workspace | None = None) -> None:
        self.name = name
        self.out = out
        self.workspace = workspace
        self.calls: list[HostCall] = []

    @property
    def marker(self) -> bool:
        """Whether it only splits."""
        return not self.calls

    def __call__(self) -> None:
        """Run the calls for a replay, and copy results where the next segment reads them.

        Raises:
            CaptureError: a result does not fit its destination, or was returned though none was declared.
        """
        for call in self.calls:
            with self.workspace.standing_at(call.place) if self.workspace is not None else nullcontext():
                result = call.fn(*call.args, **call.kwargs)
            if call.cell is not None:
                call.cell.hold(write(call.destination, result, self.name))
            elif self.out is not NO_WRITE_BACK:
                _refuse_raw(result, self.name)

    def described(self) -> GraphNode:
        """As a node of the graph: its arguments are baked in like those of any other (G11)."""
        parameters = tuple(
            (f"call {index}", (host_values(call.args), host_values(call.kwargs)))
            for index, call in enumerate(self.calls)
        )
        return GraphNode("break", parameters, self.name)


class BreakPoint:
    """The context form of a break; as a target it gives ``host``, through which the host's work must go.

    Torch work in the block that does not go through ``host`` is refused: a replay could not repeat it. Views are
    fine. A block without a call is a bare marker.
    """

    def __init__(self, out: Out, name: str, *, guarded: bool = True) -> None:
        if not isinstance(out, (OutForm, Cell)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CaptureError(
                f"break {name!r} does not declare its output",
                asked=f"out={out!r}",
                do="pass IN_PLACE, a Cell or NO_WRITE_BACK; a plain tensor has no fixed address to write back to",
            )
        self.name = f"break {name!r} at {_program_line()}" if name else f"the break at {_program_line()}"
        self.out = out
        self._guard = _OutsideHost(self.name) if guarded else None
        self._record: Break | None = None
        self._open = False
        self._written = False
        self._scope = current_scope()
        if self._scope is not None:
            self._scope.note_break(self)

    def __enter__(self) -> Callable[..., Any]:
        counters.breaks_reached += 1
        scope = current_scope()
        if scope is not self._scope:
            error = CaptureError(
                f"{self.name} was made outside the capture it is entered in", do="make it where it runs"
            )
            note_failure(error)
            raise error
        if scope is not None:
            if scope.in_break:  # inside another break's host call, which runs the whole of this one
                scope.forget_break(self)
                self._scope = None
            else:
                scope.enter_break(self)
                if scope.active:
                    self._record = Break(self.name, self.out, scope.workspace)
        self._open = True
        if self._guard is not None:
            self._guard.__enter__()
        return self.host

    def host(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` now, and at each replay again. Returns what is in the cell, or None, or the raw result, as
        declared.

        Raises:
            CaptureError: it returned something that was not declared, its cell was used already in this capture,
                or its result does not fit memory that the cell was given.
        """
        try:
            return self._host(fn, args, kwargs)
        except BaseException as error:
            note_failure(error)
            raise

    def _host(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._open:
            raise CaptureError(f"{self.name} is closed", do="call host() inside its block")
        scope, record = self._scope, self._record
        place = scope.workspace.place() if scope is not None else None
        stream = made_current(scope.stream, scope.graph.backend) if record and scope and scope.stream else nullcontext()
        with self._guard.let_through() if self._guard is not None else nullcontext(), stream, one_time_work():
            if scope is not None:
                for tensor in leaves((args, kwargs)):
                    scope.workspace.refuse_recycled(tensor)  # its memory would be another's at each replay
            result = fn(*args, **kwargs)
            result, destination = self._deliver(result, (args, kwargs))
        keep_until_closed(args, kwargs, result)
        if record is not None and place is not None:
            cell = self.out if destination is not None and isinstance(self.out, Cell) else None
            record.calls.append(HostCall(fn, args, kwargs, place, result, cell, destination))
        return result

    def _deliver(self, result: Any, given: Any) -> tuple[Any, Any]:
        """What the program gets, and the destination if there is one."""
        out = self.out
        if isinstance(out, Cell):
            return (None, None) if result is None else self._fill(out, result, given)
        if out is IN_PLACE:
            _refuse_raw(result, self.name)
        return result, None

    def _fill(self, cell: Cell, result: Any, given: Any) -> tuple[Any, Any]:
        cell.check(result, self.name)
        if self._written:
            raise CaptureError(
                f"{self.name}: {cell} was written already in this break",
                asked="a second result in one destination",
                do="use a break and a cell for each result, or return them together",
            )
        if self._scope is not None:
            self._scope.claim(cell, self.name)
        self._written = True
        if cell.memory is not None:
            return cell.hold(write(cell.memory, result, self.name)), cell.memory
        if self._record is not None and self._scope is not None:
            result = pinned(result, given, self._scope.workspace)
        return cell.hold(result), result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.leave()
        self._open = False
        if error is None and isinstance(self.out, Cell) and not self._written:
            error = CaptureError(
                f"{self.name}: nothing was written into {self.out}",
                found="no host() call of the block returned anything",
                do="return the result from the function that host() runs, or declare out=IN_PLACE",
            )
            self._leave(error)
            raise error
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._scope is not None:
            self._scope.leave_break(self._record, error)


def break_point(out: Out = IN_PLACE, name: str = "") -> BreakPoint:
    """A break of the program, to be entered: ``with break_point(out=cell) as host: y = host(fn, x)``.

    Args:
        out: ``IN_PLACE``, a :class:`Cell` or ``NO_WRITE_BACK``.
        name: for messages; the line is always there.
    """
    return BreakPoint(out, name)


def break_here(name: str = "") -> None:
    """A bare marker: split the capture here, run nothing."""
    with BreakPoint(IN_PLACE, name, guarded=False):
        pass


def eager_break(*, out: Out | Callable[[], Cell], name: str = "") -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A function whose every call is a break: ``@eager_break(out=Cell)``.

    Args:
        out: as for :func:`break_point`, or what makes a cell for each call, such as ``Cell`` itself.
        name: for messages; the function's name by default.
    """

    def wrap(fn: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            to = out if isinstance(out, (OutForm, Cell)) else out()
            with BreakPoint(to, name or fn.__qualname__, guarded=False) as host:
                return host(fn, *args, **kwargs)

        return call

    return wrap


class _OutsideHost(TorchDispatchMode):
    """Refuses torch work of a break's block that does not go through ``host``."""

    def __init__(self, name: str) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._name = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, as slow as torch itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_view(func):
            return func(*args, **(kwargs or {}))
        error = CaptureError(
            f"{self._name}: torch work outside host()",
            asked=str(func),
            found="a replay repeats only what host() ran, so this would be done at the capture alone",
            do="move it into the function given to host(), or out of the break",
        )
        note_failure(error)
        raise error

    def leave(self) -> None:
        super().__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType]

    @contextmanager
    def let_through(self) -> Generator[None]:
        self.leave()
        try:
            yield
        finally:
            self.__enter__()


def _is_view(func: Any) -> bool:
    schema = func._schema
    aliases = [value.alias_info for value in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _refuse_raw(result: Any, name: str) -> None:
    if result is None:
        return
    raise CaptureError(
        f"{name}: it returned {'a raw tensor' if holds_tensors(result) else type(result).__name__}, out=IN_PLACE",
        found="captured work would go on using the result of the capture, for no replay writes it",
        do="write into a tensor that is passed in, or declare out=Cell() or out=NO_WRITE_BACK",
    )


_HERE = os.path.dirname(__file__) + os.sep


def _program_line() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"
