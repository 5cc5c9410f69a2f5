"""Items through an FFN rank's experts: ladder, one worst-case graph, eager, and torch's grouped products, in one run.

    python -m benchmarks.ffn [--backend cuda] [--format fp4] [--layers 43] [--distinct 6]
        [--tokens 1 8 64 512 2048 8192] [--shared] [--rounds 9] [--by-layer] [--no-peer] [--json] [--output FILE]

By default one H200's part of V4-Flash: 128 experts here, D = 4096, I = 2048, top-6 of uniform routing, every choice an
expert here. ``--distinct`` layers have weights of their own, made on the device of a seed; the table of ``--layers``
layers repeats them, so no weight is found in a cache: each item is of another layer than the one before.

    ladder   FfnProgram.run: bucket, worst case or eager, by what was measured after capture
    bucket   a replay of the smallest bucket that holds the item
    worst    a replay of the largest bucket
    eager    the same program by the ops, on exactly the item's rows
    torch    torch._grouped_mm, its two products alone, bf16, rows sorted already: the peer

Microseconds an item, host and device together: a round makes as many items as take ``ROUND_SECONDS`` and waits once.
Arms alternate in every round; ``ladder/eager`` is the median of the rounds' ratios, with their quartiles.

Memory: what the ladder adds beyond the weights and beyond what an eager item of the largest size needs, by parts; a
program without graphs is prepared first, and its memory is given back.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import halma
from halma.hal.backend import Backend
from halma.hal.settings import GraphSwitch
from halma.models.deepseek_v4.ffn.items import Item, ItemBuffers, ItemSizes
from halma.models.deepseek_v4.ffn.ladder import Ladder, item_ladder
from halma.models.deepseek_v4.ffn.program import FfnOptions, FfnProgram
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight

FORMATS = {"bf16": PLAIN, "fp8": FP8_BLOCK128, "fp4": FP4_BLOCK32}
ROUND_SECONDS = 0.02
MOST_ITEMS = 200
LIMIT = 10.0
GIB = 1 << 30


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer."""

    gate_up: Weight
    down: Weight
    shared_gate_up: Weight | None
    shared_down: Weight | None


@dataclass(frozen=True)
class Row:
    """Microseconds an item of ``tokens``, medians; an arm that did not run is None."""

    tokens: int
    routed: int
    bucket: int
    way: str
    ladder: float
    replay: float
    worst: float
    eager: float
    torch: float | None
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """Bytes. ``added`` is what the driver's free memory says; the parts are counted by the session."""

    graphs: int
    eager_workspace: int
    ladder_workspace: int
    eager_pool: int
    ladder_pool: int
    executables: int
    eager_free_fell: int
    ladder_free_fell: int
    tables: int

    @property
    def added(self) -> int:
        """What the ladder takes beyond an eager item of the largest size."""
        counted = self.ladder_workspace - self.eager_workspace + self.ladder_pool - self.eager_pool + self.tables
        measured = self.ladder_free_fell - self.eager_free_fell
        return max(measured, counted + self.executables)


# -- what is measured -----------------------------------------------------------------------------------


def weights_of(sizes: ItemSizes, inner: int, format: str, distinct: int, backend: Backend) -> list[Layer]:
    """``sizes.layers`` layers, of which ``distinct`` have weights of their own; made on the device."""
    device = backend.device.torch_device
    generator = torch.Generator(device).manual_seed(11)

    def one(*shape: int) -> Weight:
        if format == PLAIN:
            dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
            data = torch.empty(shape, dtype=dtype, device=device)
            for part in data if len(shape) == 3 else [data]:
                part.copy_(torch.randn(part.shape, generator=generator, device=device).mul_(0.02))
            return Weight(data)
        scales = torch.randint(
            118, 121, Weight.scale_shape(shape, format), generator=generator, device=device, dtype=torch.uint8
        ).view(torch.float8_e8m0fnu)
        if format == FP4_BLOCK32:
            packed = (*shape[:-1], shape[-1] // 2)
            codes = torch.randint(0, 256, packed, generator=generator, device=device, dtype=torch.uint8)
            return Weight(codes, scales, format, "fp8")
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        for part in data if len(shape) == 3 else [data]:
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return Weight(data, scales, format, "fp8")

    width, experts = sizes.hidden, sizes.experts

    def layer() -> Layer:
        routed = one(experts, 2 * inner, width), one(experts, width, inner)
        return Layer(*routed, *((one(2 * inner, width), one(width, inner)) if sizes.max_shared else (None, None)))

    made = [layer() for _ in range(min(distinct, sizes.layers))]
    return [made[number % len(made)] for number in range(sizes.layers)]


def fill(buffers: ItemBuffers, tokens: int, seed: int) -> None:
    """An item of ``tokens`` with uniform routing, every choice here."""
    device = buffers.rows.device
    generator = torch.Generator(device).manual_seed(seed)
    sizes = buffers.sizes
    ids = torch.rand(tokens, sizes.experts, generator=generator, device=device).argsort(1)[:, : sizes.top_k]
    buffers.ids[:tokens].copy_(ids)
    buffers.rows[:tokens].copy_(torch.randn(tokens, sizes.hidden, generator=generator, device=device))
    buffers.weights[:tokens].copy_(torch.rand(tokens, sizes.top_k, generator=generator, device=device))


class Peer:
    """torch's grouped products on bf16 weights of two layers; ``why_not`` where they cannot run."""

    def __init__(self, sizes: ItemSizes, inner: int, backend: Backend, layers: Sequence[Layer]) -> None:
        self.why_not = ""
        self._backend = backend
        try:
            own = layers[0].gate_up.format == PLAIN and layers[0].gate_up.data.dtype is torch.bfloat16
            two = replace(sizes, layers=2, max_shared=0, every_row_shared=False)
            chosen = list(layers[:2]) if own else weights_of(two, inner, PLAIN, 2, backend)
            self._weights = [(one.gate_up.data.transpose(1, 2), one.down.data.transpose(1, 2)) for one in chosen]
            self.fill(torch.zeros(1, 1, dtype=torch.int64, device=backend.device.torch_device), sizes)
            self(0)
            backend.device.synchronize()
        except (RuntimeError, AttributeError, torch.OutOfMemoryError) as error:
            self.why_not = str(error).splitlines()[0]

    def fill(self, ids: torch.Tensor, sizes: ItemSizes) -> None:
        """Rows for the routing ``ids`` [n, k], and where each expert's end."""
        counts = torch.bincount(ids.view(-1), minlength=sizes.experts)
        self._offsets = counts.cumsum(0).to(torch.int32)
        make = {"dtype": torch.bfloat16, "device": ids.device}
        self._x = torch.randn(ids.numel(), sizes.hidden, **make)
        self._hidden = torch.randn(ids.numel(), self._weights[0][1].shape[1], **make)

    def __call__(self, turn: int) -> object:
        """Both products."""
        up, down = self._weights[turn % len(self._weights)]
        grouped: Any = torch._grouped_mm
        return grouped(self._x, up, offs=self._offsets), grouped(self._hidden, down, offs=self._offsets)


# -- time -----------------------------------------------------------------------------------------------


def paired(
    arms: dict[str, Callable[[int], object]], rounds: int, synchronize: Callable[[], None]
) -> list[dict[str, float]]:
    """Microseconds an item of each arm, round by round."""
    items: dict[str, int] = {}
    for name, arm in arms.items():
        arm(0)
        synchronize()
        begin = time.perf_counter()
        for turn in range(3):
            arm(turn)
        synchronize()
        took = max((time.perf_counter() - begin) / 3, 1e-7)
        items[name] = max(min(int(ROUND_SECONDS / took), MOST_ITEMS), 3)
    found: list[dict[str, float]] = []
    for number in range(rounds):
        times: dict[str, float] = {}
        names = list(arms) if number % 2 else list(reversed(arms))
        for name in names:
            synchronize()
            begin = time.perf_counter()
            for turn in range(items[name]):
                arms[name](turn)
            synchronize()
            times[name] = (time.perf_counter() - begin) / items[name] * 1e6
        found.append(times)
    return found


def measure(program: FfnProgram, peer: Peer | None, tokens: int, rounds: int) -> Row:
    """One size: a routing a half of the rounds."""
    sizes, k = program.sizes, program.sizes.top_k
    shared = min(tokens, sizes.max_shared)
    bucket = program.ladder.pick(tokens * k, shared)
    assert bucket is not None
    worst = program.ladder.buckets[-1]

    def item(turn: int) -> Item:
        return Item(turn % sizes.layers, tokens, shared)

    arms: dict[str, Callable[[int], object]] = {
        "ladder": lambda turn: program.run(item(turn)),
        "replay": lambda turn: program.replay_in(item(turn), bucket),
        "worst": lambda turn: program.replay_in(item(turn), worst),
        "eager": lambda turn: program.run_eagerly(item(turn)),
    }
    if peer is not None and not peer.why_not:
        arms["torch"] = peer
    times: list[dict[str, float]] = []
    for seed in (1, 2):
        fill(program.buffers, tokens, seed)
        if "torch" in arms and peer is not None:
            peer.fill(program.buffers.ids[:tokens], sizes)
        times += paired(arms, -(-rounds // 2), program.backend.device.synchronize)
    ratios = sorted(one["ladder"] / one["eager"] for one in times)
    low, _, high = statistics.quantiles(ratios, n=4)
    median = {name: statistics.median(one[name] for one in times) for name in arms}
    chosen = program.costs.choose(bucket.routed, tokens * k)
    return Row(
        tokens,
        tokens * k,
        bucket.routed,
        chosen or "unmeasured",
        median["ladder"],
        median["replay"],
        median["worst"],
        median["eager"],
        median.get("torch"),
        statistics.median(ratios),
        low,
        high,
    )


# -- memory ---------------------------------------------------------------------------------------------


def free_memory(backend: Backend) -> int:
    """Bytes that the driver has, once nothing is cached."""
    gc.collect()
    backend.device.synchronize()
    empty = getattr(getattr(torch, "accelerator", None), "empty_cache", None)
    if empty is not None and backend.device.torch_device.type != "cpu":
        empty()
    return backend.device.memory_info().free


def prepared(make: Callable[[GraphSwitch], FfnProgram], on: bool, backend: Backend) -> tuple[FfnProgram, int]:
    """A program that ran its largest item eagerly, and every graph once; by how much free memory fell."""
    before = free_memory(backend)
    program = make(GraphSwitch(on))
    program.prepare(measure=False)
    sizes = program.sizes
    fill(program.buffers, sizes.max_tokens, 0)
    program.run_eagerly(Item(0, sizes.max_tokens, sizes.max_shared))
    if on:
        for bucket in program.ladder.buckets:
            rows = bucket.routed // sizes.top_k
            program.replay_in(Item(0, rows, min(rows, sizes.max_shared)), bucket)
    return program, before - free_memory(backend)


def memory_of(make: Callable[[GraphSwitch], FfnProgram], backend: Backend) -> tuple[FfnProgram, Memory]:
    """The program with its ladder, and what the ladder added."""
    eager, eager_fell = prepared(make, False, backend)
    alone = eager.session.report()
    eager.close()
    del eager
    program, fell = prepared(make, True, backend)
    report = program.session.report()
    return program, Memory(
        report.captured,
        alone.workspace_bytes,
        report.workspace_bytes,
        alone.pool_bytes,
        report.pool_bytes,
        max(report.graph_bytes, report.free_fell),
        eager_fell,
        fell,
        16 * 4 * program.sizes.layers,
    )


# -- the table ------------------------------------------------------------------------------------------

HEAD = (
    f"{'tokens':>7}{'routed':>8}{'bucket':>8}  {'way':<11}{'ladder us':>10}{'bucket':>9}{'worst':>9}{'eager':>9}"
    f"{'torch':>9}{'ladder/eager':>14}{'quartiles':>16}"
)


def line(row: Row) -> str:
    """One size."""
    peer = f"{row.torch:>9.1f}" if row.torch is not None else f"{'-':>9}"
    return (
        f"{row.tokens:>7}{row.routed:>8}{row.bucket:>8}  {row.way:<11}{row.ladder:>10.1f}{row.replay:>9.1f}"
        f"{row.worst:>9.1f}{row.eager:>9.1f}{peer}{row.ratio:>14.3f}{f'{row.low:.3f} to {row.high:.3f}':>16}"
    )


def memory_lines(memory: Memory) -> str:
    """The parts, in MiB."""
    parts = {name: value / (1 << 20) for name, value in asdict(memory).items() if name != "graphs"}
    shown = "\n".join(f"  {name.replace('_', ' '):<18}{value:>12.3f} MiB" for name, value in parts.items())
    return f"the ladder adds {memory.added / GIB:.4f} GiB with {memory.graphs} graphs\n{shown}"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--format", choices=FORMATS, default="fp4")
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--distinct", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048, 8192])
    parser.add_argument("--max-tokens", type=int, help="the declared worst case; by default the largest of --tokens")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--alignment", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="with the shared expert")
    parser.add_argument("--by-layer", action="store_true", help="graphs of each layer's own")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reserve", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    return parser


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; prints as it goes."""
    backend = halma.backend(given.backend)
    most = given.max_tokens or max(given.tokens)
    sizes = ItemSizes(
        most,
        given.hidden,
        given.top_k,
        given.experts,
        given.layers,
        most if given.shared else 0,
        given.alignment,
        every_row_shared=given.shared,
    )
    layers = weights_of(sizes, given.inner, FORMATS[given.format], given.distinct, backend)
    device = backend.device.torch_device
    carrier = torch.float32 if device.type == "cpu" else torch.bfloat16
    ladder: Ladder = item_ladder(most, given.top_k, 1, given.experts, shared=given.shared)
    buffers = ItemBuffers(backend, sizes, carrier=carrier, acc=torch.float32)

    def make(switch: GraphSwitch) -> FfnProgram:
        options = FfnOptions(carrier, LIMIT, reserve=given.reserve, switch=switch, by_layer=given.by_layer)
        return FfnProgram(layers, backend, buffers, ladder, options)

    program, memory = memory_of(make, backend)
    print(memory_lines(memory), flush=True)
    program.measure_costs()
    why = program.by_layer or "one ladder for all layers"
    print(f"{given.format}, {given.layers} layers ({why}); headerless: {program.headerless}")
    peer = None if given.no_peer else Peer(sizes, given.inner, backend, layers)
    if peer is not None and peer.why_not:
        print(f"torch._grouped_mm: skipped: {peer.why_not}")
    print(HEAD)
    rows: list[Row] = []
    for tokens in given.tokens:
        rows.append(measure(program, peer, tokens, given.rounds))
        print(line(rows[-1]), flush=True)
    print(program.statistics)
    result = {
        "schema": "halma.benchmark.ffn/1",
        "evidence": backend.evidence,
        "torch": torch.__version__,
        "format": given.format,
        "sizes": asdict(sizes),
        "route": program.route,
        "buckets": [bucket.routed for bucket in ladder.buckets],
        "memory": {**asdict(memory), "added": memory.added},
        "headerless": program.headerless,
        "peer": "not asked for" if peer is None else peer.why_not or "torch._grouped_mm",
        "rows": [asdict(row) for row in rows],
        "statistics": program.statistics.as_json(),
    }
    program.close()
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    given = arguments().parse_args(argv)
    with torch.no_grad():
        result = run(given)
    if given.output:
        given.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if given.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
