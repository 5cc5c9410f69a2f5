"""The driver of an exchange over the portable kernels (kernels/exchange.h): packs arguments and launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from halma.backends.simt.control_block import ControlBlock
from halma.backends.simt.geometry import MOST_THREADS, most_blocks, room
from halma.backends.simt.sources import COMBINE_THREADS, EXCHANGE, SITE_FIELDS, UNITS, Target, source
from halma.hal.backend import Backend, Stream
from halma.hal.capabilities import Capabilities
from halma.hal.collectives.contract import FLIGHT_BYTES, ErrorRecord, FlightEntry
from halma.hal.collectives.exchange_contract import ExchangeCall, ExchangeSite, Outgoing, Returning, Stage, Step
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_limits import SORTERS
from halma.hal.collectives.exchange_tuning import most_parts, parts_of
from halma.hal.errors import CollectiveError

if TYPE_CHECKING:
    import torch

_STAGES: Final = {Step.DISPATCH: Stage.ROWS, Step.COMBINE: Stage.BACK}
_LEAST_BLOCKS: Final = 2
"""Of a dispatch: one sends, one sorts."""
_SORTED_AT_ONCE: Final = 4 * MOST_THREADS
"""Choices that a block sorts out of registers (``AT_ONCE`` of exchange.h)."""


def exchange_blocks(size: int, capabilities: Capabilities) -> int:
    """Most blocks of a grid of which two fit the device together (C16)."""
    return most_blocks(size, room(capabilities))


def no_exchange(geometry: Geometry, capabilities: Capabilities) -> str | None:
    """Why the kernels cannot do this geometry on such a device, or None."""
    atomicity = capabilities.remote_store_atomicity
    if not isinstance(atomicity, int) or atomicity < 8:
        return f"its words need stores of 8 bytes that peers see whole; remote_store_atomicity is {atomicity}"
    if geometry.payload == "fp64":
        return "the kernels send bf16, fp8 and fp32"
    if geometry.row_bytes % 16 or (geometry.payload == "fp8" and geometry.hidden % 128):
        return f"rows of {geometry.hidden} columns are no multiple of 16 bytes, or of 128 columns in fp8"
    if exchange_blocks(geometry.ranks, capabilities) < _LEAST_BLOCKS:
        return f"two grids of two blocks do not fit the device: resident_threads is {capabilities.resident_threads}"
    return None


class SimtExchange:
    """See :class:`halma.hal.collectives.exchange_contract.ExchangeDriver`. Its kernels are all loaded here (C18).

    Args:
        site: where it lives; memory as the exchange leaves it: zero, and ``back`` all ones.
        backend: whose kernels and streams are used.
        clock_khz: rate of the device's clock, where it does not count nanoseconds itself.

    Raises:
        CapabilityError: the warp's width is unknown.
        KernelError: a kernel does not compile or load.
    """

    def __init__(self, site: ExchangeSite, backend: Backend, *, clock_khz: int | None = None) -> None:
        channel, geometry = site.channel, site.geometry
        self._site, self._geometry, self._places = site, geometry, geometry.places
        self._launch = backend.kernels.launch
        target = Target.of(backend.kernels, backend.capabilities, clock_khz)
        self._warp = target.warp_width
        self._dependent = channel.dependent and target.dependent_launch
        self._kernels: dict[str, Any] = {}
        many = () if site.tuning.units == 1 else (f"combine_{site.tuning.units}",)
        for unit in (*EXCHANGE, *many):
            self._kernels.update(backend.kernels.load(source(unit, channel.size, target), UNITS[unit].entries))
        self._control = ControlBlock(channel, backend, channel.layout.name)
        self._table = self._site_table()
        self._prefix = (
            *(peer.address for peer in channel.peers),
            channel.own.address,
            self._table.data_ptr(),
            self._control.address,
        )
        self._units = geometry.row_bytes // 16
        self._most_parts = most_parts(self._units, site.tuning, self._warp)

    # -- launch -------------------------------------------------------------------------------------

    def dispatch(self, call: ExchangeCall, operands: Outgoing, stream: Stream) -> None:
        """See the contract. Addresses must be multiples of 16.

        Raises:
            CollectiveError: an address that is not; nothing was queued.
        """
        geometry, places, layout = self._geometry, self._places, operands.layout
        tokens, slots = operands.x.shape[0], layout.index.shape[0]
        kept, written = operands.ids is None or operands.weights is None, layout.tensors()
        sorters = 0 if kept else self._sorters(call.bound)
        self._aligned(call, operands.x, *written)
        index, weights, counts, offsets, total, slot_of, tokens_of, sources = (one.data_ptr() for one in written)
        arguments = (
            *self._prefix,
            self._tag(call),
            tokens * geometry.row_bytes,
            operands.x.data_ptr(),
            0,
            call.bound,
            sorters,
            *(0 if one is None else one.data_ptr() for one in (operands.ids, operands.weights)),
            index,
            weights,
            counts,
            offsets,
            total,
            slot_of,
            tokens_of,
            sources,
            places.choices.offset,
            places.choices.stride,
            places.rows.offset,
            places.scales.offset,
            places.flags.offset,
            places.flags.stride,
            places.tallies.offset,
            tokens | geometry.top_k << 32,
            geometry.max_tokens | slots << 32,
            geometry.experts | geometry.local(self._site.channel.rank) << 32,
            self._units | geometry.alignment << 32,
            self._most_parts | self._site.tuning.warps << 32,
        )
        name = f"dispatch_{'kept_' if kept else ''}{'fp8' if geometry.payload == 'fp8' else 'plain'}"
        self._run(self._kernels[name], self._dispatch_blocks(call.bound, sorters), arguments, stream)

    def combine(self, call: ExchangeCall, operands: Returning, stream: Stream) -> None:
        """As :meth:`dispatch`."""
        geometry, places, layout = self._geometry, self._places, operands.layout
        parts, out = operands.parts, operands.out
        self._aligned(call, parts, out)
        units = geometry.back_bytes // 16
        arguments = (
            *self._prefix,
            self._tag(call),
            out.shape[0] * geometry.back_bytes,
            parts.data_ptr(),
            out.data_ptr(),
            0,
            0,
            layout.slots.data_ptr(),
            layout.tokens.data_ptr(),
            layout.sources.data_ptr(),
            places.back.offset,
            places.back.stride,
            out.shape[0] | geometry.top_k << 32,
            geometry.max_tokens | units << 32,
            int(out.itemsize == 4 and geometry.given != "float32"),
        )
        wide = "_wide" if parts.itemsize == 4 and geometry.given != "float32" else ""
        abreast = self._combine_units(call.bound)
        name = f"combine_{geometry.given}{wide}" if abreast == 1 else f"combine_{abreast}_{geometry.given}{wide}"
        blocks = self._combine_blocks(call.bound) if abreast == 1 else self._site.tuning.blocks
        self._run(self._kernels[name], blocks, arguments, stream, COMBINE_THREADS[abreast])

    def _run(
        self, kernel: Any, blocks: int, arguments: Sequence[int], stream: Stream, threads: int = MOST_THREADS
    ) -> None:
        self._launch(kernel, blocks, threads + self._warp, arguments, stream=stream, dependent=self._dependent)

    def _sorters(self, bound: int) -> int:
        """Blocks that sort: a power of two, as many as read their choices at once, of a quarter of the grid."""
        choices, sorters = self._geometry.ranks * bound * self._geometry.top_k, 1
        most = min(SORTERS, self._site.tuning.blocks // 4)
        while 2 * sorters <= most and sorters * _SORTED_AT_ONCE < choices:
            sorters *= 2
        return sorters

    def _dispatch_blocks(self, bound: int, sorters: int) -> int:
        """Blocks for rows, for choices, and those that sort: of agreed numbers alone (C5), so that grids are equal.

        Without sorters there are no choices either.
        """
        warps = bound * parts_of(bound, self._most_parts, self._site.tuning.warps)
        rows, choices = -(-warps * self._warp // MOST_THREADS), -(-bound * self._geometry.top_k // MOST_THREADS)
        if not sorters:
            return min(self._site.tuning.blocks, rows)
        return max(_LEAST_BLOCKS, min(self._site.tuning.blocks, rows + choices + sorters))

    def _combine_units(self, bound: int) -> int:
        """Units a thread: the tuning's where rows are whole pieces and every warp serves two tokens or more, else 1.

        With fewer there is none ahead of what is awaited, and the other kernel waits less. Of agreed numbers alone.
        """
        units, row = self._site.tuning.units, self._geometry.back_bytes // 16
        piece = units * self._warp
        warps = self._site.tuning.blocks * COMBINE_THREADS[units] // self._warp
        if units == 1 or row % piece or warps < row // piece:
            return 1
        return units if bound >= 2 * (warps // (row // piece)) else 1

    def _combine_blocks(self, bound: int) -> int:
        """Equal on all ranks, or a rank could wait for a unit that its peer sends behind one it waits for itself."""
        units = bound * (self._geometry.back_bytes // 16)
        return max(1, min(self._site.tuning.blocks, -(-units // MOST_THREADS)))

    def _tag(self, call: ExchangeCall) -> int:
        """The argument ``tag`` of channel.h; no root."""
        return call.digest | call.kind << 32 | _STAGES[call.step] << 40 | 255 << 48 | self._site.channel.rank << 56

    def _aligned(self, call: ExchangeCall, *tensors: torch.Tensor) -> None:
        wrong = [f"{tensor.data_ptr():#x}" for tensor in tensors if tensor.data_ptr() & 15]
        if wrong:
            raise CollectiveError(
                f"an exchange cannot do {call.describe()}",
                found=f"addresses that are no multiple of 16: {', '.join(wrong)}",
                do="start tensors on a 16-byte boundary",
            )

    def _site_table(self) -> torch.Tensor:
        """The words of ``SiteField`` in channel.h: an exchange has no lanes of a channel, so the rest is 0."""
        import torch

        channel = self._site.channel
        entries = channel.recorder.numel() // FLIGHT_BYTES
        known = {
            "headers": channel.layout.headers.offset,
            "recorder": channel.recorder.data_ptr() if entries else 0,
            "recorder_entries": entries,
        }
        words = [known.get(name, 0) for name in SITE_FIELDS]
        return torch.tensor(words, dtype=torch.int64).to(channel.own.tensor.device)

    # -- records ------------------------------------------------------------------------------------

    def error(self) -> ErrorRecord | None:
        """The sticky fault, if there is one; also while the device hangs."""
        return self._control.error()

    def flight(self) -> Sequence[FlightEntry]:
        """The calls this rank started last, oldest first; also while the device hangs."""
        return self._control.flight()

    def set_bound(self, bound_ns: int) -> None:
        """For all waits from now on, captured ones included."""
        self._control.set_bound(bound_ns)

    def epoch(self) -> int:
        """The epoch now; the device must be idle."""
        return self._control.epoch()

    def rearm(self, epoch: int) -> None:
        """Forget the fault, make every region as before the first call, continue from ``epoch``."""
        self._control.rearm(epoch, [self._site.channel.layout.headers, *self._places.regions.values()])

    def close(self) -> None:
        """Forget device handles."""
        self._kernels = {}
