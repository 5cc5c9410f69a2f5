"""What the way between attention and FFN ranks costs: from a header's store to what the host queues, and a round trip.

    python -m benchmarks.roles [--rounds 2000] [--rows 1 8 64 128] [--items 43] [--json]

*store to enqueue*: a kernel stamps the device's clock and stores an item's header; the host polls it as an FFN rank
does, and launches the kernel that waits for the payload. The clocks are set against one another by an echo through
pinned memory, before and after, and the figure is uncertain by half the echo's shortest round trip.

*round trip*: one graph of so many submissions and collections, replayed on one stream, while the host serves them on
another with an expert that does nothing: by headers, and without, by one graph that takes whichever item comes. Both
ranks are on one GPU here: no link between two is in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import halma
from benchmarks.virtual_rings import VirtualRings
from halma.backends.simt.sources import Target, headers, source
from halma.hal.backend import Backend, KernelSource
from halma.hal.collectives.ring_board import Board
from halma.hal.collectives.ring_contract import RingItem
from halma.hal.collectives.ring_plan import FLAGS, HEADER_BYTES, RingGeometry

SECOND = 10**9
ECHOES = 2000
BEAT = """
#include "dialect.h"
// Answers each step of `go` with the device's time.
extern "C" __global__ void echo(u64 go, u64 answer, u64 rounds) {
  for (u64 n = 1; n <= rounds; ++n) {
    while (load8_relaxed((const void*)go) < n) {}
    store8_relaxed((void*)answer, clock_ns());
  }
}
// With each step of `go`: the time, then an item's header and its flags.
extern "C" __global__ void beat(u64 go, u64 header, u64 flags, u64 slot_bytes, u64 depth, u64 stamps, u64 rounds) {
  for (u64 n = 1; n <= rounds; ++n) {
    while (load8_relaxed((const void*)go) < n) {}
    u64 slot = n % depth, now = clock_ns();
    u32 values[HALMA_RING_HEADER_WORDS] = {1u, 1u, 1u, 0u, 1u};
    for (u32 w = 0; w < HALMA_RING_HEADER_WORDS; ++w)
      store8_relaxed((void*)(header + slot * HALMA_RING_HEADER_BYTES + 8u * w), n << 32 | values[w]);
    for (u32 part = 0; part < HALMA_RING_FLAGS; ++part)
      store4_relaxed((void*)(flags + slot * slot_bytes + 4u * part), static_cast<u32>(n));
    store8_relaxed((void*)(stamps + 8u * n), now);
  }
}
"""


@dataclass(frozen=True)
class Spread:
    """Microseconds."""

    median: float
    p95: float
    worst: float

    @staticmethod
    def of(nanoseconds: list[float]) -> Spread:
        ordered = sorted(one / 1e3 for one in nanoseconds)
        return Spread(statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1])


class Clocks:
    """The device's clock as the host's; ``uncertain``: half the shortest echo, in ns."""

    def __init__(self, backend: Backend, kernel: Any) -> None:
        self._backend, self._kernel = backend, kernel
        self._words: Any = backend.memory.pinned((2,), torch.int64).zero_().numpy()
        self.offset, self.uncertain = 0.0, float("inf")
        self._offsets: list[float] = []

    def set(self) -> None:
        """Once more; the offset becomes the mean of all times, since clocks drift."""
        self._words[:] = 0
        stream = self._backend.device.new_stream("echo")
        at = int(self._words.ctypes.data)
        self._backend.kernels.launch(self._kernel, 1, 1, (at, at + 8, ECHOES), stream=stream)
        best, offset = float("inf"), 0.0
        for number in range(1, ECHOES + 1):
            before, answer = self._words[1], time.monotonic_ns()
            self._words[0] = number
            while self._words[1] == before:
                pass
            back = time.monotonic_ns()
            if back - answer < best:
                best, offset = back - answer, float(self._words[1]) - (answer + back) / 2
        stream.synchronize()
        self._offsets.append(offset)
        self.offset, self.uncertain = statistics.fmean(self._offsets), min(self.uncertain, best / 2)

    def host(self, device_ns: float) -> float:
        return device_ns - self.offset


def store_to_enqueue(backend: Backend, kernels: Any, rounds: int) -> dict[str, Any]:
    geometry = RingGeometry(1, 1, 8, 4096, 6, (0, 128), 43, payload="bfloat16", reply="bfloat16")
    rings = VirtualRings(geometry, backend, backend.memory.mapped, 20 * SECOND)  # type: ignore[attr-defined]
    board, staging = rings.boards[1], rings.staging()
    clocks = Clocks(backend, kernels["echo"])
    clocks.set()
    go: Any = backend.memory.pinned((1,), torch.int64).zero_().numpy()
    stamps: Any = backend.memory.pinned((rounds + 1,), torch.int64).zero_().numpy()
    site = rings.drivers[0]
    header = site._boards[1].address + Board.headers(geometry.size)  # pyright: ignore[reportPrivateUsage]
    flags, slot_bytes = rings.regions[1].address + rings.plan.item_slot(0, 0), rings.plan.item.nbytes
    arguments = (go.ctypes.data, header, flags, slot_bytes, geometry.depth, stamps.ctypes.data, rounds)
    rings.drivers[1].take(RingItem(0, 0, 0, 0, 0, 0, 0), staging, rings.streams[1])  # loads and makes what is lazy
    rings.settle()
    assert HEADER_BYTES == 64 and FLAGS == 64
    backend.kernels.launch(kernels["beat"], 1, 1, tuple(map(int, arguments)), stream=rings.streams[0])
    seen: list[int] = []
    done: list[int] = []
    chance = random.Random(6)
    for number in range(1, rounds + 1):
        until = time.monotonic_ns() + chance.randrange(5_000, 60_000)
        while time.monotonic_ns() < until:
            pass
        go[0] = number
        while (item := board.header(0, number)) is None:
            pass
        seen.append(time.monotonic_ns())
        rings.drivers[1].take(item, staging, rings.streams[1])
        done.append(time.monotonic_ns())
    rings.settle()
    clocks.set()
    stored = [clocks.host(float(one)) for one in stamps[1:]]
    pairs = list(zip(stored, seen, done, strict=True))
    assert rings.errors() == [None, None]
    return {
        "store_to_seen": asdict(Spread.of([b - a for a, b, _ in pairs])),
        "store_to_enqueued": asdict(Spread.of([c - a for a, _, c in pairs])),
        "launch": asdict(Spread.of([float(c - b) for _, b, c in pairs])),
        "uncertain_us": clocks.uncertain / 1e3,
        "rounds": rounds,
    }


def round_trip(backend: Backend, rows: int, items: int, *, headers_: bool, repeats: int = 9) -> dict[str, Any]:
    geometry = RingGeometry(1, 1, rows, 4096, 6, (0, 128), 43, payload="bfloat16", reply="bfloat16")
    rings = VirtualRings(geometry, backend, backend.memory.mapped, 20 * SECOND)  # type: ignore[attr-defined]
    stream, serving = rings.streams
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4096, generator=generator).to(rings.device, torch.bfloat16)
    ids = torch.stack([torch.randperm(128, generator=generator)[:6] for _ in range(rows)]).to(rings.device)
    weights, out, staging = torch.ones(rows, 6, device=rings.device), torch.empty_like(x), rings.staging()
    replied, number, times = [0] * geometry.depth, 0, list[float]()
    rings.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream.torch, capture_error_mode="thread_local"):
        for layer in range(items):
            rings.submit(0, layer % 43, (x, ids, weights))
            rings.collect(0, out)
    serve = torch.cuda.CUDAGraph()
    if not headers_:
        seen = rings.seen()
        rings.settle()
        with torch.cuda.graph(serve, stream=serving.torch, capture_error_mode="thread_local"):
            rings.drivers[1].take_next(staging, seen, SECOND, serving)
            rings.drivers[1].reply_next(staging.rows, None, serving)
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with stream:
            begin.record()
            graph.replay()
            end.record()
        for _ in range(items):
            if not headers_:
                with serving:
                    serve.replay()
                continue
            number += 1
            while (item := rings.header(0, 0, number)) is None:
                pass
            rings.drivers[1].take(item, staging, serving)
            slot = number % geometry.depth
            rings.drivers[1].reply(item, staging.rows[: item.rows], replied[slot], serving)
            replied[slot] = number
        rings.settle()
        times.append(begin.elapsed_time(end) * 1e3 / items)
    assert rings.errors() == [None, None] and torch.equal(out, x)
    way = "headers" if headers_ else "whichever comes"
    return {
        "served_by": way,
        "rows": rows,
        "items": items,
        "us_an_item": statistics.median(times[1:]),
        "best": min(times[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--items", type=int, default=43)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    backend = halma.backend("cuda")
    target = Target.of(backend.kernels, backend.capabilities)
    unit = KernelSource("beat", BEAT, headers(), source("ring", 2, target).defines)
    kernels = backend.kernels.load(unit, ("echo", "beat"))
    with torch.no_grad():
        found = {
            "benchmark": "roles",
            "device": backend.device.properties().get("name", ""),
            "header": store_to_enqueue(backend, kernels, given.rounds),
            "round_trip": [
                round_trip(backend, rows, given.items, headers_=one) for rows in given.rows for one in (True, False)
            ],
        }
    if given.json:
        print(json.dumps(found, indent=2))
        return
    header = found["header"]
    for name in ("store_to_seen", "launch", "store_to_enqueued"):
        one = header[name]
        shown = f"{one['median']:.2f} us median, {one['p95']:.2f} p95, {one['worst']:.2f} worst"
        print(f"{name.replace('_', ' ')}: {shown}")
    print(f"the clocks agree to {header['uncertain_us']:.2f} us")
    for row in found["round_trip"]:
        print(f"{row['rows']} rows: {row['us_an_item']:.1f} us an item, best {row['best']:.1f}")


if __name__ == "__main__":
    main()
