"""The FFN program: items through the experts of any layer, replayed from a ladder of graphs or run eagerly.

One graph a bucket serves all layers where the route of ``grouped_ffn`` reads its weights through a table; its layer is
a value on the device. Where it cannot, each layer has graphs of its own. Either way graphs own no tensors: scratch and
outputs are one sealed workspace, so the ladder costs its executables (F9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from halma.hal.backend import Backend
from halma.hal.collectives.expert_rows import slot_capacity
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.device_value import DeviceValue
from halma.hal.dispatch import Ops
from halma.hal.errors import CaptureError
from halma.hal.graph.agreement import Agreement
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.eager import eager_step
from halma.hal.graph.session import CaptureSession
from halma.hal.registry import default_registry
from halma.hal.routes import REFERENCE
from halma.hal.settings import settings
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.ffn.costs import CostTable
from halma.models.deepseek_v4.ffn.items import ItemBuffers, ItemHeader, ItemInputs, descriptor_of
from halma.models.deepseek_v4.ffn.ladder import Bucket, Ladder, last_of_each
from halma.models.deepseek_v4.ffn.layers import Experts, ExpertWeights, of_all, of_layer, unlike
from halma.models.deepseek_v4.ffn.measuring import measured_costs
from halma.models.deepseek_v4.ffn.options import FfnOptions as FfnOptions
from halma.models.deepseek_v4.ffn.statistics import FfnStatistics
from halma.ops import families as _families  # noqa: F401  (defines every op that an item calls)

Found = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
BY_LAYER = "the route has no table of layers"


class FfnProgram:
    """Experts of one rank, ready to serve items.

    Args:
        layers: weights by layer number; they stay where they are.
        buffers: where items' payloads come to.
        ladder: sizes to capture, in routed rows (rows times choices); see ``item_ladder``.
        agreement: the ranks that capture together; none by default.

    Raises:
        CaptureError: the reserve is larger than the device's memory; ladder and buffers do not fit.
        ModelError: layers of different shapes.

    Not thread-safe. What :meth:`run` returns lives until the next item.
    """

    def __init__(
        self,
        layers: Sequence[ExpertWeights],
        backend: Backend,
        buffers: ItemBuffers,
        ladder: Ladder,
        options: FfnOptions,
        *,
        agreement: Agreement | None = None,
    ) -> None:
        self.backend, self.buffers, self.ladder, self.options = backend, buffers, ladder, options
        self.sizes = buffers.sizes
        self.statistics = FfnStatistics()
        self.costs = CostTable({})
        self._check_sizes(layers)
        default_registry().load_routes()
        self.workspace = Workspace(backend.device.torch_device, checked=options.checked)
        self._ops = Ops(self.workspace, backend=backend.name, routes=options.routes, environment=settings().routes)
        self._layers = [of_layer(layer) for layer in layers]
        different = unlike(self._layers)
        self._all = None if different else of_all(layers)
        self.by_layer = different or self._why_by_layer()
        """Why every layer has graphs of its own; empty where one ladder serves all."""
        self._inputs: dict[Descriptor, ItemInputs] = {}
        self._descriptors: dict[tuple[int, int | None], Descriptor] = {}
        self.session = CaptureSession(
            backend,
            self.workspace,
            "persistent",
            switch=options.switch,
            strict=options.strict,
            budget=options.budget,
            reserve=self._reserve(),
            agreement=agreement,
            inputs=self._inputs_of,
        )
        self._eager_inputs = ItemInputs(buffers, self.sizes.max_tokens, self.sizes.max_shared)

    def _check_sizes(self, layers: Sequence[ExpertWeights]) -> None:
        sizes, ladder = self.sizes, self.ladder
        wrong: list[str] = []
        if ladder.max_routed != sizes.max_tokens * sizes.top_k or ladder.max_shared != sizes.max_shared:
            wrong.append(f"the ladder ends at {ladder.buckets[-1]}")
        if any(bucket.routed % sizes.top_k for bucket in ladder.buckets):
            wrong.append(f"a bucket is no multiple of {sizes.top_k} choices")
        if len(layers) != sizes.layers or (layers and layers[0].gate_up.shape[0] != sizes.experts):
            wrong.append(f"{len(layers)} layers are given")
        if wrong:
            raise CaptureError(
                "ladder, layers and buffers of the ffn program do not fit",
                asked=f"{sizes}",
                found=wrong,
                do="make the ladder by item_ladder() with the sizes of the buffers",
            )

    def _reserve(self) -> int:
        reserve = settings().ffn_graph_reserve if self.options.reserve is None else self.options.reserve
        total = self.backend.device.memory_info().total
        if reserve + self.options.transport > total:
            raise CaptureError(
                "the memory to be left free is more than the device has",
                asked=f"a reserve of {reserve:,} bytes and {self.options.transport:,} for the exchange",
                found=f"the device has {total:,} bytes",
                do="lower HALMA_FFN_GRAPH_RESERVE",
            )
        return reserve + self.options.transport

    def _why_by_layer(self) -> str:
        if self.options.by_layer:
            return "asked for"
        assert self._all is not None
        with_table = self._explained(self._all, self.buffers.layer_value)
        return BY_LAYER if with_table == REFERENCE != self._explained(self._layers[0], None) else ""

    def _explained(self, experts: Experts, layer: object) -> str:
        b, sizes = self.buffers, self.sizes
        capacity = slot_capacity(b.ids.numel(), sizes.experts, sizes.alignment)
        return self._chosen(capacity, sizes.experts, experts.gate_up, experts.down, layer)

    def _chosen(self, slots: int, experts: int, gate_up: object, down: object, layer: object) -> str:
        b = self.buffers
        index, weights = b.layer.expand(slots), b.weights[:1, 0].expand(slots)
        counts, offsets = b.layer.expand(experts), b.layer.expand(experts + 1)
        given = (b.rows, None, index, weights, counts, offsets, gate_up, down, self.options.limit)
        return self._ops.explain("grouped_ffn", *given, None if layer is None else b.layer).chosen

    # -- life ---------------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        order: str = "descending",
        measure: bool = True,
        progress: Callable[[Descriptor], None] | None = None,
    ) -> None:
        """Plan memory by the largest item, eager and captured, seal it, capture the ladder, measure what pays.

        With graphs of each layer's own, memory is looked at before each: layers that do not fit stay eager (F10).
        """
        with torch.no_grad():
            self._plan_eager()
            rows = [bucket.routed // self.sizes.top_k for bucket in self.ladder.buckets]
            layers: Sequence[int | None] = range(self.sizes.layers) if self.by_layer else (None,)
            made = {
                layer: [
                    descriptor_of(size, bucket.shared, layer)
                    for size, bucket in zip(rows, self.ladder.buckets, strict=True)
                ]
                for layer in layers
            }
            for wanted in made.values():
                self.session.capture_all(wanted, self.body_of, order, progress)
            if measure:
                self.measure_costs()

    def measure_costs(self) -> None:
        """Time every bucket that has a graph, beside eager items; from now on the cheapest way is taken (F5)."""
        if len(self.session):
            self.costs = measured_costs(self)
            self._explain_costs()

    @property
    def route(self) -> str:
        """What multiplies the experts of a captured item."""
        if self.by_layer or self._all is None:
            return self._explained(self._layers[0], None)
        return self._explained(self._all, self.buffers.layer_value)

    def _plan_eager(self) -> None:
        """Eager items of every bucket's size, of one row less, and of the most rows that a route between two buckets is
        chosen for: another route takes other scratch."""
        sizes = self.sizes
        kinds = list({one.kind: number for number, one in reversed(list(enumerate(self._layers)))}.values())
        ends = [bucket.routed // sizes.top_k for bucket in self.ladder.buckets]
        planned = sorted({1, *ends, *(max(end - 1, 1) for end in ends)})
        changes = last_of_each(planned, lambda rows: tuple(self._routes_of(rows, layer) for layer in kinds))
        for rows in sorted({*planned, *changes}, reverse=True):
            shared = min(rows, sizes.max_shared)
            self.buffers.spread(rows, shared)
            for layer in kinds:
                self.workspace.start()
                self.backend.graphs.dry_run(self._eager(rows, shared, layer), self.workspace)
        self.backend.device.synchronize()

    def _routes_of(self, rows: int, layer: int) -> tuple[str, ...]:
        """What multiplies an eager item's routed rows, and its shared ones."""
        sizes, experts = self.sizes, self._layers[layer]
        capacity = slot_capacity(rows * sizes.top_k, sizes.experts, sizes.alignment)
        found = [self._chosen(capacity, sizes.experts, experts.gate_up, experts.down, None)]
        if sizes.max_shared:
            shared = min(rows, sizes.max_shared)
            found.append(self._chosen(shared, 1, experts.shared_gate_up, experts.shared_down, None))
        return tuple(found)

    def _inputs_of(self, descriptor: Descriptor) -> ItemInputs:
        known = self._inputs.get(descriptor)
        if known is None:
            shared = int(descriptor.variant.split()[0])
            known = self._inputs[descriptor] = ItemInputs(self.buffers, descriptor.num_requests, shared)
        return known

    def body_of(self, descriptor: Descriptor) -> Callable[[], Found]:
        """What a graph of ``descriptor`` works: from :attr:`buffers` to what :meth:`run` makes of it."""
        rows, words = descriptor.num_requests, descriptor.variant.split()
        shared = int(words[0])
        experts = self._all
        if self.by_layer or experts is None:
            return self._eager(rows, shared, int(words[-1]))
        return lambda: self._body(rows, shared, experts, True)

    def _eager(self, rows: int, shared: int, layer: int) -> Callable[[], Found]:
        experts = self._layers[layer]
        return lambda: self._body(rows, shared, experts, False)

    def _body(self, rows: int, shared: int, experts: Experts, table: bool) -> Found:
        """[rows, D] reply; where only a part of the rows is shared, with those results [shared, D] beside it."""
        ops, ws, b, options = self._ops, self.workspace, self.buffers, self.options
        acc, width = b.weights.dtype, self.sizes.hidden
        layer = b.layer_value if table else None
        whole = shared > 0 and self.sizes.every_row_shared
        out = ws.take((rows, width), options.reply)
        beside = ws.take((shared, width), acc) if shared and not whole else None
        with ws.scope("item"):
            x, ids, weights = b.rows[:rows], b.ids[:rows], b.weights[:rows]
            laid = ops.expert_layout(ids, weights, 0, self.sizes.experts, self.sizes.alignment)
            index, slot_weights, counts, offsets, slots = laid
            parts = ops.grouped_ffn(
                x, None, index, slot_weights, counts, offsets, experts.gate_up, experts.down, options.limit, layer
            )
            routed = ops.expert_sum(parts, slots, out=out if options.reply is acc and not whole else None)
            if shared:
                with ws.scope("shared"):
                    result = self._shared_expert(x, shared, experts, layer, beside)
                    if whole:
                        ops.add_rows(routed, result, options.reply, out=out)
            if routed is not out and not whole:
                out.copy_(routed)
        return out if beside is None else (out, beside)

    def _shared_expert(
        self, x: torch.Tensor, shared: int, experts: Experts, layer: DeviceValue | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """[shared, D] acc: a group of one expert, so that its padding is skipped like any other."""
        b = self.buffers
        index, ones = b.shared_index[:shared], b.ones[:shared]
        up, down = experts.shared_gate_up, experts.shared_down
        return self._ops.grouped_ffn(
            x, None, index, ones, b.shared_count, b.shared_offsets, up, down, self.options.limit, layer, out=out
        )

    # -- items --------------------------------------------------------------------------------------

    def run(self, item: ItemHeader, staging: object = None) -> torch.Tensor:
        """Queue the work of an item whose payload is in :attr:`buffers`; returns [rows, D], good until the next item.

        Raises:
            RequestError: it is beyond the sizes that were declared; nothing was queued.
            CaptureError: it has no graph, and the program is strict.
        """
        self.sizes.check(item)
        routed = item.rows * self.sizes.top_k
        bucket, reason = self._bucket_for(item, routed)
        if item.rows == 0:
            self.statistics.eager(0, reason)
            return self.buffers.rows[:0].to(self.options.reply)
        with torch.no_grad():
            found = self._replay(item, bucket) if bucket is not None else None
            if found is None or bucket is None:
                self.statistics.eager(routed, reason or self._why_no_graph(item, bucket))
                return self.run_eagerly(item)
            self.statistics.replayed(routed, bucket.routed)
            return self._shared(found, item)

    def _bucket_for(self, item: ItemHeader, routed: int) -> tuple[Bucket | None, str]:
        """The bucket to replay, or None and why the item runs eagerly."""
        bucket = self.ladder.pick(routed, item.shared)
        if bucket is None or item.rows == 0:
            return None, self.ladder.why_none(routed, item.shared)
        off = self.session.off_reason("ffn")
        if off is not None:
            return None, off
        way = self.costs.choose(bucket.routed, routed)
        if way is not None:
            if way == "eager":
                return None, "an eager item was measured to cost less"
            return (self.ladder.buckets[-1], "") if way == "worst case" else (bucket, "")
        if bucket.routed > routed * self.ladder.gate:
            return None, f"its bucket pads by more than {self.ladder.gate}, and nothing was measured"
        return bucket, ""

    def descriptor(self, bucket: Bucket, layer: int) -> Descriptor:
        """What an item of ``layer`` replays in ``bucket``."""
        key = (bucket.routed, layer if self.by_layer else None)
        known = self._descriptors.get(key)
        if known is None:
            made = descriptor_of(bucket.routed // self.sizes.top_k, bucket.shared, key[1])
            known = self._descriptors[key] = made
        return known

    def _replay(self, item: ItemHeader, bucket: Bucket) -> Found | None:
        descriptor = self.descriptor(bucket, item.layer)
        graph = self.session.find(descriptor)
        if graph is None:
            return None
        self.buffers.set(item, descriptor.num_requests)
        self._inputs_of(descriptor).fresh = True
        return graph.replay()

    def replay_in(self, item: ItemHeader, bucket: Bucket) -> torch.Tensor:
        """Replay ``bucket`` whatever it costs: for measuring and for tests.

        Raises:
            CaptureError: it has no graph.
        """
        self.sizes.check(item)
        with torch.no_grad():
            found = self._replay(item, bucket)
            if found is None:
                raise CaptureError(f"{bucket} has no graph", found=self._why_no_graph(item, bucket))
            return self._shared(found, item)

    def run_eagerly(self, item: ItemHeader, bucket: Bucket | None = None) -> torch.Tensor:
        """The item by the ops, on exactly its rows; counted by :meth:`run` alone.

        With ``bucket`` on that bucket's rows, as its graph works: the same kernels, so the same bits as a replay. On
        other rows a route may cut its products another way, which moves the last bits on a GPU.
        """
        self.sizes.check(item)
        shape = descriptor_of(item.rows, item.shared, item.layer)
        program = self._eager(item.rows, item.shared, item.layer)
        if bucket is not None:
            shape = self.descriptor(bucket, item.layer)
            program = self.body_of(shape)
        self.buffers.set(item, shape.num_requests)
        self._eager_inputs.fresh = True
        with torch.no_grad():
            found = eager_step(
                program,
                self.workspace,
                self.backend,
                step=shape,
                inputs=self._eager_inputs,
            )
            return self._shared(found, item)

    def _shared(self, found: Found, item: ItemHeader) -> torch.Tensor:
        """The item's rows of a result; a part of them gets the shared expert's."""
        if isinstance(found, torch.Tensor):
            return found[: item.rows]
        out, beside = found
        begin, end = item.shared_first, item.shared_first + item.shared
        out[begin:end].add_(beside[: item.shared])
        return out[: item.rows]

    def _why_no_graph(self, item: ItemHeader, bucket: Bucket | None) -> str:
        if bucket is None:
            return "no bucket"
        wanted = self.descriptor(bucket, item.layer)
        for row in self.session.report().rows:
            if row.descriptor == wanted and row.why_not:
                return row.why_not
        return self.session.off_reason("ffn") or f"{wanted} was not captured"

    # -- reports ------------------------------------------------------------------------------------

    @property
    def headerless(self) -> bool:
        """Whether the worst case's graph costs no more than any bucket: then items' sizes need not be known."""
        return self.costs.worst_case_pays and not self.by_layer

    def _explain_costs(self) -> None:
        for size, span in sorted(self.costs.spans.items()):
            chosen = self.costs.choose(size, span.high)
            if chosen is not None:
                shown = tuple(
                    Candidate(way, way == chosen, f"{ends[0] * 1e6:.1f} to {ends[1] * 1e6:.1f} us")
                    for way, ends in span.cost.items()
                )
                decisions.record(Decision("ffn", f"items of {span.low} to {size} routed rows", chosen, shown))

    def close(self) -> None:
        """Destroy the graphs."""
        self.session.close()
