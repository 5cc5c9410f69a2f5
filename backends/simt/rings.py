"""The driver of one rank's ends of rings over the portable kernels: packs arguments, launches, reads the record."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from halma.backends.simt.records import FaultRecord
from halma.backends.simt.sources import COLLECTED, RING_FIELDS, UNITS, Target, source
from halma.hal.backend import Backend, Stream
from halma.hal.collectives import control
from halma.hal.collectives.contract import ErrorRecord
from halma.hal.collectives.ring_contract import RingItem, RingNext, RingSite, RingStaging
from halma.hal.collectives.ring_plan import FLAGS, ITEMSIZES, SPLITS, ServingWords, StateWords
from halma.hal.errors import CollectiveError

if TYPE_CHECKING:
    import torch

    from halma.hal.shared_file import SharedFile

PLAN_THREADS: Final = 512
THREADS: Final = 256
EIGHT: Final = 8
"""Elements of a row that a thread adds up at once."""


class HostMapping(Protocol):
    """Host memory that this device's kernels reach at ``address``, until it is closed."""

    address: int

    def close(self) -> None: ...


class SimtRings:
    """See :class:`halma.hal.collectives.ring_contract.RingDriver`.

    Args:
        site: where it lives. Its memory must be zero.
        backend: whose kernels are used; all of the rings' are loaded here (C18).
        map_host: makes host memory of another process reachable for kernels.
        clock_khz: rate of the device's clock, where it does not count nanoseconds itself.

    Raises:
        CollectiveError: rows that are no multiple of 16 bytes or of 8 elements, or dtypes without a kernel.
        CapabilityError: the warp's width is unknown.
        KernelError: a kernel does not compile or load.
    """

    def __init__(
        self,
        site: RingSite,
        backend: Backend,
        map_host: Callable[[SharedFile], HostMapping],
        *,
        clock_khz: int | None = None,
    ) -> None:
        g = site.plan.geometry
        _refuse_geometry(site)
        self.site = site
        target = Target.of(backend.kernels, backend.capabilities, clock_khz)
        self._dependent = target.dependent_launch
        self._launch = backend.kernels.launch
        self._kernels = dict(backend.kernels.load(source("ring", 2, target), UNITS["ring"].entries))
        self._control = site.own.tensor[: control.CONTROL_BYTES]
        self._side = backend.device.new_stream("rings' settings")
        self._record = FaultRecord(backend)
        # An attention rank's kernels write the headers of FFN ranks, and nobody else's.
        theirs = range(g.attention, g.size) if site.rank < g.attention else range(0)
        self._boards = {rank: map_host(site.boards[rank]) for rank in theirs}
        self._table = self._site_table()
        self._at = self._table.data_ptr()
        self._set_words(control.FAULT_PLACE, struct.pack("<Q", self._record.address))
        self.set_bound(site.bound_ns)

    # ---------------------------------------------------------------------------------------------- attention
    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stream: Stream) -> None:
        """See the contract. ``x`` starts at a multiple of 16 bytes."""
        _aligned(x)
        ffn, given = self.site.plan.geometry.ffn, (ids.data_ptr(), weights.data_ptr())
        self._queue("ring_plan", ffn, PLAN_THREADS, (layer, given[0], x.shape[0]), stream)
        self._queue("ring_send", ffn * FLAGS, THREADS, (x.data_ptr(), *given), stream)

    def collect(self, out: torch.Tensor, stream: Stream) -> None:
        """See the contract. ``out`` starts at a multiple of 16 bytes."""
        _aligned(out)
        pair = self.site.plan.geometry.reply, str(out.dtype).removeprefix("torch.")
        if pair not in COLLECTED:
            raise CollectiveError("no kernel collects so", asked=f"replies of {pair[0]} into {pair[1]}")
        rows, width = out.shape
        name = f"ring_collect_{pair[0]}_{pair[1]}"
        self._queue(name, min(rows, SPLITS), THREADS, (out.data_ptr(), rows, width // EIGHT), stream)

    # -------------------------------------------------------------------------------------------- FFN
    def take(self, item: RingItem, staging: RingStaging, stream: Stream) -> None:
        """See the contract."""
        places = staging.rows.data_ptr(), staging.ids.data_ptr(), staging.weights.data_ptr()
        self._queue(
            "ring_take", FLAGS, THREADS, (item.attention, item.sequence, item.layer, item.rows, *places), stream
        )

    def reply(self, item: RingItem, out: torch.Tensor, before: int, stream: Stream) -> None:
        """See the contract. ``out`` starts at a multiple of 16 bytes."""
        _aligned(out)
        arguments = (item.attention, item.sequence, item.layer, item.rows, out.data_ptr(), before)
        self._queue("ring_reply", FLAGS, THREADS, arguments, stream)

    def take_next(self, staging: RingStaging, seen: RingNext, patience_ns: int, stream: Stream) -> None:
        """See the contract."""
        index = (0, 0) if seen.index is None else (seen.index.data_ptr(), seen.index.numel())
        told = seen.layer.data_ptr(), seen.shared.data_ptr(), *index, seen.counted.data_ptr(), patience_ns
        self._queue("ring_next", 1, THREADS, told, stream)
        places = staging.rows.data_ptr(), staging.ids.data_ptr(), staging.weights.data_ptr()
        self._queue("ring_take_next", FLAGS, THREADS, places, stream)

    def reply_next(self, out: torch.Tensor, beside: torch.Tensor | None, stream: Stream) -> None:
        """See the contract. Tensors start at a multiple of 16 bytes."""
        _aligned(out)
        if beside is not None:
            _aligned(beside)
        given = out.data_ptr(), 0 if beside is None else beside.data_ptr()
        self._queue("ring_reply_next", FLAGS, THREADS, given, stream)

    def _queue(self, name: str, grid: int, block: int, arguments: tuple[int, ...], stream: Stream) -> None:
        self._launch(self._kernels[name], grid, block, (self._at, *arguments), stream=stream, dependent=self._dependent)

    # ------------------------------------------------------------------------------------------------- both
    def error(self) -> ErrorRecord | None:
        """The sticky fault; a read of host memory, also while the device hangs."""
        return self._record.read()

    def set_bound(self, bound_ns: int) -> None:
        """Device state: captured submissions take it at their next look at the clock."""
        self._set_words(control.BOUND, struct.pack("<Q", bound_ns))

    def close(self) -> None:
        """Forget device handles, and give up the peers' host memory."""
        self._kernels.clear()
        for mapping in self._boards.values():
            with suppress(RuntimeError):  # a device that is lost unmaps nothing, and its process ends
                mapping.close()
        self._boards.clear()

    def _site_table(self) -> Any:
        import torch

        site, plan = self.site, self.site.plan
        g, state, serving = plan.geometry, StateWords.of(plan.geometry), ServingWords.of(plan.geometry)
        values = {
            "rank": site.rank,
            "attention": g.attention,
            "ffn": g.ffn,
            "depth": g.depth,
            "max_tokens": g.max_tokens,
            "choices": g.top_k,
            "row_units": g.hidden * ITEMSIZES[g.payload] // 16,
            "reply_units": g.hidden * ITEMSIZES[g.reply] // 16,
            "slots": plan.slots,
            "credits": plan.credits,
            "item_bytes": plan.item.nbytes,
            "item_ids": plan.item.ids,
            "item_weights": plan.item.weights,
            "item_rows": plan.item.rows,
            "reply_bytes": plan.reply.nbytes,
            "reply_rows": plan.reply.rows,
            **{
                name: plan.state + getattr(state, name)
                for name in ("sent", "collected", "filled", "taken", "header", "tokens", "place")
            },
            "item_header": plan.item.header,
            "layers": g.layers,
            **{name: plan.state + getattr(serving, name) for name in ("served", "replied", "turn", "item", "totals")},
        }
        words = [values[name] for name in RING_FIELDS]
        words += [peer.address for peer in site.peers]
        words += [self._boards[rank].address + site.headers if rank in self._boards else 0 for rank in range(g.size)]
        return torch.tensor([*words, *g.experts], dtype=torch.int64).to(site.own.tensor.device)

    def _set_words(self, offset: int, raw: bytes) -> None:
        import torch

        with self._side:
            self._control[offset : offset + len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        self._side.synchronize()


def _refuse_geometry(site: RingSite) -> None:
    g = site.plan.geometry
    found = [
        f"rows of {g.hidden} {dtype}"
        for dtype in (g.payload, g.reply)
        if g.hidden % EIGHT or g.hidden * ITEMSIZES[dtype] % 16
    ]
    if g.weights != "float32":
        found.append(f"weights of {g.weights}")
    if g.reply not in {one for one, _ in COLLECTED}:
        found.append(f"replies of {g.reply}")
    if found:
        raise CollectiveError(
            "the kernels have no rings of this geometry",
            found=found,
            do="rows of a multiple of 8 elements, carriers of at most 4 bytes",
        )


def _aligned(tensor: torch.Tensor) -> None:
    if tensor.data_ptr() & 15:
        raise CollectiveError(
            "the rings' kernels move 16 bytes at a time",
            found=f"a tensor at {tensor.data_ptr():#x}",
            do="start tensors on a 16-byte boundary",
        )
