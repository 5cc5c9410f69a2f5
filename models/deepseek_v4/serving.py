"""The FFN role: a rank that holds experts and serves whatever items come, of shapes that nobody told it.

The host sees an item's header alone; rows, choices and weights stay on the device. Notation: n rows of an item, k
choices, E experts here, D hidden.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import torch

from halma.hal.backend import Backend
from halma.hal.collectives.ring_contract import RingItem, RingStaging
from halma.hal.collectives.ring_plan import RingGeometry
from halma.hal.collectives.rings import Rings
from halma.hal.dispatch import Ops
from halma.hal.registry import default_registry
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.expert_loading import ExpertLayers
from halma.models.deepseek_v4.experts import shared_rows
from halma.ops import families as _families  # noqa: F401  (defines every op that an item calls)

SPIN_SECONDS: Final = {"cpu": 0.002}
"""How long a host polls for headers before it naps between polls. Naps cost latency (a published connector's time to
the first token grew by a quarter with them); ranks on a CPU share its cores, so there they begin soon."""
SPIN_OTHERS: Final = 1.0
NAP: Final = 0.0001


class ItemProgram(Protocol):
    """What turns an item into its reply. An eager one is below; one of captured buckets goes here too."""

    def run(self, item: RingItem, staging: RingStaging) -> torch.Tensor:
        """Queue the work of an item whose payload is in ``staging``.

        Returns [rows, D] of the geometry's reply dtype: each row's choices here, weighted and summed in their order,
        and for ``shared`` rows from ``shared_first`` on the shared expert. It may be overwritten by the next item.
        """
        ...


class Statistics(Protocol):
    """What a program counts of its own."""

    def as_json(self) -> dict[str, Any]: ...


@dataclass
class ServedCounters:
    """What a rank served: items, of them those without a row; rows, pairs of a row and an expert, shared rows."""

    items: int = 0
    empty: int = 0
    rows: int = 0
    pairs: int = 0
    shared: int = 0

    def count(self, item: RingItem) -> None:
        """One more item."""
        self.items += 1
        self.empty += not item.rows
        self.rows += item.rows
        self.pairs += item.pairs
        self.shared += item.shared

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


class EagerItems:
    """Runs each item by the ops, one after another, in one sealed workspace. See :class:`ItemProgram`.

    Args:
        held: the experts of this rank.
        geometry: of the rings; its largest item is what memory is planned for.
        checked: poison the workspace's memory as it is freed.
    """

    def __init__(
        self,
        held: ExpertLayers,
        backend: Backend,
        geometry: RingGeometry,
        *,
        checked: bool = False,
        routes: Mapping[str, str] | None = None,
    ) -> None:
        default_registry().load_routes()
        self._held, self._backend, self._geometry = held, backend, geometry
        self._reply: torch.dtype = getattr(torch, geometry.reply)
        self.workspace = Workspace(backend.device.torch_device, checked=checked)
        self._ops = Ops(self.workspace, backend=backend.name, environment=routes)

    def prepare(self, staging: RingStaging) -> None:
        """Plan memory for every item there may be, and seal it."""
        g = self._geometry
        own = -(-g.max_tokens // g.ffn)
        shapes = [(rows, shared) for rows in {g.max_tokens, 1} for shared in {0, 1, min(own, rows), rows}]
        with torch.no_grad():
            for rows, shared in shapes:
                if shared in (0, rows) or g.ffn > 1:
                    item = RingItem(0, 0, 0, rows, rows * g.top_k, 0, shared)
                    self._backend.graphs.dry_run(lambda item=item: self._queue(item, staging), self.workspace)
        self._backend.device.synchronize()
        self.workspace.seal()

    def run(self, item: RingItem, staging: RingStaging) -> torch.Tensor:
        """See :meth:`ItemProgram.run`."""
        with torch.no_grad():
            return self._queue(item, staging)

    def _queue(self, item: RingItem, staging: RingStaging) -> torch.Tensor:
        ops, ws, w = self._ops, self.workspace, self._held.layers[item.layer]
        limit, n = self._held.config.swiglu_limit, item.rows
        ws.start()
        out = ws.take((n, self._geometry.hidden), self._reply)
        if not n:
            return out
        x = staging.rows[:n]
        with ws.scope("item"):
            # The op knows no -1: such a choice becomes expert 0 with the weight 0 that it has already.
            ids = torch.clamp(staging.ids[:n], min=0, out=ws.take((n, self._geometry.top_k), torch.int64))
            parts = ops.expert_ffn(x, ids, staging.weights[:n], w.gate_up, w.down, limit)
            if not item.shared:
                return out.copy_(parts)
            begin, end = item.shared_first, item.shared_first + item.shared
            with ws.scope("shared"):
                shared = shared_rows(ops, x[begin:end], w, limit)
                if item.shared < n:
                    out.copy_(parts)
                return self._added(parts[begin:end], shared, out[begin:end], out)

    def _added(self, a: torch.Tensor, b: torch.Tensor, where: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._ops.add_rows(a, b, self._reply, out=where)
        return out


class ExpertServer:
    """Serves items until no attention rank asks any more.

    Args:
        rings: of an FFN rank.
        program: what answers an item; prepared.
        staging: where payloads go, the same for all items.
        statistics: the program's own, for reports.
        close: called once the last item was answered.
        why: headers are read, for reports.
    """

    def __init__(
        self,
        rings: Rings,
        program: ItemProgram,
        staging: RingStaging,
        backend: Backend,
        *,
        statistics: Statistics | None = None,
        close: Callable[[], None] | None = None,
        why: str = "there are no graphs",
    ) -> None:
        self._why = why
        self.counters = ServedCounters()
        self._rings, self._program, self._staging = rings, program, staging
        self._spin = SPIN_SECONDS.get(backend.device.torch_device.type, SPIN_OTHERS)
        self._statistics, self._close = statistics, close

    def serve(self) -> dict[str, Any]:
        """Until every attention rank is done, and then until all ranks are; what was served, for reports.

        Raises:
            CaptureError: an item has no graph, and the program is strict.
            RankError: a rank left, ended, or did not do its part in time.
        """
        since = time.monotonic()
        while True:
            if self.step():
                since = time.monotonic()
            elif self._rings.all_done:
                break
            elif time.monotonic() - since > self._spin:
                time.sleep(NAP)
            else:
                os.sched_yield()
        self._rings.finish()
        if self._close is not None:
            self._close()
        more = {} if self._statistics is None else {"program": self._statistics.as_json()}
        return {**self.counters.as_json(), **more, "way": {"chosen": "headers", "why": self._why}}

    def step(self) -> bool:
        """Answer one item, if there is one."""
        item = self._rings.next_item()
        if item is None:
            return False
        self._rings.take(item, self._staging)
        self._rings.reply(item, self._program.run(item, self._staging))
        self.counters.count(item)
        return True


def staging_of(backend: Backend, geometry: RingGeometry) -> RingStaging:
    """Memory for one item's payload, zero."""
    g = geometry

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return backend.memory.empty(shape, dtype).zero_()

    return RingStaging(
        empty((g.max_tokens, g.hidden), getattr(torch, g.payload)),
        empty((g.max_tokens, g.top_k), torch.int64),
        empty((g.max_tokens, g.top_k), getattr(torch, g.weights)),
    )
