"""Rings of several ranks in this process: each has a driver, memory and a stream of its own, peers' are plain pointers.

As :mod:`benchmarks.virtual_ranks` for channels: what is missing is the link between two GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.virtual_ranks import Region
from halma.backends.simt.rings import SimtRings
from halma.hal.collectives.ring_board import Board
from halma.hal.collectives.ring_contract import COUNTED, RingItem, RingNext, RingSite, RingStaging
from halma.hal.collectives.ring_plan import RingGeometry, RingPlan
from halma.hal.shared_file import SharedFile

PATIENCE = 30.0
"""Seconds that a header may take."""


class VirtualRings:
    """See the module. Work of a rank is queued on its stream; on the host it is done at once.

    Args:
        map_host: makes host memory reachable for kernels.
    """

    def __init__(
        self, geometry: RingGeometry, backend: Any, map_host: Callable[[SharedFile], Any], bound_ns: int
    ) -> None:
        self.g, self.plan = geometry, RingPlan.of(geometry)
        self.device = backend.device.torch_device
        ranks = range(geometry.size)
        self.regions = [
            Region(torch.zeros(self.plan.nbytes(rank), dtype=torch.uint8, device=self.device)) for rank in ranks
        ]
        self.settle()  # zero before any other stream writes there
        self.boards = [Board.make(geometry.size, geometry.attention, geometry.depth) for _ in ranks]
        files = [board.file for board in self.boards]
        self.streams = [backend.device.new_stream(f"rank {rank}") for rank in ranks]
        headers = Board.headers(geometry.size)
        self.drivers = [
            SimtRings(
                RingSite(rank, self.plan, self.regions[rank], self.regions, files, headers, bound_ns),
                backend,
                map_host,
                **({} if self.device.type != "cpu" else {"clock_khz": 1_000_000}),
            )
            for rank in ranks
        ]
        self.replied = [[[0] * geometry.depth for _ in range(geometry.attention)] for _ in range(geometry.ffn)]

    def submit(self, rank: int, layer: int, item: tuple[torch.Tensor, ...]) -> None:
        x, ids, weights = item
        self.drivers[rank].submit(layer, x, ids, weights, self.streams[rank])

    def collect(self, rank: int, out: torch.Tensor) -> None:
        self.drivers[rank].collect(out, self.streams[rank])

    def staging(self) -> RingStaging:
        """Filled with what must never be read."""
        g = self.g
        rows = torch.full((g.max_tokens, g.hidden), float("nan"), dtype=getattr(torch, g.payload), device=self.device)
        ids = torch.zeros(g.max_tokens, g.top_k, dtype=torch.int64, device=self.device)
        return RingStaging(rows, ids, torch.zeros(g.max_tokens, g.top_k, device=self.device))

    def header(self, ffn: int, attention: int, sequence: int) -> RingItem | None:
        return self.boards[self.g.attention + ffn].header(attention, sequence)

    def awaited(self, ffn: int, attention: int, sequence: int) -> RingItem:
        """A header, read by polling as a host does."""
        end = time.monotonic() + PATIENCE
        while (item := self.header(ffn, attention, sequence)) is None:
            assert time.monotonic() < end, f"no header of item {sequence}"
        return item

    def serve(self, ffn: int, attention: int, sequence: int) -> RingStaging:
        """Take an item and answer each row with itself times the sum of its weights here, and once more if shared."""
        item, g = self.awaited(ffn, attention, sequence), self.g
        rank, slot = g.attention + ffn, sequence % g.depth
        with self.streams[rank]:
            staging = self.staging()
            self.drivers[rank].take(item, staging, self.streams[rank])
            factor = staging.weights[: item.rows].sum(1, keepdim=True)
            factor[item.shared_first : item.shared_first + item.shared] += 1.0
            out = (staging.rows[: item.rows].float() * factor).to(getattr(torch, g.reply)).contiguous()
            self.drivers[rank].reply(item, out, self.replied[ffn][attention][slot], self.streams[rank])
        self.replied[ffn][attention][slot] = sequence
        return staging

    def seen(self) -> RingNext:
        """Where what a device knows of an item goes that it takes by itself."""
        g = self.g

        def words(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), -7, dtype=dtype, device=self.device)

        index = None if g.ffn == 1 else words(-(-g.max_tokens // g.ffn))
        return RingNext(words(1), words(1), index, words(len(COUNTED), torch.int64))

    def serve_next(self, ffn: int, seen: RingNext, patience_ns: int = 1_000_000) -> RingStaging:
        """As :meth:`serve`, for whichever item comes; no header is read. Nothing here depends on the item's size."""
        g, rank = self.g, self.g.attention + ffn
        with self.streams[rank]:
            staging = self.staging()
            self.drivers[rank].take_next(staging, seen, patience_ns, self.streams[rank])
            reply = getattr(torch, g.reply)
            factor = staging.weights.sum(1, keepdim=True)
            if seen.index is None:
                out, beside = (staging.rows.float() * (factor + 1.0)).to(reply), None
            else:
                out = (staging.rows.float() * factor).to(reply)
                beside = staging.rows.float()[seen.index.long().clamp(0, g.max_tokens - 1)].to(reply)
            self.drivers[rank].reply_next(out, beside, self.streams[rank])
        return staging

    def settle(self) -> None:
        """Wait for all that is queued, on whatever stream."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def errors(self) -> list[Any]:
        return [driver.error() for driver in self.drivers]
