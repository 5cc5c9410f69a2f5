"""Measures what items cost each way, on the device that will serve them, after capture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

from halma.hal.backend import Backend
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.session import CaptureSession
from halma.models.deepseek_v4.ffn.costs import CostTable, Span, Way
from halma.models.deepseek_v4.ffn.items import Item, ItemBuffers, ItemHeader, ItemSizes
from halma.models.deepseek_v4.ffn.ladder import Bucket, Ladder

ROUNDS = 5
LEAST_SECONDS = 2e-3
"""Of one round: clocks of a microsecond, and a device that has settled."""
MOST_RUNS = 32


class Measurable(Protocol):
    """What is measured: a :class:`halma.models.deepseek_v4.ffn.program.FfnProgram`."""

    backend: Backend
    sizes: ItemSizes
    ladder: Ladder
    buffers: ItemBuffers
    session: CaptureSession
    by_layer: str

    def descriptor(self, bucket: Bucket, layer: int) -> Descriptor: ...
    def replay_in(self, item: ItemHeader, bucket: Bucket) -> object: ...
    def run_eagerly(self, item: ItemHeader) -> object: ...


def measured_costs(program: Measurable) -> CostTable:
    """Every bucket with a graph, at both ends of what it serves; ways alternate in every round, medians count."""
    spans: dict[int, Span] = {}
    k, below = program.sizes.top_k, 0
    worst = program.ladder.buckets[-1]
    for bucket in program.ladder.buckets:
        low, high = below // k + 1, bucket.routed // k
        below = bucket.routed
        if not _has_graph(program, bucket):
            continue
        ends = [_at(program, rows, bucket, worst) for rows in (low, high)]
        cost: dict[Way, tuple[float, float]] = {way: (ends[0][way], ends[1][way]) for way in ends[0]}
        spans[bucket.routed] = Span(low * k, high * k, cost)
    return CostTable(spans)


def _has_graph(program: Measurable, bucket: Bucket) -> bool:
    descriptor = program.descriptor(bucket, 0)
    return any(row.descriptor == descriptor and not row.why_not for row in program.session.report().rows)


def _at(program: Measurable, rows: int, bucket: Bucket, worst: Bucket) -> dict[Way, float]:
    shared = min(rows, program.sizes.max_shared)
    layers = 1 if program.by_layer else program.sizes.layers  # of several some may have stayed eager
    program.buffers.spread(rows, shared)

    def item(turn: int) -> Item:  # layers in turn, so that no weight is found in a cache
        return Item(turn % layers, rows, shared)

    ways: dict[Way, Callable[[int], object]] = {
        "bucket": lambda turn: program.replay_in(item(turn), bucket),
        "eager": lambda turn: program.run_eagerly(item(turn)),
    }
    if bucket != worst and _has_graph(program, worst):
        ways["worst case"] = lambda turn: program.replay_in(item(turn), worst)
    if bucket == worst:
        ways = {"worst case": ways["bucket"], "eager": ways["eager"]}
    return _medians(program, ways)


def _medians(program: Measurable, ways: dict[Way, Callable[[int], object]]) -> dict[Way, float]:
    synchronize = program.backend.device.synchronize
    runs: dict[Way, int] = {}
    for way, call in ways.items():
        call(0)  # plans and loads
        synchronize()
        begin = time.perf_counter()
        call(1)
        synchronize()
        runs[way] = min(max(int(LEAST_SECONDS / max(time.perf_counter() - begin, 1e-7)), 1), MOST_RUNS)
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            synchronize()
            begin = time.perf_counter()
            for turn in range(runs[way]):
                call(turn)
            synchronize()
            found[way].append((time.perf_counter() - begin) / runs[way])
    return {way: statistics.median(times) for way, times in found.items()}
