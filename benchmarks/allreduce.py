"""All-reduce of small messages in graph replay: ours and the peers, in one run.

    python -m benchmarks.allreduce [--ranks N] [--calls 50 200] [--rounds 9] [--json] [--ours-only]
    python -m benchmarks.allreduce --virtual --ranks 2      ours alone, ranks as streams of one GPU

bf16, hidden size 4096; microseconds a call: median of ``--rounds`` replays, worst rank. One process a GPU, spawned here
or by torchrun. Everybody is measured in graphs, eagerly, and with ranks that enter late; a peer's last result is
checked. NCCL is measured twice, in processes of their own: with graph mixing off, which is the one to compare with, and
as it is, where adjacent calls in one graph cost about twice what they should. ``--virtual`` has no link between its
ranks: its figures show what the protocol costs, and are marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.allreduce_peers import Peer, peers
from benchmarks.ranks import Rank, Ranks, backend, process_ranks, start, virtual_ranks
from benchmarks.virtual_ranks import SECOND, lay_out
from halma.hal.collectives.contract import Algorithm, Call, Choice, Kind, Operands, StreamMix, Wire

HIDDEN = 4096
EPS = 1e-6
SIZES = tuple(kib << 10 for kib in (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384))
FUSED_SIZES = SIZES[:8]
MIXED_SIZES = SIZES[:4]
"""1, 2, 4 and 8 rows: more are not mixed in one call."""
WORDS = Choice(Algorithm.ONE_SHOT, Wire.WORDS)
SENTINEL = Choice(Algorithm.ONE_SHOT, Wire.SENTINEL)
TWO_SHOT = Choice(Algorithm.TWO_SHOT, Wire.CHUNKS)
STAGED = Choice(Algorithm.STAGED, Wire.FLAGS)
STAGED_TWO_SHOT = Choice(Algorithm.STAGED_TWO_SHOT, Wire.FLAGS)
SENTINEL_LARGEST, STAGED_LARGEST = 16 << 20, 256 << 10
BOUND = 5 * SECOND
EAGER, SKEWED = "eager", "skewed by 0 to 4 us, delays included"
SKEW_CYCLES = 8000
"""About 4 us: the most that a rank is late, in the row of skewed calls."""


def choice_for(nbytes: int, *, staged: bool = False) -> Choice:
    """The fastest way at two ranks over NVLink: a sentinel, at every size that its lane holds."""
    if staged:
        return STAGED if nbytes <= STAGED_LARGEST else STAGED_TWO_SHOT
    return SENTINEL if nbytes <= SENTINEL_LARGEST else TWO_SHOT


class Bench:
    """Times programs on the ranks of this process."""

    def __init__(self, ranks: Ranks, rounds: int) -> None:
        self.ranks, self.rounds = ranks, rounds

    def graph(self, program: Callable[[int], None], calls: int, settle: Callable[[], None] | None = None) -> float:
        """us a call of ``calls`` times ``program(at)`` in one graph a rank; worst rank, everywhere the same.

        ``settle``: what comes between a capture and its first replay.
        """
        graphs = [rank.capture(lambda at=at: _times(program, at, calls)) for at, rank in enumerate(self.ranks.here)]
        if settle is not None:
            settle()
        return self._timed(lambda at: graphs[at].replay(), calls)

    def eager(self, program: Callable[[int], None], calls: int) -> float:
        """The same without a graph: what the host can issue, where that is slower."""
        return self._timed(lambda at: _times(program, at, calls), calls)

    def _timed(self, work: Callable[[int], Any], calls: int) -> float:
        took: list[float] = []
        for turn in range(self.rounds + 2):
            torch.cuda.synchronize()
            self.ranks.meet()
            marks = []
            for at, rank in enumerate(self.ranks.here):
                with rank.stream:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    work(at)
                    end.record()
                    marks.append((begin, end))
            torch.cuda.synchronize()
            if turn >= 2:
                took.append(max(begin.elapsed_time(end) for begin, end in marks) * 1000 / calls)
        return max(self.ranks.gather(statistics.median(took)))


def _times(program: Callable[[int], None], at: int, calls: int) -> None:
    for _ in range(calls):
        program(at)


def ours(ranks: Ranks, nbytes: int, choice: Choice) -> Callable[[int], None]:
    """One call of ours; the result is checked once, before it is timed."""
    count = nbytes // 2
    sources = [torch.full((count,), 1.0 + rank.rank, device="cuda").bfloat16() for rank in ranks.here]
    outs = [torch.full((count,), float("nan"), device="cuda").bfloat16() for _ in ranks.here]
    call = Call(Kind.ALL_REDUCE, nbytes, "bfloat16")

    def program(at: int) -> None:
        ranks.here[at].launch(call, choice, Operands(sources[at], outs[at]))

    _check(ranks, program, outs, ranks.size * (ranks.size + 1) / 2)
    return program


def ours_fused(ranks: Ranks, nbytes: int, choice: Choice) -> Callable[[int], None]:
    """One fused call of ours, with residual and norm out of place."""
    rows = nbytes // (2 * HIDDEN)

    def filled(value: float) -> list[torch.Tensor]:
        return [torch.full((rows, HIDDEN), value, device="cuda").bfloat16() for _ in ranks.here]

    sources, residuals, outs, norms = filled(1), filled(2), filled(float("nan")), filled(float("nan"))
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    call = Call(Kind.ALL_REDUCE_NORM, nbytes, "bfloat16", detail=f"row {HIDDEN} eps {EPS}")

    def program(at: int) -> None:
        tensors = Operands(sources[at], outs[at], residuals[at], weight, norms[at], None, EPS, HIDDEN)
        ranks.here[at].launch(call, choice, tensors)

    _check(ranks, program, outs, ranks.size + 2)
    _check(ranks, program, norms, 1.0)
    return program


def ours_mixed(ranks: Ranks, nbytes: int, choice: Choice) -> Callable[[int], None]:
    """One sublayer boundary (mHC-post, pre, norm) of ours, in place on the streams. With fn and base zero, scales zero
    and a sum of zero it leaves streams of one as they are, call after call, and the norm is one."""
    rows = nbytes // (2 * HIDDEN)

    def filled(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float32, device="cuda")

    def halves(value: float, *shape: int) -> list[torch.Tensor]:
        return [filled(value, *shape).bfloat16() for _ in ranks.here]

    sources, streams, norms = halves(0, rows, HIDDEN), halves(1, rows, 4, HIDDEN), halves(float("nan"), rows, HIDDEN)
    mixes = [filled(0, rows, 20) for _ in ranks.here]
    base, scale, fn, weight = filled(0, 24), filled(0, 3), filled(0, 24, 4 * HIDDEN), filled(1, HIDDEN)
    call = Call(Kind.ALL_REDUCE_STREAMS, nbytes, "bfloat16", detail=f"row {HIDDEN} eps {EPS}", row_length=HIDDEN)

    def program(at: int) -> None:
        mix = StreamMix(streams[at], mixes[at], base, scale, fn, base, scale, EPS, 20)
        tensors = Operands(
            sources[at], streams[at], weight=weight, norm_out=norms[at], eps=EPS, row_length=HIDDEN, mix=mix
        )
        ranks.here[at].launch(call, choice, tensors)

    _check(ranks, program, norms, 1.0)
    if not all(bool((one == 1.0).all()) for one in streams):
        raise SystemExit("wrong result: the streams changed")
    return program


def _check(ranks: Ranks, program: Callable[[int], None], outs: Sequence[torch.Tensor], value: float) -> None:
    for out in outs:
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    for at in range(len(ranks.here)):
        program(at)
    torch.cuda.synchronize()
    if not all(bool((out == value).all()) for out in outs):
        raise SystemExit(f"wrong result: {value} expected, {outs[0].flatten()[:4].tolist()} found")


def our_rows(ranks: Ranks, plain: Ranks, rounds: int, calls: int) -> dict[str, dict[int, float]]:
    """Rows of ours: name -> nbytes -> us. ``plain`` are the same ranks on a channel without dependent launch."""
    rows: dict[str, dict[int, float]] = {}

    def row(
        name: str,
        on: Ranks,
        sizes: Sequence[int],
        make: Callable[[Ranks, int], Callable[[int], None]],
        how: str = "graph",
    ) -> None:
        bench = Bench(on, rounds)
        measure = bench.graph if how == "graph" else bench.eager
        # 16 MiB a call in a graph of 200: a quarter of the calls say as much.
        rows[name] = {n: measure(make(on, n), calls if n <= 1 << 20 else max(calls // 4, 10)) for n in sizes}

    def push(on: Ranks, n: int) -> Callable[[int], None]:
        return ours(on, n, choice_for(n))

    def fused(on: Ranks, n: int) -> Callable[[int], None]:
        return ours_fused(on, n, choice_for(n))

    row("ours", ranks, SIZES, push)
    row("ours, flags in words", ranks, SIZES[:4], lambda on, n: ours(on, n, WORDS))
    row("ours, no dependent launch", plain, SIZES, push)
    row("ours, staged (as with unknown atomicity)", plain, SIZES, lambda on, n: ours(on, n, choice_for(n, staged=True)))
    row(f"ours, {EAGER}", ranks, SIZES[:8], push, "eager")
    row(f"ours, {SKEWED}", ranks, SIZES[:8], _skewed)
    row("delays alone", ranks, SIZES[:1], lambda on, n: _delays(on))
    row("ours, fused", ranks, FUSED_SIZES, fused)
    row("ours, fused, no dependent launch", plain, FUSED_SIZES, fused)
    row("ours, with mHC-post, pre and norm", ranks, MIXED_SIZES, lambda on, n: ours_mixed(on, n, SENTINEL))
    row("ours, with mHC, no dependent launch", plain, MIXED_SIZES, lambda on, n: ours_mixed(on, n, SENTINEL))
    return rows


def _delays(ranks: Ranks) -> Callable[[int], None]:
    counts = [0 for _ in ranks.here]

    def program(at: int) -> None:
        counts[at] += 1
        torch.cuda._sleep((counts[at] * 2654435761 + ranks.here[at].rank * 40503) % SKEW_CYCLES)

    return program


def _skewed(ranks: Ranks, nbytes: int) -> Callable[[int], None]:
    return _late(ranks, ours(ranks, nbytes, choice_for(nbytes)))


def _late(ranks: Ranks, call: Callable[[int], None]) -> Callable[[int], None]:
    delay = _delays(ranks)

    def program(at: int) -> None:
        delay(at)
        call(at)

    return program


def peer_rows(bench: Bench, calls: int, only: str | None) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Rows of the peers, and why others are missing."""
    rows: dict[str, dict[int, float]] = {}
    missing: dict[str, str] = {}
    for name, peer, reason in peers(HIDDEN):
        if peer is None:
            missing[name] = reason
            continue
        ways = [(name, "graph", SIZES), (f"{name}, {SKEWED}", "skewed", FUSED_SIZES)]
        ways += [(f"{name}, {EAGER}", "eager", FUSED_SIZES)] if peer.eager else []
        ways += [(f"{name}, fused", "fused", FUSED_SIZES)] if peer.fused is not None else []
        for title, way, sizes in ways:
            found = {n: _peer_figure(bench, peer, way, n, calls if n <= 1 << 20 else 10) for n in sizes}
            rows[title] = {n: us for n, us in found.items() if us is not None}
            wrong = [str(n) for n, us in found.items() if us is None]
            if wrong:
                missing[title] = f"its result is wrong at {', '.join(wrong)} bytes"
        if name == only:
            break
    return rows, missing


def _peer_figure(bench: Bench, peer: Peer, way: str, nbytes: int, calls: int) -> float | None:
    """us a call; None where the result of the last call is wrong on a rank."""
    x, residual = (torch.ones(nbytes // 2 // HIDDEN, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    fused = peer.fused if way == "fused" else None
    made = peer.plain(x) if fused is None else fused(x, residual, weight, EPS)
    made.queue()

    def program(_: int) -> None:
        made.queue()

    if way == "eager":
        took = bench.eager(program, calls)
    else:
        took = bench.graph(_late(bench.ranks, program) if way == "skewed" else program, calls, peer.settle)
    return took if all(bench.ranks.gather(made.right())) else None


def measure(arguments: argparse.Namespace) -> None:
    """One process's part; rank 0 prints JSON."""
    device = backend()
    layout = lay_out(arguments.ranks, SIZES[-1], sentinel=SENTINEL_LARGEST)
    make: Any = virtual_ranks if arguments.virtual else process_ranks
    found: dict[str, Any] = {"ranks": arguments.ranks, "virtual": arguments.virtual, "calls": {}, "missing": {}}
    if arguments.peers_only is None:
        ranks: Ranks = make(device, layout, bound_ns=BOUND)
        plain: Ranks = make(device, layout, bound_ns=BOUND, dependent=False)
        for calls in arguments.calls:
            found["calls"][calls] = our_rows(ranks, plain, arguments.rounds, calls)
        errors = [rank.channel.error() for part in (ranks, plain) for rank in part.here]
        if any(errors):
            raise SystemExit(f"a channel faulted: {errors}")
        leader = ranks.here[0].rank == 0
    else:
        import torch.distributed as dist

        from benchmarks.ranks import gather

        alone = Ranks(arguments.ranks, [_NoChannel(device)], False, dist.barrier, gather, layout, [])
        for calls in arguments.calls:
            only = None if arguments.peers_only == "all" else arguments.peers_only
            rows, missing = peer_rows(Bench(alone, arguments.rounds), calls, only)
            found["calls"][calls] = rows
            found["missing"].update(missing)
        leader = dist.get_rank() == 0
    if leader:
        print("RESULT " + json.dumps(found), flush=True)


class _NoChannel(Rank):
    """A rank that has a stream alone, for the peers."""

    def __init__(self, device: Any) -> None:
        import torch.distributed as dist

        super().__init__(dist.get_rank(), None, device.device.new_stream("peers"))  # type: ignore[arg-type]


def _child(given: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """The result of this command in a process of its own; what it cannot do is in ``failed``."""
    command = [sys.executable, "-m", "benchmarks.allreduce", "--in-child", *given]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"calls": {}, "missing": {}, "failed": _said(done.stderr or done.stdout)}
    return json.loads(lines[0].removeprefix("RESULT "))


def _said(text: str) -> list[str]:
    """What a failed process and those it started said last, without the frames of their tracebacks."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback", "[W", "[rank"))]
    return list(dict.fromkeys(lines))[-4:]


def main(given: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 6, 8), default=2)
    parser.add_argument("--calls", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--virtual", action="store_true", help="ours alone, ranks as streams of one GPU")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peers-only", help=argparse.SUPPRESS)
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < (1 if arguments.virtual else arguments.ranks):
        need = "a GPU" if arguments.virtual else f"{arguments.ranks} GPUs, one a rank"
        print(f"allreduce needs {need}; torch sees {there}. --virtual measures ours on one GPU", file=sys.stderr)
        return 2
    if arguments.in_child:
        if arguments.virtual:
            measure(arguments)
        else:
            start(arguments.ranks, measure, (arguments,))
        return 0
    begin = time.monotonic()
    base = ["--ranks", str(arguments.ranks), "--rounds", str(arguments.rounds), "--calls", *map(str, arguments.calls)]
    results = [_child([*base, *(["--virtual"] if arguments.virtual else [])], {})]
    if not arguments.virtual and not arguments.ours_only:
        off = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
        results.append(_renamed(_child([*base, "--peers-only", "NCCL"], off), "NCCL", "NCCL, graph mixing off"))
        results.append(
            _renamed(_child([*base, "--peers-only", "all"], {}), "NCCL", "NCCL, default (not to compare with)")
        )
    report = {
        "ranks": arguments.ranks,
        "how": "virtual ranks on one GPU: no link between them" if arguments.virtual else "one process a GPU",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begin),
        "us": {calls: _merged(results, str(calls)) for calls in arguments.calls},
        "missing": {name: why for one in results for name, why in one["missing"].items()},
        "failed": [line for one in results for line in one.get("failed", [])],
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        show(report)
    return 1 if report["failed"] else 0


def _renamed(result: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """``old`` and its variants ("old, eager") under a new name."""
    for calls, rows in result["calls"].items():
        result["calls"][calls] = {_name(title, old, new): row for title, row in rows.items()}
    return result


def _name(title: str, old: str, new: str) -> str:
    head, comma, tail = title.partition(",")
    return f"{new}{comma}{tail}" if head == old else title


def _merged(results: Sequence[dict[str, Any]], calls: str) -> dict[str, dict[str, float]]:
    return {name: row for one in results for name, row in one["calls"].get(calls, {}).items()}


def show(report: dict[str, Any]) -> None:
    """A table a number of calls."""
    print(f"{report['ranks']} ranks, {report['how']}; {report['device']}, torch {report['torch']}; us a call")
    names = [f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M" for n in SIZES]
    for calls, rows in report["us"].items():
        print(f"\n{calls} calls a graph\n{'':76s}" + "".join(f"{name:>8s}" for name in names))
        for name, row in rows.items():
            cells = (row.get(str(n), row.get(n)) for n in SIZES)
            print(f"{name:76s}" + "".join(f"{'-' if cell is None else format(cell, '.2f'):>8s}" for cell in cells))
    for name, why in report["missing"].items():
        print(f"left out: {name}: {why}")
    for line in report["failed"]:
        print(f"FAILED: {line}")


if __name__ == "__main__":
    sys.exit(main())
