"""The Triton experts' launches one by one, by tiles: what the table of :mod:`halma.backends.triton.fitting` rests on.

    python -m benchmarks.triton_tiles [--tokens 8192 2048 512] [--formats fp4 fp8 bf16] [--check]
        [--tiles ROWS,SLOTS,PIECE,STAGES,WARPS,BLOCKS ...]

V4-Flash, 128 of 256 experts here, top-6 of uniform routing. Medians of eager launches, in microseconds and TFLOP/s of
the real rows. Without ``--tiles`` those that are known to fit. ``--check`` compares every tiling with the reference
route first, at a few tokens.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from halma.backends.triton import experts, products
from halma.backends.triton.fitting import CODES, Tiles, all_tiles
from halma.backends.triton.weights import operands
from halma.hal.dispatch import Ops
from halma.hal.workspace import Workspace
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight

LOCAL, ALL, WIDTH, INNER, CHOICES, LIMIT = 128, 256, 4096, 2048, 6, 10.0
FORMATS = {"bf16": PLAIN, "fp8": FP8_BLOCK128, "fp4": FP4_BLOCK32}
PACKED = (
    Tiles(128, 192, 64, 4, 8),
    Tiles(128, 256, 64, 3, 8),
    Tiles(256, 128, 32, 4, 8),
    Tiles(256, 64, 16, 4, 8),
    Tiles(128, 64, 16, 4, 4, 2),
)
MORE = {
    "bf16": (Tiles(256, 192, 64, 3, 8), Tiles(128, 256, 64, 4, 8), Tiles(128, 128, 32, 3, 4, 2)),
    "fp8": PACKED,
    "fp4": PACKED,
}
"""Beside the table's own: the other forms that compile without spilling in the inner loop."""


def stack(format: str, rows: int, columns: int, device: torch.device) -> Weight:
    """Random weights [LOCAL, rows, columns] that keep the size of what they multiply."""
    random = torch.Generator(device).manual_seed(rows + columns)
    shape = (LOCAL, rows, columns)
    if format == PLAIN:
        data = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for one in data:
            one.copy_(torch.randn(rows, columns, generator=random, device=device).mul_(columns**-0.5))
        return Weight(data)
    low = 127 - {FP8_BLOCK128: 13, FP4_BLOCK32: 8}[format]
    size = Weight.scale_shape(shape, format)
    scale = torch.randint(low, low + 2, size, generator=random, device=device, dtype=torch.uint8)
    columns = columns if format == FP8_BLOCK128 else columns // 2
    limit = 120 if format == FP8_BLOCK128 else 256
    data = torch.randint(0, limit, (LOCAL, rows, columns), generator=random, device=device, dtype=torch.uint8)
    data = data if format == FP4_BLOCK32 else data.view(torch.float8_e4m3fn)
    return Weight(data, scale.view(torch.float8_e8m0fnu), format, "fp8")


def timed(call: Callable[[], Any], rounds: int = 15) -> float:
    """Microseconds, median of eager launches."""
    found: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000)
    return statistics.median(found[3:])


class Item:
    """One item's rows, laid out and staged."""

    def __init__(self, tokens: int, gate_up: Weight, down: Weight, device: torch.device) -> None:
        random = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, ALL, generator=random).topk(CHOICES, 1).indices.to(device)
        self.weights = (torch.rand(tokens, CHOICES, generator=random) + 0.1).to(device)
        self.x = torch.randn(tokens, WIDTH, generator=random).bfloat16().to(device)
        self.gate_up, self.down, self.ws = gate_up, down, Workspace(device)
        self.layout = [one.clone() for one in Ops(self.ws).expert_layout(ids, self.weights, 0, LOCAL, 1)]
        capacity = self.layout[0].shape[0]
        self.real = int((self.layout[0] >= 0).sum())
        self.staged, self.stage = experts._staged(self.x, None, gate_up, self.ws)
        self.stage()
        self.hidden = torch.empty(capacity, INNER, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(capacity, WIDTH, device=device)
        self.wide = experts._wide_rows(self.out, down, self.ws) if down.activation is not None else self.hidden

    def launches(self, tiles: Tiles) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
        """The first product, the rounding, the second product."""
        grid = (experts.blocks_of(self.x.device, tiles),)
        first = experts.gate_up_options(self.gate_up, self.down, self.wide.stride(0), tiles)
        second = experts.down_options(self.down, tiles)
        index, given, counts, offsets, _ = self.layout
        up, down = operands(self.gate_up), operands(self.down)
        rounding = lambda: None  # noqa: E731
        if self.down.activation is not None:
            codes = CODES[self.down.format]
            rounding = experts._stage_launch(self.wide, None, self.hidden, codes, offsets[LOCAL:])
        return (
            lambda: products.gate_up_kernel[grid](
                self.staged, index, given, counts, offsets, *up, counts, self.wide, LIMIT, **first
            ),
            rounding,
            lambda: products.down_kernel[grid](self.hidden, counts, offsets, *down, counts, self.out, **second),
        )

    def check(self, tiles: Tiles) -> float:
        """Relative root mean square against the reference."""
        for launch in self.launches(tiles):
            launch()
        wanted = Ops(self.ws).grouped_ffn(self.x, None, *self.layout[:4], self.gate_up, self.down, LIMIT)[: self.real]
        apart = self.out[: self.real].double() - wanted.double()
        return float((apart.square().mean() / wanted.double().square().mean()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048, 512])
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["fp4"])
    parser.add_argument("--tiles", nargs="+", type=lambda text: Tiles(*map(int, text.split(","))))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda")
    for label in given.formats:
        gate_up, down = (stack(FORMATS[label], *size, device) for size in ((2 * INNER, WIDTH), (WIDTH, INNER)))
        candidates = given.tiles or list(dict.fromkeys((*all_tiles(FORMATS[label]), *MORE[label])))
        if given.check:
            few = Item(12, gate_up, down, device)
            for tiles in candidates:
                print(f"{label} {tiles} error {few.check(tiles):.1e}", flush=True)
        for tokens in given.tokens:
            item = Item(tokens, gate_up, down, device)
            print(f"{label} {tokens} tokens, {item.real} rows: staging {timed(item.stage):.0f} us", flush=True)
            for tiles in candidates:
                if tiles.slots < 64 <= item.real // LOCAL:
                    continue
                try:
                    up, between, low = (timed(launch) for launch in item.launches(tiles))
                except Exception as error:  # too much shared memory, too many registers: the next one
                    print(f"  {tiles}: {type(error).__name__} {str(error)[:100]}", flush=True)
                    continue
                rates = [item.real * 2 * WIDTH * INNER * each / us / 1e6 for each, us in ((2, up), (1, low))]
                every = up + between + low
                print(
                    f"  {tiles}: gate_up {up:7.0f} us {rates[0]:4.0f} TFLOP/s, rounding {between:4.0f}, down {low:7.0f}"
                    f" us {rates[1]:4.0f}, all {every:7.0f} us {item.real * 6 * WIDTH * INNER / every / 1e6:4.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
