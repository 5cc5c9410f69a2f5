"""An exchange where ranks share no memory: the same contract through torch.distributed, on padded buffers.

One all-to-all out and one back, of equal splits sized by the call's bound: no host read, so a backend whose
collectives can be captured captures them. Every token goes to every rank, with its choices; tokens beyond a rank's own
have no expert. Waits have the process group's own time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from halma.hal.backend import Stream
from halma.hal.collectives.contract import ErrorRecord, FlightEntry
from halma.hal.collectives.exchange_contract import ExchangeCall, Outgoing, Returning
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_rows import as_bits, lay_out, local_sums, owners, rank_sums, to_fp8
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_launch

NODE = "collective:vendor"


class TorchExchange:
    """See :class:`halma.hal.collectives.exchange_contract.ExchangeDriver`.

    Args:
        world: the torch.distributed group; None for one rank alone.
        rows, scales: what is handed out; this driver writes them.
    """

    def __init__(
        self, geometry: Geometry, world: Any, rank: int, rows: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        self._geometry, self._world, self._rank = geometry, world, rank
        self._rows, self._scales = rows, scales
        self._starts = [geometry.first(one) for one in range(geometry.ranks + 1)]
        self._acc, self._carrier = (getattr(torch, name) for name in (geometry.accumulator, geometry.given))

    def dispatch(self, call: ExchangeCall, operands: Outgoing, stream: Stream) -> None:
        """See the contract."""
        writes = [self._rows, *([] if self._scales is None else [self._scales])]
        if operands.ids is None or operands.weights is None:
            reads = [operands.x, *operands.layout.tensors()]
            return self._make(call, lambda: self._send(call, operands.x, []), reads, writes)
        ids, weights = operands.ids, operands.weights
        writes += operands.layout.tensors()
        self._make(call, lambda: self._dispatch(call, operands, ids, weights), [operands.x, ids, weights], writes)

    def combine(self, call: ExchangeCall, operands: Returning, stream: Stream) -> None:
        """See the contract."""
        layout = operands.layout
        reads = [operands.parts, layout.slots, layout.sources]
        self._make(call, lambda: self._combine(call, operands), reads, [operands.out])

    def _make(
        self, call: ExchangeCall, work: Callable[[], object], reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        def run() -> None:
            with torch.no_grad():
                work()

        recorder = current_recorder()
        if recorder is None:
            note_launch()
            run()
        else:
            recorder.record_node(NODE, run, reads=reads, writes=writes, parameters=(("call", call.describe()),))

    def _dispatch(self, call: ExchangeCall, operands: Outgoing, ids: torch.Tensor, weights: torch.Tensor) -> None:
        geometry, bound, layout = self._geometry, call.bound, operands.layout
        tokens, ranks, device = operands.x.shape[0], geometry.ranks, operands.x.device
        layout.sources[:tokens].copy_(as_bits(owners(ids, self._starts)))
        sent_ids = torch.full((bound, geometry.top_k), -1, dtype=torch.int64, device=device)
        sent_ids[:tokens] = ids
        counts = torch.full((bound, 1), tokens, dtype=torch.int64, device=device)
        choices = [_padded(_bytes(weights), bound), _bytes(sent_ids), _bytes(counts)]
        came_weights, came_ids, came_counts = self._send(call, operands.x, choices)
        by_pair = came_weights.contiguous().view(self._acc).view(ranks * bound, geometry.top_k)
        arrived_ids = came_ids.contiguous().view(torch.int64).view(ranks * bound, geometry.top_k)
        where = torch.arange(ranks, device=device).unsqueeze(1) * geometry.max_tokens
        rows = (where + torch.arange(bound, device=device)).view(-1)
        first = self._starts[self._rank]
        experts = self._starts[self._rank + 1] - first
        lay_out(arrived_ids, by_pair, rows, first, experts, geometry.alignment, layout)
        layout.tokens.copy_(came_counts.contiguous().view(torch.int64).view(ranks, bound)[:, 0])

    def _send(self, call: ExchangeCall, given: torch.Tensor, beside: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows, and their scales, to everybody and into the landing area; what came ``beside`` them.

        Args:
            beside: uint8 [bound, ...].

        Returns:
            uint8 [ranks, bound, ...] each.
        """
        geometry, bound, ranks = self._geometry, call.bound, self._geometry.ranks
        x, scales = to_fp8(given) if geometry.payload == "fp8" else (given, None)
        parts = [_padded(_bytes(x), bound), *beside]
        if scales is not None:
            parts.append(_padded(_bytes(scales), bound))
        record = torch.cat(parts, 1)
        arrived = self._moved(record.expand(ranks, *record.shape).contiguous())
        cuts = torch.split(arrived, [part.shape[1] for part in parts], dim=2)
        landing = self._rows.view(torch.uint8).view(ranks, geometry.max_tokens, -1)
        landing[:, :bound].copy_(cuts[0])
        if self._scales is not None:
            spots = self._scales.view(torch.uint8).view(ranks, geometry.max_tokens, -1)
            spots[:, :bound].copy_(cuts[-1])
        return list(cuts[1 : 1 + len(beside)])

    def _combine(self, call: ExchangeCall, operands: Returning) -> None:
        geometry, layout, bound = self._geometry, operands.layout, call.bound
        slots = layout.slots.view(geometry.ranks, geometry.max_tokens, geometry.top_k)[:, :bound]
        sums = local_sums(operands.parts, slots.reshape(-1, geometry.top_k), self._acc, self._carrier)
        sent = sums.view(torch.uint8).view(geometry.ranks, bound, geometry.back_bytes)
        tokens = operands.out.shape[0]
        back = self._moved(sent).view(self._carrier).view(geometry.ranks, bound, geometry.hidden)[:, :tokens]
        rank_sums(back, layout.sources[:tokens], operands.out, self._acc)

    def _moved(self, data: torch.Tensor) -> torch.Tensor:
        """uint8 [ranks, ...]: what every rank sent to this one."""
        if self._geometry.ranks == 1:
            return data
        import torch.distributed as distributed

        out = torch.empty_like(data)
        try:
            distributed.all_to_all_single(out, data, group=self._world)  # pyright: ignore[reportUnknownMemberType]
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(
                "the all-to-all of torch.distributed failed",
                asked=f"{self._geometry.ranks} ranks, {data.nbytes:,} bytes each",
                found=str(error).splitlines()[0],
                do="look at the other ranks' own output; every rank makes the same calls with the same bound",
            ) from error
        return out

    def error(self) -> ErrorRecord | None:
        """torch.distributed raises its own."""
        return None

    def flight(self) -> Sequence[FlightEntry]:
        """Nothing is recorded."""
        return ()

    def set_bound(self, bound_ns: int) -> None:
        """The process group has its own."""

    def epoch(self) -> int:
        """There is none."""
        return 0

    def rearm(self, epoch: int) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """Nothing is held."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(tensor.shape[0], tensor.shape[1] * tensor.itemsize)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [M, n] -> [count, n]; what is added holds anything."""
    if rows.shape[0] == count:
        return rows
    return torch.cat([rows, torch.empty((count - rows.shape[0], rows.shape[1]), dtype=torch.uint8, device=rows.device)])
