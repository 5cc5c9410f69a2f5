"""Dispatch and combine in graph replay: both, each, and what they cost with nothing to send.

    python -m benchmarks.exchange [--ranks N] [--tokens 1 128 4096] [--payload bf16 fp8] [--rounds 9] [--json]
    python -m benchmarks.exchange --virtual        ranks as streams of one GPU: what the protocol costs without a link
    python -m benchmarks.exchange --combine-units 1 2 4    combine with as many units a thread, side by side
    python -m benchmarks.exchange --tune           what can be chosen, measured here, and the row of the table it makes

Hidden size 4096, top 6 of 256 experts, random routing; microseconds a call, median of ``--rounds`` replays of a graph
of ``--calls`` calls, worst rank. *both* is dispatch then combine. *dispatch* is one with a combine of nothing behind,
less half of a pair of nothing; *combine* likewise, of slots that an earlier dispatch handed out. Sums are checked
before anything is timed. GB/s is what leaves a rank, against what a copy to the peer reaches in both directions at
once in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange_tuning import Search, row_of
from benchmarks.ranks import backend, start
from benchmarks.virtual_exchange import VirtualExchange
from halma.backends.simt.exchange import exchange_blocks
from halma.hal.backend import Backend
from halma.hal.collectives.exchange_contract import Layout
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_limits import COMBINE_UNITS
from halma.hal.collectives.exchange_tuning import TABLE, Key, Tuning, choose_tuning

TOKENS = (1, 8, 32, 128, 512, 1024, 4096)
TUNED_TOKENS = (8, 128, 1024, 4096)
PEAK_BYTES = 256 << 20
PEAK_COPIES = 8


class Case:
    """One number of tokens: inputs, slots and graphs of every rank of this process."""

    def __init__(self, lab: VirtualExchange, tokens: int, *, wide: bool) -> None:
        geometry = lab.geometry
        self.lab, self.tokens, self.bound = lab, tokens, tokens
        self.inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for one in lab.ranks:
            generator = torch.Generator(device="cuda").manual_seed(1000 * one.rank + tokens)
            x = torch.randn((tokens, geometry.hidden), generator=generator, device="cuda").bfloat16()
            noise = torch.rand((tokens, geometry.experts), generator=generator, device="cuda")
            ids = noise.argsort(1)[:, : geometry.top_k].contiguous()
            weights = torch.rand((tokens, geometry.top_k), generator=generator, device="cuda")
            self.inputs.append((x, ids, weights))
        slots, dtype = geometry.capacity(self.bound), torch.float32 if wide else torch.bfloat16
        self.parts = [torch.zeros((slots, geometry.hidden), dtype=dtype, device="cuda") for _ in lab.ranks]
        self.outs = [torch.empty((tokens, geometry.hidden), dtype=torch.float32, device="cuda") for _ in lab.ranks]
        self.empty = [(x[:0], ids[:0], weights[:0]) for x, ids, weights in self.inputs]
        self.nothing = [out[:0] for out in self.outs]
        self._check()
        self.kept: list[Layout] = [self._copy(one.rank) for one in lab.ranks]
        self.quiet: list[Layout] = [self._no_tokens(kept) for kept in self.kept]

    def _copy(self, rank: int) -> Layout:
        layout = self.lab.layout(rank, self.bound)
        return replace(layout, **{name: getattr(layout, name).clone() for name in ("slots", "tokens", "sources")})

    @staticmethod
    def _no_tokens(kept: Layout) -> Layout:
        return replace(kept, tokens=torch.zeros_like(kept.tokens))

    def _check(self) -> None:
        """Identity experts: sums are the weighted inputs, to the rounding of what travels."""
        for at, one in enumerate(self.lab.ranks):
            self.lab.dispatch(one.rank, *self.inputs[at], self.bound)
        self.lab.backend.device.synchronize()
        for at, one in enumerate(self.lab.ranks):
            layout, index = self.lab.layout(one.rank, self.bound), one.layout.index[: self.parts[at].shape[0]]
            safe = index.clamp_min(0).long()
            made = one.rows.view(torch.uint8)[safe].view(one.rows.dtype).float()  # fp8 has no indexing everywhere
            if one.scales is not None:
                scales = one.scales[safe]
                made = (made.view(made.shape[0], -1, 128) * scales.unsqueeze(-1)).view(made.shape)
            made *= layout.weights.unsqueeze(1)
            made[index < 0] = float("nan")
            self.parts[at].copy_(made)
        self.lab.backend.device.synchronize()
        self.lab.meet()
        for at, one in enumerate(self.lab.ranks):
            self.lab.combine(one.rank, self.parts[at], self.outs[at], self.bound)
        self.lab.backend.device.synchronize()
        errors = [error for error in self.lab.errors() if error is not None]
        if errors:
            raise RuntimeError(f"an exchange of {self.tokens} tokens ended in {errors}")
        for (x, _, weights), out in zip(self.inputs, self.outs, strict=True):
            wanted = x.float() * weights.sum(1, keepdim=True)
            if not torch.allclose(out, wanted, rtol=0.1, atol=0.2):
                raise RuntimeError(f"wrong sums of {self.tokens} tokens: {(out - wanted).abs().max().item()}")

    # -- programs, one call of a rank each -------------------------------------------------------------

    def both(self, at: int) -> None:
        rank = self.lab.ranks[at].rank
        self.lab.dispatch(rank, *self.inputs[at], self.bound)
        self.lab.combine(rank, self.parts[at], self.outs[at], self.bound)

    def dispatch_alone(self, at: int) -> None:
        rank = self.lab.ranks[at].rank
        self.lab.dispatch(rank, *self.inputs[at], self.bound)
        self.lab.combine(rank, self.parts[at], self.nothing[at], self.bound, self.quiet[at])

    def combine_alone(self, at: int) -> None:
        rank = self.lab.ranks[at].rank
        self.lab.dispatch(rank, *self.empty[at], self.bound)
        self.lab.combine(rank, self.parts[at], self.outs[at], self.bound, self.kept[at])

    def pair_of_nothing(self, at: int) -> None:
        rank = self.lab.ranks[at].rank
        self.lab.dispatch(rank, *self.empty[at], self.bound)
        self.lab.combine(rank, self.parts[at], self.nothing[at], self.bound, self.quiet[at])

    def sent(self) -> tuple[int, int]:
        """Bytes that leave the first rank of this process: in a dispatch and in a combine."""
        geometry, rank = self.lab.geometry, self.lab.ranks[0].rank
        _, ids, _ = self.inputs[0]
        rows = 0
        for peer in range(geometry.ranks):
            here = (ids >= geometry.first(peer)) & (ids < geometry.first(peer + 1))
            rows += 0 if peer == rank else int(here.any(1).sum())
        others = geometry.ranks - 1
        choices = others * self.tokens * geometry.top_k * geometry.choice_bytes
        slots = self.kept[0].slots.view(geometry.ranks, geometry.max_tokens, -1)[:, : self.tokens]
        returned = (slots >= 0).any(2).sum(1)
        returned[rank] = 0
        return rows * (geometry.row_bytes + 4 * geometry.groups) + choices, int(returned.sum()) * geometry.back_bytes


def timed(lab: VirtualExchange, program: Callable[[int], None], calls: int, rounds: int) -> tuple[float, float]:
    """(us a call, half of the spread between the quartiles) of a graph of ``calls`` calls; worst rank."""

    def many(at: int) -> None:
        for _ in range(calls):
            program(at)

    graphs = [rank.capture(lambda at=at: many(at)) for at, rank in enumerate(lab.ranks)]
    took: list[float] = []
    for turn in range(rounds + 2):
        torch.cuda.synchronize()
        lab.meet()
        marks: list[Any] = []
        for at, rank in enumerate(lab.ranks):
            with rank.stream:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graphs[at].replay()
                end.record()
                marks.append((begin, end))
        torch.cuda.synchronize()
        if turn >= 2:
            took.append(max(begin.elapsed_time(end) for begin, end in marks) * 1000 / calls)
    quartiles = statistics.quantiles(took, n=4) if len(took) > 1 else (took[0],) * 3
    lab.meet()
    return max(lab.gather(statistics.median(took))), max(lab.gather((quartiles[2] - quartiles[0]) / 2))


def peak(lab: VirtualExchange) -> float:
    """GB/s of a copy into the next rank's memory while every rank copies; 0 where there is no link."""
    if lab.virtual:
        return 0.0
    rank, size = lab.ranks[0].rank, lab.geometry.ranks
    own, handle = lab.backend.memory.exportable(PEAK_BYTES)
    handles = lab.gather(handle)
    peer = lab.backend.memory.open(handles[(rank + 1) % size])
    source = torch.empty(PEAK_BYTES, dtype=torch.uint8, device="cuda").fill_(rank)
    best: list[float] = []
    for _ in range(3):
        torch.cuda.synchronize()
        lab.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PEAK_COPIES):
            peer.tensor.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best.append(PEAK_COPIES * PEAK_BYTES / begin.elapsed_time(end) / 1e6)
    rate = min(lab.gather(max(best)))
    lab.meet()
    peer.close()
    lab.meet()
    own.close()
    return rate


def key_here(device: Backend, ranks: int) -> Key:
    """Of ranks of this machine."""
    return Key(1, ranks, str(device.device.properties().get("arch", "")))


def tunings(arguments: argparse.Namespace, device: Backend, geometry: Geometry) -> list[Tuning]:
    """The launch numbers to measure: those that an exchange would have, or the arguments' own."""
    blocks = most_blocks(arguments, device)
    chosen = choose_tuning(key_here(device, arguments.ranks), geometry, blocks, {} if arguments.virtual else TABLE)
    if arguments.blocks:
        chosen = replace(chosen, blocks=arguments.blocks, parts=arguments.parts, warps=arguments.warps)
    return [replace(chosen, units=units) for units in arguments.combine_units or [chosen.units]]


def most_blocks(arguments: argparse.Namespace, device: Backend) -> int:
    """Of a rank's grid; ranks that are streams share the device."""
    shared = arguments.ranks if arguments.virtual else 1
    return max(2, exchange_blocks(arguments.ranks, device.capabilities) // shared)


def measure(arguments: argparse.Namespace) -> None:
    """All rows, on the ranks of this process; rank 0 prints."""
    rows: list[dict[str, Any]] = []
    link, device = 0.0, backend()
    for payload in arguments.payload:
        geometry = geometry_of(arguments, payload)
        for tuning in tunings(arguments, device, geometry):
            lab = VirtualExchange(device, geometry, tuning=tuning, processes=not arguments.virtual)
            link = link or peak(lab)
            rows += [measured(arguments, lab, tokens) for tokens in arguments.tokens]
            lab.close()
    if arguments.virtual or dist.get_rank() == 0:
        show(arguments, rows, link)


def geometry_of(arguments: argparse.Namespace, payload: str) -> Geometry:
    """For the largest number of tokens."""
    most = max(arguments.tokens)
    return Geometry(arguments.ranks, most, arguments.hidden, arguments.top_k, arguments.experts, payload)


def measured(arguments: argparse.Namespace, lab: VirtualExchange, tokens: int) -> dict[str, Any]:
    """One row."""
    case = Case(lab, tokens, wide=arguments.wide_parts)
    nothing, _ = timed(lab, case.pair_of_nothing, arguments.calls, arguments.rounds)
    both, spread = timed(lab, case.both, arguments.calls, arguments.rounds)
    out, _ = timed(lab, case.dispatch_alone, arguments.calls, arguments.rounds)
    back, _ = timed(lab, case.combine_alone, arguments.calls, arguments.rounds)
    sent, payload = case.sent(), lab.geometry.payload
    times = {"both": both, "dispatch": out - nothing / 2, "combine": back - nothing / 2, "nothing": nothing}
    rates = {
        "both": sum(sent) / both / 1e3,
        "dispatch": sent[0] / times["dispatch"] / 1e3,
        "combine": sent[1] / times["combine"] / 1e3,
    }
    errors = [error for error in lab.errors() if error is not None]
    if errors or not lab.guards_hold():
        raise RuntimeError(f"{payload}, {tokens} tokens: {errors}, guards {lab.guards_hold()}")
    found = {"payload": payload, "units": lab.tuning.units, "tokens": tokens, "source": lab.tuning.source}
    return {**found, "us": times, "spread": spread, "GB/s": rates, "sent": sent}


def tune(arguments: argparse.Namespace) -> None:
    """Search launch numbers for the first payload; rank 0 prints every trial, and the row that the best makes."""
    device = backend()
    geometry, key = geometry_of(arguments, arguments.payload[0]), key_here(device, arguments.ranks)

    def both(tuning: Tuning) -> dict[int, float]:
        lab = VirtualExchange(device, geometry, tuning=tuning, processes=not arguments.virtual)
        cases = {tokens: Case(lab, tokens, wide=arguments.wide_parts) for tokens in arguments.tokens}
        found = {tokens: timed(lab, one.both, arguments.calls, arguments.rounds)[0] for tokens, one in cases.items()}
        cases.clear()
        lab.close()
        return found

    search = Search(key, geometry, most_blocks(arguments, device), both)
    best = search.run()
    if not arguments.virtual and dist.get_rank() != 0:
        return
    for trial in search.trials:
        one, us = trial.tuning, ", ".join(f"{tokens}: {took:.2f}" for tokens, took in trial.us.items())
        numbers = f"blocks {one.blocks:3d} parts {one.parts} warps {one.warps:4d} units {one.units}"
        print(f"{numbers}: {trial.ratio:.3f}  {us}")
    print(row_of(key, best, time.strftime("%Y-%m-%d"), torch.cuda.get_device_name(0)))
    if arguments.virtual:
        print("ranks are streams of one GPU: no row for the table, which is of links")


def show(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], link: float) -> None:
    """One object, or a table."""
    how = "virtual ranks on one GPU: no link between them" if arguments.virtual else "one process a GPU"
    head = {
        "ranks": arguments.ranks,
        "how": how,
        "hidden": arguments.hidden,
        "top_k": arguments.top_k,
        "experts": arguments.experts,
        "parts": "float32" if arguments.wide_parts else "bfloat16",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "peak GB/s": round(link, 1),
    }
    if arguments.json:
        print(json.dumps({**head, "rows": rows}))
        return
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    names = ("both", "dispatch", "combine", "nothing")
    columns = "".join(f"{name:>11s}" for name in names)
    print(f"{'payload':8s}{'units':>6s}{'tokens':>8s}{columns}  +-      GB/s both, out, back  % of peak")
    for row in rows:
        times = "".join(f"{row['us'][name]:>11.2f}" for name in names)
        rates = " ".join(f"{rate:>7.1f}" for rate in row["GB/s"].values())
        share = f"{100 * row['GB/s']['both'] / link:>6.1f}" if link else "     -"
        print(f"{row['payload']:8s}{row['units']:>6d}{row['tokens']:>8d}{times}  {row['spread']:<6.2f}{rates}  {share}")


def main(given: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 6, 8), default=2)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--payload", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wide-parts", action="store_true", help="experts' outputs in float32 instead of bfloat16")
    parser.add_argument("--blocks", type=int, default=0, help="launch numbers of your own, with --parts and --warps")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--warps", type=int, default=1024)
    parser.add_argument(
        "--combine-units", type=int, nargs="+", choices=COMBINE_UNITS, help="units a thread of combine; 1: as it was"
    )
    parser.add_argument("--tune", action="store_true", help="measure what can be chosen; prints a row of the table")
    parser.add_argument("--virtual", action="store_true", help="ranks as streams of one GPU")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(given)
    arguments.tokens = arguments.tokens or list(TUNED_TOKENS if arguments.tune else TOKENS)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < (1 if arguments.virtual else arguments.ranks):
        need = "a GPU" if arguments.virtual else f"{arguments.ranks} GPUs, one a rank"
        print(f"exchange needs {need}; torch sees {there}. --virtual measures on one GPU", file=sys.stderr)
        return 2
    work = tune if arguments.tune else measure
    if arguments.virtual:
        work(arguments)
    else:
        start(arguments.ranks, work, (arguments,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
