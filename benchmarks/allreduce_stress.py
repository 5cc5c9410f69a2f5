"""Very many calls of one channel, every result checked on the device.

    python -m benchmarks.allreduce_stress --ranks 2 --calls 1000000 [--virtual] [--first-epoch 0xFFFFFFF0] [--json]

Graphs of back-to-back calls in mixed sizes, algorithms, grids and dtypes are replayed in random order with random
skew between the ranks, eager calls in between, one-call graphs back to back, broadcasts in a row. Messages differ with
every call, so that anything stale is seen. Ends with status 1 unless every call was checked and none was wrong.
``--virtual``: all ranks are streams of this process on one GPU (no link between them).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.ranks import Rank, Ranks, backend, process_ranks, start, virtual_ranks
from benchmarks.virtual_ranks import SECOND, lay_out
from halma.backends.simt import sources
from halma.hal.backend import Backend, KernelSource
from halma.hal.collectives.contract import Algorithm, Call, Choice, Kind, Operands, Wire

WAYS = (
    Choice(Algorithm.ONE_SHOT, Wire.WORDS),
    Choice(Algorithm.ONE_SHOT, Wire.SENTINEL),
    Choice(Algorithm.TWO_SHOT, Wire.CHUNKS),
    Choice(Algorithm.STAGED, Wire.FLAGS),
    Choice(Algorithm.STAGED_TWO_SHOT, Wire.FLAGS),
)
BROADCAST_WAYS = (WAYS[0], WAYS[1], WAYS[3])
SIZES = (16, 240, 8192, 8208, 32768, 65536)
DTYPES = ("bfloat16", "float16", "float32")
LARGEST = 1 << 18
GRAPHS, CALLS_A_GRAPH = 7, 9
"""Odd numbers of calls, so that buffers swap roles from one replay to the next."""
BOUND = 20 * SECOND

KERNELS = """
#include "numbers.h"

DEVICE u32 mixed(u32 x) {
  x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
  return x;
}
// Small whole numbers: their sum over eight ranks is exact in every dtype.
DEVICE float value_of(u32 i, u32 turn, u32 rank) {
  return static_cast<float>(static_cast<int>(mixed(i * 0x9e3779b9u ^ mixed(turn * 8u + rank)) >> 27)) - 16.0f;
}
DEVICE u32 word_of(u32 i, u32 turn, u32 first, u32 last, u32 dtype) {
  float low = 0.0f, high = 0.0f;
  for (u32 rank = first; rank < last; ++rank) {
    low += value_of(2u * i, turn, rank), high += value_of(2u * i + 1u, turn, rank);
  }
  return dtype == BF16 ? pack_bf16(low, high) : dtype == F16 ? pack_f16(low, high) : bits_of(low);
}
// Writes a rank's message of a call, and poisons where its result will be.
extern "C" __global__ void stress_fill(u64 to, u64 out, u64 words, u64 turns, u64 call, u64 rank, u64 dtype) {
  u32 turn = *(const u32*)turns + (u32)call;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    ((u32*)to)[i] = word_of(i, turn, (u32)rank, (u32)rank + 1u, (u32)dtype);
    ((u32*)out)[i] = ~0u;
  }
}
// counts[0]: words that are wrong; counts[1]: calls that were looked at.
extern "C" __global__ void stress_check(u64 out, u64 words, u64 turns, u64 call, u64 first, u64 last, u64 dtype,
                                        u64 counts) {
  u32 turn = *(const u32*)turns + (u32)call;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    if (((const u32*)out)[i] != word_of(i, turn, (u32)first, (u32)last, (u32)dtype)) atomicAdd((u64*)counts, 1ull);
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd((u64*)counts + 1, 1ull);
}
extern "C" __global__ void stress_turn(u64 turns, u64 calls) { *(u32*)turns += (u32)calls; }
// Holds a rank back: often by nothing, now and then by up to `most` ns.
extern "C" __global__ void stress_late(u64 turns, u64 rank, u64 most) {
  u32 drawn = mixed(*(const u32*)turns * 16u + (u32)rank + 77u);
  if ((drawn & 15u) != 0u) return;
  u64 until = clock_ns() + (u64)(drawn >> 4) % most;
  while (clock_ns() < until) {}
}
"""
ENTRIES = ("stress_fill", "stress_check", "stress_turn", "stress_late")


@dataclass(frozen=True)
class Step:
    """One call of the mix, the same on all ranks."""

    call: Call
    choice: Choice
    first: int
    last: int
    """Ranks whose messages the result is the sum of."""


class Stress:
    """The calls of this process's ranks, and what the device found."""

    def __init__(self, device: Backend, ranks: Ranks, seed: int, skew_ns: int, ways: Sequence[Choice] = WAYS) -> None:
        self.ranks, self.skew_ns, self.ways = ranks, skew_ns, ways
        self.device = device
        self.rng = random.Random(seed)  # the same draws on every rank
        unit = sources.source("norm_alone", ranks.size, sources.Target.of(device.kernels, device.capabilities))
        text = KernelSource("stress", KERNELS, unit.headers, unit.defines)
        self.kernels = device.kernels.load(text, ENTRIES)
        where = device.device.torch_device
        self.turns = [torch.zeros(1, dtype=torch.int32, device=where) for _ in ranks.here]
        self.counts = [torch.zeros(2, dtype=torch.int64, device=where) for _ in ranks.here]
        self.memory = [
            [torch.zeros(2, LARGEST, dtype=torch.uint8, device=where) for _ in range(CALLS_A_GRAPH)] for _ in ranks.here
        ]
        self.made = 0
        device.device.synchronize()  # the zeros are written on another stream than the calls

    def step(self, *, broadcast: bool = False) -> Step:
        rng, size = self.rng, self.ranks.size
        if broadcast:
            root = rng.randrange(size)
            call = Call(Kind.BROADCAST, rng.choice(SIZES), "bfloat16", root=root)
            return Step(call, rng.choice([way for way in self.ways if way in BROADCAST_WAYS]), root, root + 1)
        choice, nbytes = rng.choice(self.ways), rng.choice(SIZES)
        if rng.random() < 0.5:  # grids vary between calls of one channel
            choice = replace(choice, blocks=rng.choice((1, 2, 5, 8)), threads=rng.choice((32, 128, 256)))
        if choice.wire is not Wire.WORDS and rng.random() < 0.3:
            nbytes = LARGEST - 16 * rng.randrange(100)
        return Step(Call(Kind.ALL_REDUCE, nbytes, rng.choice(DTYPES)), choice, 0, size)

    def run(self, at: int, steps: Sequence[Step]) -> None:
        """Messages, then the calls back to back (so that their edges are dependent launches), then the checks."""
        rank = self.ranks.here[at]
        turns, counts = self.turns[at].data_ptr(), self.counts[at].data_ptr()
        where = [
            (self.memory[at][k][0, : s.call.nbytes], self.memory[at][k][1, : s.call.nbytes])
            for k, s in enumerate(steps)
        ]
        for k, (step, (source, out)) in enumerate(zip(steps, where, strict=True)):
            dtype = DTYPES.index(step.call.dtype)
            words = step.call.nbytes // 4
            self._queue(rank, "stress_fill", source.data_ptr(), out.data_ptr(), words, turns, k, rank.rank, dtype)
        self._queue(rank, "stress_late", turns, rank.rank, self.skew_ns, blocks=1)
        for step, (source, out) in zip(steps, where, strict=True):
            rank.launch(step.call, step.choice, Operands(source, out))
        for k, (step, (_, out)) in enumerate(zip(steps, where, strict=True)):
            tail = (step.first, step.last, DTYPES.index(step.call.dtype), counts)
            self._queue(rank, "stress_check", out.data_ptr(), step.call.nbytes // 4, turns, k, *tail)
        self._queue(rank, "stress_turn", turns, len(steps), blocks=1)

    def _queue(self, rank: Rank, name: str, *arguments: int, blocks: int = 8) -> None:
        threads = 1 if blocks == 1 else 256
        self.device.kernels.launch(self.kernels[name], blocks, threads, arguments, stream=rank.stream)

    def everywhere(self, steps: Sequence[Step]) -> None:
        for at in range(len(self.ranks.here)):
            self.run(at, steps)
        self.made += len(steps)

    def churn(self, calls: int) -> None:
        """At least ``calls`` calls of every rank: graphs in random order, eager ones between; ends early on a fault."""
        device, rng, ranks = self.device.device, self.rng, self.ranks
        mixes = [[self.step() for _ in range(CALLS_A_GRAPH)] for _ in range(GRAPHS)]
        mixes += [[self.step()] for _ in range(3)]
        broadcasts = any(way in BROADCAST_WAYS for way in self.ways)
        mixes += [[self.step(broadcast=True) for _ in range(CALLS_A_GRAPH)]] if broadcasts else []
        self.everywhere(mixes[0])  # everything is loaded and warm before it is captured
        device.synchronize()
        graphs = [
            [rank.capture(lambda at=at, steps=steps: self.run(at, steps)) for at, rank in enumerate(ranks.here)]
            for steps in mixes
        ]
        ranks.meet()
        last = 0
        while self.made < calls:
            which = rng.randrange(len(graphs))
            for _ in range(rng.randrange(1, 6) if len(mixes[which]) == 1 else 1):
                for rank, graph in zip(ranks.here, graphs[which], strict=True):
                    with rank.stream:
                        graph.replay()
                self.made += len(mixes[which])
            if rng.random() < 0.05:
                broadcast = broadcasts and rng.random() < 0.2
                self.everywhere([self.step(broadcast=broadcast) for _ in range(rng.randrange(1, 4))])
            if self.made - last > 2000:  # bounds what is queued; says early what went wrong
                last = self.made
                device.synchronize()
                if any(rank.channel.error() for rank in ranks.here):
                    break
        device.synchronize()

    def found(self) -> list[dict[str, Any]]:
        """By rank of this process, what the device counted."""
        return [
            {
                "rank": rank.rank,
                "calls": self.made,
                "checked": int(self.counts[at][1]),
                "wrong_words": int(self.counts[at][0]),
                "error": str(rank.channel.error() or ""),
                "epoch": rank.channel.epoch(),
                "guards": self.ranks.guards_hold(),
            }
            for at, rank in enumerate(self.ranks.here)
        ]

    def good(self, found: Sequence[dict[str, Any]]) -> bool:
        """Whether every call of every rank was checked and none was wrong."""
        return all(
            not one["error"] and one["wrong_words"] == 0 and one["guards"] and one["checked"] == self.made
            for one in found
        )


def stress(arguments: argparse.Namespace) -> None:
    """One process's part; raises SystemExit(1) where anything was wrong."""
    device = backend()
    layout = lay_out(arguments.ranks, LARGEST)
    make: Any = virtual_ranks if arguments.virtual else process_ranks
    ranks: Ranks = make(device, layout, bound_ns=BOUND, first_epoch=arguments.first_epoch)
    mix = Stress(device, ranks, arguments.seed, arguments.skew_us * 1000)
    begin = time.monotonic()
    mix.churn(arguments.calls)
    took = time.monotonic() - begin
    found = [one for part in ranks.gather(mix.found()) for one in part]
    good = mix.good(found)
    if ranks.here[0].rank == 0:
        how = "virtual ranks on one GPU" if arguments.virtual else "one process a GPU"
        report = {"ranks": arguments.ranks, "how": how, "seconds": round(took, 1), "good": good, "by_rank": found}
        if arguments.json:
            print(json.dumps(report))
        else:
            print(f"{how}: {mix.made:,} calls of {arguments.ranks} ranks in {took:.1f} s")
            for one in found:
                print("  ", one)
            print("every result right" if good else "WRONG")
    if not good:
        raise SystemExit(1)


def main(given: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce_stress")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 6, 8))
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skew-us", type=int, default=20, help="most that a rank is held back, now and then")
    parser.add_argument("--first-epoch", type=lambda text: int(text, 0), default=0xFFFFFFF0)
    parser.add_argument("--virtual", action="store_true", help="ranks are streams of this process on one GPU")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("allreduce_stress needs a GPU; torch sees none here", file=sys.stderr)
        return 2
    if arguments.virtual:
        stress(arguments)
    elif torch.cuda.device_count() < arguments.ranks:
        print(
            f"allreduce_stress --ranks {arguments.ranks} needs as many GPUs, there are {torch.cuda.device_count()};"
            " --virtual runs the ranks as streams of one GPU",
            file=sys.stderr,
        )
        return 2
    else:
        start(arguments.ranks, stress, (arguments,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
