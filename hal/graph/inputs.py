"""Inputs of captured programs: one address for life, fresh rows every step, declared padding.

A graph reads the address it was captured with. So an input is bound once, to memory of its own at full
capacity, and every step copies rows into it. A step that forgets would replay on the rows of the step before:
the replay is refused instead (G12). Rows behind the step's own are rewritten with a declared value every step,
so that no step sees another's leftovers (G13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from halma.hal.backend import Backend, Event, Stream
from halma.hal.errors import CaptureError, StaleInputError
from halma.hal.graph.descriptor import Descriptor

Number = bool | int | float
Per = Literal["token", "request", "step"]
STAGES = 2
"""Staging buffers of an input: with two, the host fills one while the device may still read the other."""


@dataclass
class InputCounters:
    """What happened to one input. ``waits``: refreshes that found both staging buffers still being read."""

    binds: int = 0
    host_refreshes: int = 0
    device_refreshes: int = 0
    keeps: int = 0
    waits: int = 0
    last_source: str = ""


class _Stage:
    """One staging buffer, and the event behind the last work that used this turn."""

    def __init__(self, memory: torch.Tensor, event: Event) -> None:
        self.memory = memory
        self.event = event
        self.used = False


class PersistentInput:
    """One input of captured programs, at a fixed address.

    The tensor must outlive every graph that reads it. Not thread-safe: one thread refreshes and replays.

    Args:
        name: shown in errors.
        tensor: its memory, [capacity, ...], contiguous, on the device; never replaced, resized or moved.
        pad: what rows behind the step's own hold, every step.
        null: what every row holds while a program is warmed up and captured, where padding would make the
            program skip its work: a target that takes any write, such as the null page. ``pad`` by default.
        backend: whose device it is; gives pinned staging and events. Only host memory does without.
        per: what a row stands for: a ``token`` or a ``request`` of the step, so that a step with more rows than
            its descriptor has is refused, or the whole ``step``, where their number has no meaning.

    Raises:
        CaptureError: the tensor has no rows, is not contiguous, or ``pad`` or ``null`` is no value of its dtype.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        pad: Number,
        null: Number | None = None,
        backend: Backend | None = None,
        per: Per = "token",
    ) -> None:
        self.name = name
        self.per: Per = per
        self.tensor = tensor
        self.pad = pad
        self.null = pad if null is None else null
        self.counters = InputCounters(binds=1)
        self.rows: int | None = None
        """Rows of the last refresh; None before the first and after :meth:`valid_work`."""
        self.fresh = False
        if tensor.dim() == 0 or not tensor.is_contiguous():
            raise self._refused(
                "must be a contiguous tensor of rows", f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
            )
        if backend is None and tensor.device.type != "cpu":
            raise self._refused("lies on a device, so it needs its backend", f"it lies on {tensor.device}")
        for what, value in (("pad", pad), ("null", self.null)):
            if not _representable(value, tensor.dtype):
                raise self._refused(f"cannot hold its {what} value", f"{value!r} is no value of {tensor.dtype}")
        self._backend = backend
        self._address = tensor.data_ptr()
        self._stages = [] if backend is None else [self._stage(backend, number) for number in range(STAGES)]
        self._turn = 0
        self._written: tuple[Stream, Event] | None = None
        self._reader: Stream | None = None
        self._read = None if backend is None else backend.device.new_event(f"{name} read")
        # keep() copies nothing, so it takes no turn of the staging: a host that keeps never waits, however far ahead.
        self._kept = None if backend is None else backend.device.new_event(f"{name} kept")

    def _stage(self, backend: Backend, number: int) -> _Stage:
        memory = backend.memory.pinned(self.tensor.shape, self.tensor.dtype)
        return _Stage(memory, backend.device.new_event(f"{self.name} staged {number}"))

    @property
    def capacity(self) -> int:
        """The most rows a step can bring."""
        return self.tensor.shape[0]

    def refresh(self, rows: torch.Tensor) -> None:
        """Copy this step's rows [n, ...] in, 0 <= n <= capacity, and rewrite the rest with ``pad``.

        Rows on the host go through pinned memory of the input's own, so the caller's may be changed or freed at
        once. Rows on the device are read in the order of the current stream.

        Raises:
            CaptureError: too many rows, another dtype, shape or device, or a capture is open on this thread.
        """
        self._check_fit(rows)
        self._refuse_in_capture("refresh()")
        host = rows.device.type == "cpu"
        with torch.no_grad():
            stage = self._next_stage()
            if host and stage is not None:
                rows = stage.memory[: len(rows)].copy_(rows)
            if len(rows):
                self.tensor[: len(rows)].copy_(rows, non_blocking=True)
            self._rewrite_padding(len(rows))
            self._mark_written(None if stage is None else stage.event)
        self.rows = len(rows)
        self.fresh = True
        self.counters.last_source = "host" if host else "device"
        if host:
            self.counters.host_refreshes += 1
        else:
            self.counters.device_refreshes += 1

    def keep(self) -> None:
        """Say that this step uses the rows of the last one; the padding is rewritten all the same.

        Raises:
            CaptureError: there are no rows to keep, or a capture is open on this thread.
        """
        if self.rows is None:
            raise self._refused("was kept before any refresh", "it holds no rows of a step", do="refresh() it first")
        self._refuse_in_capture("keep()")
        with torch.no_grad():
            self._follow_reader()
            self._rewrite_padding(self.rows)
            self._mark_written(self._kept)
        self.fresh = True
        self.counters.keeps += 1

    def prefix(self, rows: int) -> torch.Tensor:
        """A view of the first ``rows`` rows, for the program of one descriptor.

        Raises:
            CaptureError: more rows than there are.
        """
        if not 0 <= rows <= self.capacity:
            raise self._refused("has no such prefix", f"{self.capacity} rows of capacity", asked=f"{rows} rows")
        return self.tensor[:rows]

    def valid_work(self) -> None:
        """Fill all rows with ``null``, so that warm-up and capture see work that a real step could have (G13).

        It is no refresh: the first replay still wants rows of its own.

        Raises:
            CaptureError: a capture is open on this thread.
        """
        self._refuse_in_capture("valid_work()")
        with torch.no_grad():
            stage = self._next_stage()
            self.tensor.fill_(self.null)
            self._mark_written(None if stage is None else stage.event)
        self.rows = None
        self.fresh = False
        self.counters.last_source = "capture"

    def check_place(self) -> None:
        """Refuse memory that is not what graphs were captured with.

        Raises:
            CaptureError: the tensor was replaced or moved.
        """
        if self.tensor.data_ptr() != self._address:
            raise self._refused(
                "has moved", "the tensor's memory is not the one it was bound to", do="write with refresh()"
            )

    def check_rows(self, descriptor: Descriptor) -> None:
        """Refuse more rows than the step has: a replay would leave the last ones out without a word.

        Raises:
            CaptureError: too many rows.
        """
        room = {"token": descriptor.num_tokens, "request": descriptor.num_requests}.get(self.per)
        if room is not None and self.rows is not None and self.rows > room:
            raise self._refused(
                f"holds {self.rows} rows, one a {self.per}",
                f"{descriptor} has room for {room}",
                do='choose a descriptor that holds the step (fit() finds it), or declare the input per="step"',
            )

    def consume(self, stream: Stream | None = None) -> None:
        """A replay on ``stream`` takes the rows: it waits for a refresh on another stream, and wants new ones next.

        A later refresh on another stream waits for it in turn.
        """
        self.fresh = False
        self._reader = stream
        if stream is not None and self._written is not None and self._written[0] != stream:
            stream.wait(self._written[1])

    def history(self) -> str:
        """Refreshes so far, in words."""
        c = self.counters
        if not c.host_refreshes + c.device_refreshes:
            return f"{self.name}: never refreshed"
        return (
            f"{self.name}: {c.host_refreshes} refreshes from the host, {c.device_refreshes} from the device, "
            f"{c.keeps} keeps; the last came from the {c.last_source}"
        )

    # -- inside -------------------------------------------------------------------------------------

    def _rewrite_padding(self, rows: int) -> None:
        if rows < self.capacity:
            self.tensor[rows:].fill_(self.pad)

    def _next_stage(self) -> _Stage | None:
        """The next turn, once the device is done with what it held, and behind the replay that reads the input."""
        if not self._stages:
            return None
        self._follow_reader()
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % len(self._stages)
        if stage.used and not stage.event.query():
            self.counters.waits += 1
            stage.event.synchronize()
        stage.used = True
        return stage

    def _follow_reader(self) -> None:
        """Let what is written next come behind the replay that reads the input, where that is on another stream."""
        if self._reader is not None and self._backend is not None and self._read is not None:
            current = self._backend.device.current_stream()
            if self._reader != current:
                self._reader.record(self._read)
                current.wait(self._read)

    def _mark_written(self, event: Event | None) -> None:
        if event is None or self._backend is None:
            return
        stream = self._backend.device.current_stream()
        stream.record(event)
        self._written = (stream, event)

    def _check_fit(self, rows: torch.Tensor) -> None:
        mine = self.tensor
        if not isinstance(rows, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self._refused("takes tensors", f"{type(rows).__name__}", do="torch.tensor(...) of its dtype")
        asked = f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)} on {rows.device}"
        takes = f"{str(mine.dtype).removeprefix('torch.')}{list(mine.shape)} on {mine.device}"
        if rows.dim() == mine.dim() and len(rows) > self.capacity:
            raise self._refused(f"has room for {self.capacity} rows", takes, asked=asked, do="split the step")
        if rows.dim() != mine.dim() or rows.shape[1:] != mine.shape[1:]:
            raise self._refused("takes rows of another shape", takes, asked=asked)
        if rows.dtype != mine.dtype:
            raise self._refused("takes another dtype", takes, asked=asked, do="convert before refresh(), or bind anew")
        if rows.device.type != "cpu" and rows.device != mine.device:
            raise self._refused("takes rows from the host or its own device", takes, asked=asked)

    def _refuse_in_capture(self, what: str) -> None:
        # A query that fails raises from here: taken for "no", the copy would go into the graph (G25).
        if self._backend is not None and self._backend.graphs.is_capturing():
            raise self._refused(
                f"cannot take {what} inside a capture",
                "the copy would be recorded, and every replay would bring the rows of now",
                do="refresh inputs before the replay, outside the program",
            )

    def _refused(self, what: str, found: str, *, asked: str | None = None, do: str | None = None) -> CaptureError:
        return CaptureError(f"input {self.name!r} {what}", asked=asked, found=found, do=do)


class InputSet:
    """The inputs that the graphs of one program read.

    Raises:
        CaptureError: two of them have one name.
    """

    def __init__(self, inputs: Sequence[PersistentInput] = ()) -> None:
        self._inputs = {one.name: one for one in inputs}
        if len(self._inputs) != len(inputs):
            names = [one.name for one in inputs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CaptureError("two inputs have one name", found=twice, do="give every input a name of its own")

    def __iter__(self) -> Iterator[PersistentInput]:
        return iter(self._inputs.values())

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, name: str) -> PersistentInput:
        if name not in self._inputs:
            raise CaptureError(f"there is no input {name!r}", found=f"inputs: {', '.join(self._inputs) or 'none'}")
        return self._inputs[name]

    def check(self, step: object = None) -> None:
        """Refuse a replay unless every input was refreshed or kept since the last one (G12).

        Args:
            step: what is about to be replayed; of a descriptor the number of rows is checked too.

        Raises:
            StaleInputError: names every input that was not.
            CaptureError: an input's memory was replaced; it holds more rows than the step.
        """
        stale = [one for one in self if not one.fresh]
        if stale:
            names = ", ".join(repr(one.name) for one in stale)
            raise StaleInputError(
                f"input {names} was not refreshed since the last replay",
                asked=None if step is None else f"to replay {step}",
                found=[one.history() for one in stale],
                do="refresh() it before the replay, or keep() it where this step uses the same rows",
            )
        for one in self:
            one.check_place()
            if isinstance(step, Descriptor):
                one.check_rows(step)

    def consume(self, stream: Stream | None = None) -> None:
        """A replay on ``stream`` takes the rows of all of them."""
        for one in self:
            one.consume(stream)

    def valid_work(self) -> None:
        """Fill all of them with work for warm-up and capture."""
        for one in self:
            one.valid_work()

    def counters(self) -> dict[str, InputCounters]:
        """What happened to each, by name."""
        return {one.name: one.counters for one in self}


def persistent_input(
    backend: Backend,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    pad: Number,
    null: Number | None = None,
    per: Per = "token",
) -> PersistentInput:
    """An input in memory of its own, [capacity, ...], all padding at first; see :class:`PersistentInput`."""
    if not shape or min(shape) < 0:
        raise CaptureError(
            f"input {name!r} must have rows",
            asked=f"shape {list(shape)}",
            found="no such shape of memory",
            do="give the most rows of a step, then the shape of a row: (8, 64)",
        )
    made = PersistentInput(name, backend.memory.empty(shape, dtype), pad=pad, null=null, backend=backend, per=per)
    with torch.no_grad():
        made.tensor.fill_(pad)
    return made


def _representable(value: Number, dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` can hold ``value``; rounding is fine, wrapping and overflow are not."""
    held = torch.tensor(value).to(dtype).item()
    if dtype.is_floating_point:
        return math.isfinite(held) or not math.isfinite(value)
    return held == value
