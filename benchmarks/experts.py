"""What the routed experts of one V4-Flash layer cost on one GPU, by route and format, beside torch's grouped products.

    python -m benchmarks.experts [--tokens 1x3 1x6 8 64 512 2048 8192] [--formats bf16 fp8 fp4] [--routes simt ...]
        [--stages] [--rounds 9] [--json] [--output FILE]

128 of 256 experts are here, D = 4096, I = 2048, top-6 of uniform routing; ``1xN`` is one token with exactly N experts
here. Ten routings in turn inside one graph, so that the L2 holds nothing of the next; medians over replays.

    chain    expert_layout, grouped_ffn on bf16 rows, expert_sum
    grouped  grouped_ffn alone: on an e4m3 payload with its scales, on bf16 rows for bf16 weights
    fused    expert_ffn, for one token (all its ids are experts here)
    torch    torch._grouped_mm, its two products alone, bf16

Bytes are those of the weights touched, each once; the bandwidth that they are compared with is that of a sum over
4 GiB in the same run. ``error`` is the root mean square against the reference route, relative, up to 8 tokens.
``--stages`` times every launch of grouped_ffn in a graph of its own (no overlap, weights as cold as in the whole): of
the routes ``simt_many`` that are asked for, else of ``simt``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import halma
from halma.hal.dispatch import Ops, table
from halma.hal.registry import default_registry
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.quant import scaled
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, Weight

EXPERTS, LOCAL, WIDTH, INNER, CHOICES, LIMIT = 256, 128, 4096, 2048, 6, 10.0
ROUTINGS = 10
FORMATS = {"bf16": "plain", "fp8": FP8_BLOCK128, "fp4": FP4_BLOCK32}
Program = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds a call, averaged over routings."""

    tokens: str
    format: str
    route: str
    what: str
    us: float
    tb_s: float
    percent: float
    tflop_s: float
    rows: float
    experts: float
    error: float | None


def stack(format: str, rows: int, columns: int, device: torch.device, seed: int) -> Weight:
    """[LOCAL, rows, columns] of random values such that a product keeps the size of its input."""
    random = torch.Generator(device).manual_seed(seed)
    shape = (LOCAL, rows, columns)
    if format == "plain":
        data = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for one in data:
            one.copy_(torch.randn(rows, columns, generator=random, device=device).mul_(columns**-0.5))
        return Weight(data)
    low = 127 - {FP8_BLOCK128: 13, FP4_BLOCK32: 8}[format]
    scales = Weight.scale_shape(shape, format)
    scale = torch.randint(low, low + 2, scales, generator=random, device=device, dtype=torch.uint8)
    if format == FP8_BLOCK128:
        data = torch.randint(0, 254, shape, generator=random, device=device, dtype=torch.uint8)
        data = data.add_(data >= 127).view(torch.float8_e4m3fn)
    else:
        data = torch.randint(0, 256, (LOCAL, rows, columns // 2), generator=random, device=device, dtype=torch.uint8)
    return Weight(data, scale.view(torch.float8_e8m0fnu), format, "fp8")


def routing(label: str, number: int, device: torch.device) -> torch.Tensor:
    """ids [M, 6] int64 of one routing."""
    random = torch.Generator().manual_seed(number)
    tokens, _, local = label.partition("x")
    if local:
        here = torch.randperm(LOCAL, generator=random)[: int(local)]
        away = LOCAL + torch.randperm(EXPERTS - LOCAL, generator=random)[: CHOICES - int(local)]
        return torch.cat((here, away)).unsqueeze(0).to(device)
    chosen = torch.rand(int(tokens), EXPERTS, generator=random).topk(CHOICES, 1).indices
    return chosen.to(device)


def timed(programs: Sequence[Program], rounds: int, calls: int = 50) -> float:
    """Microseconds a call of ``programs`` in turn, in one graph of about ``calls`` calls."""
    turns = max(1, calls // len(programs))
    for program in programs:
        program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for program in programs:
                program()
    found: list[float] = []
    graph.replay()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / (turns * len(programs)))
    return statistics.median(found)


def read_bandwidth(device: torch.device) -> float:
    """TB/s of a sum over 4 GiB."""
    values = torch.ones(1 << 30, dtype=torch.float32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    return values.nbytes / timed([lambda: torch.sum(values, 0, out=out)], 9, 5) / 1e6


class Bench:
    """The weights of one format and what is measured with them."""

    def __init__(self, label: str, device: torch.device, bandwidth: float, rounds: int) -> None:
        self.label, self.device, self.bandwidth, self.rounds = label, device, bandwidth, rounds
        self.gate_up = stack(FORMATS[label], 2 * INNER, WIDTH, device, 1)
        self.down = stack(FORMATS[label], WIDTH, INNER, device, 2)

    def row(
        self, tokens: str, route: str, what: str, us: float, ids: Sequence[torch.Tensor], error: float | None
    ) -> Row:
        rows = statistics.mean(int((one < LOCAL).sum()) for one in ids)
        experts = statistics.mean(len(one[one < LOCAL].unique()) for one in ids)
        rate = experts * (self.gate_up.nbytes + self.down.nbytes) / LOCAL / us / 1e6
        flop = rows * 6 * WIDTH * INNER / us / 1e6
        return Row(tokens, self.label, route, what, us, rate, 100 * rate / self.bandwidth, flop, rows, experts, error)

    def inputs(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator(self.device).manual_seed(7)
        x = torch.randn(ids.shape[0], WIDTH, generator=random, device=self.device).bfloat16()
        return x, torch.rand(ids.shape, generator=random, device=self.device) + 0.1

    def chain(self, ops: Ops, ids: torch.Tensor) -> Program:
        x, weights = self.inputs(ids)

        def run() -> torch.Tensor:
            ops.workspace.start()
            index, given, counts, offsets, slots = ops.expert_layout(ids, weights, 0, LOCAL, 1)
            parts = ops.grouped_ffn(x, None, index, given, counts, offsets, self.gate_up, self.down, LIMIT)
            return ops.expert_sum(parts, slots)

        return run

    def grouped(self, ops: Ops, ids: torch.Tensor) -> Program:
        x, weights = self.inputs(ids)
        scales = None
        layout = [one.clone() for one in Ops(Workspace(self.device), backend=ops.backend).expert_layout(
            ids, weights, 0, LOCAL, 1)]  # fmt: skip
        if self.gate_up.activation:
            values, scales = scaled(x, 128, 448.0, 1e-4, Workspace(self.device))
            x, scales = values.to(torch.float8_e4m3fn), scales.clone()

        def run() -> torch.Tensor:
            ops.workspace.start()
            return ops.grouped_ffn(x, scales, *layout[:4], self.gate_up, self.down, LIMIT)

        return run

    def fused(self, ops: Ops, ids: torch.Tensor) -> Program:
        ids = ids[:, ids[0] < LOCAL].contiguous()
        x, weights = self.inputs(ids)

        def run() -> torch.Tensor:
            ops.workspace.start()
            return ops.expert_ffn(x, ids, weights, self.gate_up, self.down, LIMIT)

        return run

    def measure(self, tokens: str, routes: Sequence[str]) -> list[Row]:
        found: list[Row] = []
        ids = [routing(tokens, number, self.device) for number in range(ROUTINGS)]
        calls = 50 if ids[0].shape[0] <= 512 else 10
        kinds: dict[str, Callable[[Ops, torch.Tensor], Program]] = {"chain": self.chain, "grouped": self.grouped}
        if ids[0].shape[0] == 1:
            kinds["fused"] = self.fused
        for route in routes:
            for what, make in kinds.items():
                choice = {"expert_ffn" if what == "fused" else "grouped_ffn": route}
                try:
                    ops = Ops(Workspace(self.device), backend="cuda", routes=choice)
                    programs = [make(ops, one) for one in ids]
                    error = self.error(make, ids[0], programs[0]) if ids[0].shape[0] <= 8 else None
                    us = timed(programs, self.rounds, calls)
                except halma.hal.errors.DispatchError as refused:
                    print(f"{tokens} {self.label} {route} {what}: {refused.found}")
                    continue
                found.append(self.row(tokens, route, what, us, ids, error))
                print(shown(found[-1]), flush=True)
        if self.label == "bf16":
            us = timed([self.torch_products(one) for one in ids], self.rounds, calls)
            found.append(self.row(tokens, "torch", "grouped_mm", us, ids, None))
            print(shown(found[-1]), flush=True)
        return found

    def error(self, make: Callable[[Ops, torch.Tensor], Program], ids: torch.Tensor, program: Program) -> float:
        """Of the first routing: of its tokens, or of its slots, which are the first ones where nothing is aligned."""
        reference = Ops(Workspace(self.device), backend="cuda", routes={
            "grouped_ffn": "reference", "expert_ffn": "reference"})  # fmt: skip
        here = int((ids < LOCAL).sum())
        wanted = make(reference, ids)().double()
        got = program().double()
        if make == self.grouped:
            wanted, got = wanted[:here], got[:here]
        return float(((got - wanted).square().mean() / wanted.square().mean()).sqrt())

    def torch_products(self, ids: torch.Tensor) -> Program:
        local = ids[ids < LOCAL]
        offsets = torch.bincount(local, minlength=LOCAL).cumsum(0).to(torch.int32)
        rows = int(local.numel())
        x = torch.randn(rows, WIDTH, device=self.device).bfloat16()
        h = torch.randn(rows, INNER, device=self.device).bfloat16()
        up, down = self.gate_up.data.transpose(1, 2), self.down.data.transpose(1, 2)

        def run() -> None:
            torch._grouped_mm(x, up, offs=offsets)
            torch._grouped_mm(h, down, offs=offsets)

        return run

    def stages(self, tokens: str, tiling: str | None) -> list[Row]:
        """Each launch of grouped_ffn alone."""
        from halma.backends.simt.experts import Products, kernels_of

        ids = [routing(tokens, number, self.device) for number in range(ROUTINGS)]
        lists: list[list[Program]] = []
        for one in ids:
            x, weights = self.inputs(one)
            _, given, counts, offsets, _ = layout = [
                t.clone() for t in Ops(Workspace(self.device), backend="cuda").expert_layout(one, weights, 0, LOCAL, 1)
            ]
            scales = None
            if self.gate_up.activation:
                values, scales = scaled(x, 128, 448.0, 1e-4, Workspace(self.device))
                x, scales = values.to(torch.float8_e4m3fn), scales.clone()
            out = torch.empty(given.shape[0], WIDTH, device=self.device)
            if tiling is not None and tiling.startswith("simt_many"):
                from halma.backends.simt import many_experts

                most = int(tiling.removeprefix("simt_many").strip("_") or 0) or None
                lists.append(many_experts.many_launches(
                    many_experts.kernels_of("cuda"), most, x, scales, *layout[:4], self.gate_up, self.down, LIMIT, None,
                    out, Workspace(self.device)))  # fmt: skip
                continue
            products = Products(kernels_of("cuda"), tiling, self.gate_up, self.down, None, given.shape[0])
            lists.append(products.launches(
                x, scales, layout[0], given, counts, offsets, LIMIT, out, Workspace(self.device)))  # fmt: skip
        found: list[Row] = []
        for number in range(len(lists[0])):
            us = timed([one[number] for one in lists], self.rounds)
            row = self.row(tokens, tiling or "simt", f"launch {number}", us, ids, None)
            found.append(row)
            print(shown(row), flush=True)
        return found


def shown(row: Row) -> str:
    error = "" if row.error is None else f"  error {row.error:.1e}"
    return (
        f"{row.tokens:>5} {row.format:>5} {row.route:>10} {row.what:<10} {row.us:9.2f} us  {row.tb_s:5.2f} TB/s"
        f"  {row.percent:5.1f} %  {row.tflop_s:7.1f} TFLOP/s  {row.rows:8.1f} rows {row.experts:6.1f} experts{error}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", default=["1x3", "1x6", "8", "64", "512", "2048", "8192"])
    parser.add_argument("--formats", nargs="+", default=["fp4", "fp8", "bf16"], choices=list(FORMATS))
    parser.add_argument("--routes", nargs="+", default=None, help="default: every fast route that is registered")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    backend = halma.backend("cuda")
    default_registry().load_routes()
    device = backend.device.torch_device
    routes = given.routes or [route.name for route in table.get("grouped_ffn").routes if "cuda" in route.backends]
    rows: list[Row] = []
    with torch.no_grad():
        bandwidth = read_bandwidth(device)
        print(f"{torch.cuda.get_device_name(device)}: {bandwidth:.2f} TB/s read")
        for label in given.formats:
            bench = Bench(label, device, bandwidth, given.rounds)
            for tokens in given.tokens:
                rows += bench.measure(tokens, routes)
                if given.stages:
                    many = [route for route in routes if route.startswith("simt_many") and label == "fp4"]
                    for tiling in many or [None]:
                        rows += bench.stages(tokens, tiling)
            del bench
            torch.cuda.empty_cache()
    record = {
        "schema": "halma.bench.experts/1",
        "evidence": backend.evidence,
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "read_tb_s": bandwidth,
        "rows": [asdict(row) for row in rows],
    }
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if given.json:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
