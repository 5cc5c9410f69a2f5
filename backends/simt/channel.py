"""The driver of one channel over the portable kernels: packs arguments, launches, reads records; decides nothing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halma.backends.simt import mixed
from halma.backends.simt.control_block import ControlBlock
from halma.backends.simt.geometry import MOST_THREADS, Geometry, geometry, most_blocks, norm_threads, room
from halma.backends.simt.sources import DTYPES, SITE_FIELDS, UNITS, Target, source
from halma.hal.arena.layout import Lane
from halma.hal.backend import Backend, Stream
from halma.hal.collectives.choice import MIXING_WAY, name_of
from halma.hal.collectives.contract import (
    FLIGHT_BYTES,
    Algorithm,
    Box,
    Call,
    ChannelSite,
    Choice,
    ErrorRecord,
    FlightEntry,
    Kind,
    Operands,
    Wire,
)
from halma.hal.collectives.mixing import PART_BYTES
from halma.hal.collectives.remembered import forget_oldest
from halma.hal.errors import CollectiveError

if TYPE_CHECKING:
    import torch

_NO_ROOT = 255
_SENTINEL_DTYPES = (*DTYPES, "float64")
"""All ones is a NaN of theirs, and the NaN with the last bit cleared is as good."""
_MOST_ROW_UNITS = 4096
_STEMS = {
    (Algorithm.ONE_SHOT, Wire.WORDS): "words",
    (Algorithm.ONE_SHOT, Wire.SENTINEL): "sentinel",
    (Algorithm.ONE_SHOT, Wire.CHUNKS): "chunks",
    (Algorithm.TWO_SHOT, Wire.CHUNKS): "chunks",
    (Algorithm.STAGED, Wire.FLAGS): "staged",
    (Algorithm.STAGED_TWO_SHOT, Wire.FLAGS): "staged_two_shot",
}
"""How a way of moving data is called in kernels' names. One-shot chunks is all-gather's and broadcast's alone."""


@dataclass(frozen=True)
class _Plan:
    """What a launch of one (call, choice, box) needs beside addresses."""

    call: Call
    choice: Choice
    box: Box | None
    row_length: int
    kernel: Any
    grid: int
    block: int
    tag: int
    lane: int
    width: int
    norm: Any = None
    """Of an all-reduce with norm in two kernels: the second one."""
    shape: int = 0
    norm_grid: int = 0
    norm_block: int = 0


class SimtChannel:
    """One channel of an arena on this rank (:class:`halma.hal.collectives.contract.ChannelDriver`).

    Args:
        site: where it lives. Its memory must be as the arena leaves it: zero, lanes prefilled.
        backend: whose parts are used: kernels (all of the channel's are loaded here, C18), and a stream of the
            device's, on which the bound is set while the channel's own hangs.
        resident_threads: how many threads the arena's channels share (C16); by default all that the device holds.
        clock_khz: rate of the device's clock, where it does not count nanoseconds itself.
        without: parts of the protocol left out of the kernels, to measure what they cost.

    Raises:
        CapabilityError: the warp's width is unknown.
        KernelError: a kernel does not compile or load.
    """

    def __init__(
        self,
        site: ChannelSite,
        backend: Backend,
        *,
        resident_threads: int | None = None,
        clock_khz: int | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.site = site
        self.target = target = Target.of(backend.kernels, backend.capabilities, clock_khz)
        self.resident_threads = (resident_threads or room(backend.capabilities)) // site.channels
        self._launch = backend.kernels.launch
        self._dependent = site.dependent and target.dependent_launch
        layout = site.layout
        units = [name for name in UNITS if self._wanted(name)]
        self._kernels: dict[str, Any] = {}
        for name in units:
            unit = source(name, site.size, target, without=without)
            self._kernels.update(backend.kernels.load(unit, UNITS[name].entries))
        self._block = ControlBlock(site, backend, layout.name)
        self._control = self._block.memory
        self._table = self._site_table()
        self._prefix = (
            *(peer.address for peer in site.peers),
            site.own.address,
            self._table.data_ptr(),
            self._block.address,
        )
        self._plans: dict[int, _Plan] = {}

    def _wanted(self, unit: str) -> bool:
        layout = self.site.layout
        if not UNITS[unit].channel:
            return False
        if unit == "staged":
            return layout.staging is not None
        if unit == "streams":
            return layout.parts is not None and layout.sentinel is not None
        return unit == "norm_alone" or layout.words is not None or layout.scatter is not None

    @property
    def kernels(self) -> Sequence[str]:
        """Names of the kernels that are loaded."""
        return tuple(self._kernels)

    # ---------------------------------------------------------------------------------------------- launch
    def launch(self, call: Call, choice: Choice, operands: Operands, box: Box | None, stream: Stream) -> None:
        """See the contract. Addresses of ``operands`` must be multiples of 16; every size is handled.

        Raises:
            CollectiveError: a call that the kernels or the layout cannot do; nothing was queued.
        """
        plan = self._plan(call, choice, operands, box)
        source_at, out_at = operands.source.data_ptr(), operands.out.data_ptr()
        if (source_at | out_at) & 15:
            raise _misaligned(call, source_at, out_at)
        if call.kind is Kind.ALL_REDUCE_NORM:
            self._launch_norm(plan, operands, source_at, out_at, stream)
            return
        arguments = (*self._prefix, plan.tag, call.nbytes, source_at, out_at, plan.lane, plan.width)
        if call.kind is Kind.ALL_REDUCE_STREAMS:
            arguments = (*arguments, *self._mix_arguments(call, operands))
        self._launch(plan.kernel, plan.grid, plan.block, arguments, stream=stream, dependent=self._dependent)

    def _mix_arguments(self, call: Call, operands: Operands) -> tuple[int, ...]:
        addresses = mixed.addresses_of(call, operands)
        if any(address & 15 for address in addresses):
            raise _misaligned(call, *addresses)
        assert self.site.layout.parts is not None  # _range_refusals looked
        parts = self.site.own.address + self.site.layout.parts.offset
        return (*addresses, parts, *mixed.numbers_of(call, operands))

    def _launch_norm(self, plan: _Plan, operands: Operands, source_at: int, out_at: int, stream: Stream) -> None:
        residual, weight, norm_out = operands.residual, operands.weight, operands.norm_out
        if residual is None or weight is None or norm_out is None:
            raise CollectiveError(f"{plan.call.describe()} needs a residual, a weight and norm_out")
        scales = 0 if operands.scale_out is None else operands.scale_out.data_ptr()
        extra = (residual.data_ptr(), weight.data_ptr(), norm_out.data_ptr(), scales)
        if (extra[0] | extra[1] | extra[2] | scales) & 15:
            raise _misaligned(plan.call, *extra)
        wide = weight.element_size() == 4 and operands.source.element_size() != 4
        options = struct.unpack("<I", struct.pack("<f", operands.eps))[0] | int(wide) << 32
        extra = (*extra, plan.shape, options)
        nbytes, dependent = plan.call.nbytes, self._dependent
        if plan.norm is None:
            arguments = (*self._prefix, plan.tag, nbytes, source_at, out_at, plan.lane, plan.width, *extra)
            self._launch(plan.kernel, plan.grid, plan.block, arguments, stream=stream, dependent=dependent)
            return
        reduced = _scratch(plan.call, operands, norm_out, residual)
        arguments = (*self._prefix, plan.tag, nbytes, source_at, reduced, plan.lane, plan.width)
        self._launch(plan.kernel, plan.grid, plan.block, arguments, stream=stream, dependent=dependent)
        if not plan.norm_grid:  # no rows
            return
        arguments = (*self._prefix, plan.tag, nbytes, reduced, out_at, 0, 0, *extra)
        self._launch(plan.norm, plan.norm_grid, plan.norm_block, arguments, stream=stream, dependent=dependent)

    def _plan(self, call: Call, choice: Choice, operands: Operands, box: Box | None) -> _Plan:
        # By identity: hashing a call costs more than launching it.
        row = operands.row_length
        plan = self._plans.get(id(call))
        if plan is not None and plan.choice is choice and plan.row_length == row and box is None:
            return plan
        plan = self._make_plan(call, choice, row, box)
        if box is None:  # a slot is one captured call's, which is not made again
            self._plans[id(call)] = plan  # holds the call, so that its id stays its own
            forget_oldest(self._plans)
        return plan

    def _make_plan(self, call: Call, choice: Choice, row_length: int, box: Box | None) -> _Plan:
        site, size = self.site, self.site.size
        way = _STEMS.get((choice.algorithm, choice.wire))
        reduces = call.kind in (Kind.ALL_REDUCE, Kind.ALL_REDUCE_NORM)
        mixes = call.kind is Kind.ALL_REDUCE_STREAMS
        found = [] if way else [f"{choice.algorithm.name} over {choice.wire.name} is no algorithm"]
        if reduces and call.dtype not in DTYPES:
            found.append(f"dtype {call.dtype}; sums are made of {', '.join(DTYPES)}")
        fused = call.kind is Kind.ALL_REDUCE_NORM and choice.wire in (Wire.WORDS, Wire.SENTINEL)
        itemsize = 4 if call.dtype == "float32" else 2
        row_units = row_length * itemsize // 16 if call.kind is Kind.ALL_REDUCE_NORM else 0
        if call.kind is Kind.ALL_REDUCE_NORM:
            found += _row_refusals(call, row_length, itemsize)
        if mixes:
            found += mixed.refusals(call, size, self.resident_threads)
        found += self._range_refusals(call, choice, box)
        if found or way is None:
            raise CollectiveError(f"a channel cannot do {call.describe()}", found=found)
        shape = row_units | (call.nbytes // (16 * row_units) if row_units else 0) << 32
        place = geometry(
            call,
            choice.algorithm,
            choice.wire,
            size,
            self.resident_threads,
            self.target.warp_width,
            row_units if fused else 0,
        )
        if mixes:
            place = mixed.mixed_geometry(call.row_length, size, self.resident_threads)
        elif choice.threads > 1 and not fused:  # 1 is "not chosen"
            place = Geometry(choice.blocks, choice.threads, place.pieces)
        name = mixed.kernel_name(call, place) if mixes else _kernel_name(call, way, fused, row_units, place)
        if name not in self._kernels:
            raise CollectiveError(f"a channel cannot do {call.describe()}", found=f"no kernel {name} for its layout")
        apart = choice.wire in (Wire.CHUNKS, Wire.FLAGS) and call.kind is not Kind.BARRIER
        lane, width = self._lane_words(call, choice, box, place)
        warp = self.target.warp_width
        second = fused or call.kind is not Kind.ALL_REDUCE_NORM
        row_threads = norm_threads(row_units, warp) if row_units else 0
        wide = "wide_" if row_units > row_threads else ""
        root = _NO_ROOT if call.root < 0 else call.root
        return _Plan(
            call=call,
            choice=choice,
            box=box,
            row_length=row_length,
            kernel=self._kernels[name],
            grid=place.blocks + apart,
            block=place.threads + warp,
            tag=call.digest | call.kind << 32 | choice.algorithm << 40 | root << 48 | site.rank << 56,
            lane=lane,
            width=width,
            norm=None if second else self._kernels[f"norm_alone_{wide}{call.dtype}"],
            shape=shape,
            # Under dependent launch it is resident, waiting, while peers still spin: it counts like them (C16).
            norm_grid=min(most_blocks(size, self.resident_threads), shape >> 32),
            norm_block=row_threads,
        )

    def _range_refusals(self, call: Call, choice: Choice, box: Box | None) -> list[str]:
        layout = self.site.layout
        if call.kind is Kind.BARRIER:
            return []
        shard = 16 * -(-call.nbytes // (16 * self.site.size))
        lanes: list[tuple[str, Lane | None, int]]
        if call.kind is Kind.ALL_REDUCE_STREAMS:
            if (choice.algorithm, choice.wire) != MIXING_WAY:
                return [f"streams are mixed by {name_of(MIXING_WAY)} alone"]
            lanes = [("sentinel", layout.sentinel, call.nbytes), ("parts", layout.parts, PART_BYTES)]
        elif choice.wire is Wire.WORDS:
            lanes = [("words", layout.words, call.nbytes)]
        elif choice.wire is Wire.SENTINEL:
            lanes = [("sentinel", layout.sentinel, call.nbytes)]
            if call.dtype not in _SENTINEL_DTYPES:
                return [f"{call.dtype} may hold the sentinel, all ones, as a value"]
        elif choice.algorithm is Algorithm.TWO_SHOT:
            lanes = [("scatter", layout.scatter, shard), ("gather", layout.gather, shard)]
        elif choice.wire is Wire.CHUNKS:
            lanes = [("gather", layout.gather, call.nbytes)]
        else:
            lanes = [("stage_flags", layout.stage_flags, 0)]
            lanes += [] if box is not None else [("staging", layout.staging, call.nbytes)]
            two_shot = choice.algorithm is Algorithm.STAGED_TWO_SHOT
            lanes += [("stage_sum", layout.stage_sum, shard)] if two_shot else []
        found: list[str] = []
        for name, lane, need in lanes:
            if lane is None:
                found.append(f"the layout has no lane {name}")
            elif need > lane.largest:
                found.append(f"{need} bytes do not fit a box of lane {name}: {lane.largest}")
        return found

    def _lane_words(self, call: Call, choice: Choice, box: Box | None, place: Geometry) -> tuple[int, int]:
        """The arguments ``lane`` and ``box`` of channel.h."""
        layout = self.site.layout
        lane = {Wire.WORDS: layout.words, Wire.SENTINEL: layout.sentinel}.get(choice.wire)
        if lane is not None:
            return lane.offset, lane.box
        if choice.wire is Wire.CHUNKS:
            units = -(-call.nbytes // 16)
            shard = -(-units // self.site.size) if choice.algorithm is Algorithm.TWO_SHOT else units
            return shard | -(-shard // (place.blocks * place.pieces)) << 32, place.pieces
        if choice.wire is Wire.FLAGS and call.kind is not Kind.BARRIER:
            if box is not None:
                return box.offset, box.stride
            assert layout.staging is not None  # _range_refusals looked
            return layout.staging.at(0, 0), layout.staging.at(1, 0) - layout.staging.at(0, 0)
        return 0, 0

    def _site_table(self) -> torch.Tensor:
        """The words of ``SiteField``, on the device."""
        import torch

        layout, recorder = self.site.layout, self.site.recorder
        entries = recorder.numel() // FLIGHT_BYTES
        flags = layout.chunk_flags or layout.stage_flags
        values = {
            "headers": layout.headers.offset,
            "flags_box": flags.box if flags else 0,
            "recorder": recorder.data_ptr() if entries else 0,
            "recorder_entries": entries,
        }
        for name in ("words", "chunk_flags", "stage_flags", "scatter", "gather", "staging", "stage_sum", "parts"):
            lane: Lane | None = getattr(layout, name)
            values[name] = 0 if lane is None else lane.offset
            for field, value in (
                (f"{name}_box", lambda lane: lane.box),
                (f"{name}_phase", lambda lane: lane.at(1, 0) - lane.at(0, 0)),
                (f"{name}_stride", lambda lane: lane.at(1, 0) - lane.at(0, 0)),
            ):
                if field in SITE_FIELDS:
                    values[field] = 0 if lane is None else value(lane)
        words = [values[name] for name in SITE_FIELDS]
        return torch.tensor(words, dtype=torch.int64).to(self.site.own.tensor.device)

    # --------------------------------------------------------------------------------------------- records
    def error(self) -> ErrorRecord | None:
        """The sticky fault, if there is one; a read of host memory, also while the device hangs."""
        return self._block.error()

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first; a read of host memory, also while the device hangs."""
        return self._block.flight()

    def set_bound(self, bound_ns: int) -> None:
        """Device state: captured calls take it at their next look at the clock."""
        self._block.set_bound(bound_ns)

    def epoch(self) -> int:
        """The channel's epoch now; the device must be idle."""
        return self._block.epoch()

    def rearm(self, epoch: int) -> None:
        """See the contract: clears the fault, refills every lane, sets every epoch cell."""
        self._block.rearm(epoch, self.site.layout.lanes.values())

    def close(self) -> None:
        """Forget device handles."""
        self._plans.clear()
        self._kernels.clear()


def _kernel_name(call: Call, way: str, fused: bool, row_units: int, place: Geometry) -> str:
    """The entry point; ``one`` where no thread has more than one unit, all of them whole."""
    if call.kind is Kind.BARRIER:
        return "barrier_staged" if way.startswith("staged") else "barrier_words"
    if call.kind is Kind.ALL_GATHER:
        return f"all_gather_{way}"
    if call.kind is Kind.BROADCAST:
        return f"broadcast_{way}"
    if fused:
        return f"norm_{way}_{'wide_' if row_units > MOST_THREADS else ''}{call.dtype}"
    unit = {"words": 8, "sentinel": 16}.get(way, 0)
    one = unit and call.nbytes % unit == 0 and call.nbytes // unit <= place.blocks * place.threads
    return f"all_reduce_{way}_{'one_' if one else ''}{call.dtype}"


def _row_refusals(call: Call, row_length: int, itemsize: int) -> list[str]:
    row_bytes = row_length * itemsize
    if row_length <= 0 or row_bytes % 16 or call.nbytes % row_bytes:
        return [f"rows of {row_length}: a row is a multiple of 16 bytes, and a message of whole rows"]
    if row_bytes // 16 > _MOST_ROW_UNITS:
        return [f"rows of {row_length}: at most {_MOST_ROW_UNITS * 16 // itemsize} of {call.dtype}"]
    return []


def _scratch(call: Call, operands: Operands, norm_out: torch.Tensor, residual: torch.Tensor) -> int:
    """Where the reduced message lies between two kernels: an output that is written last."""
    if operands.scale_out is None:
        return norm_out.data_ptr()
    if operands.out.data_ptr() != residual.data_ptr():
        return operands.out.data_ptr()
    raise CollectiveError(
        f"a channel cannot do {call.describe()} in two kernels",
        found="the norm's output is fp8 and the new residual overwrites the old one: no room for the sum between them",
        do="give out a tensor of its own, or stay within the range of the one-shot algorithms",
    )


def _misaligned(call: Call, *addresses: int) -> CollectiveError:
    wrong = ", ".join(f"{address:#x}" for address in addresses if address & 15)
    return CollectiveError(
        f"a channel cannot do {call.describe()}",
        found=f"addresses that are no multiple of 16: {wrong}",
        do="start tensors on a 16-byte boundary; slices of the last dimension may not",
    )
