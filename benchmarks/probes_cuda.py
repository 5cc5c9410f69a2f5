"""Ten questions about graph capture on a CUDA device that only a device answers: one table, or ``--json``.

    python -m benchmarks.probes_cuda [--json] [--only 1,2]

Each probe runs in a child process of its own, because several of them break their process on purpose. They ask torch
and the driver, not halma; what halma's backend makes of the answers is in ``halma.backends.cuda``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks import capture_errors as _capture_errors  # noqa: F401  (registers probe 1)
from benchmarks.capture_probes import Row, capturing, probe, probes, said

SECONDS = 120
PROCESSES = 6


@probe(2, "end, eager work, begin on one stream with a shared pool; and a bare end and begin; 3 replays each")
def segments() -> Iterator[tuple[str, str]]:
    import torch

    for bare in (False, True):
        x, y, stream = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), torch.cuda.Stream()
        pool, graphs = torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for graph in graphs:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                x.add_(x * 0.0 + 1.0)
                graph.capture_end()
                if not bare:
                    y.add_(5.0)
            for _ in range(3):
                for graph in graphs:
                    graph.replay()
        torch.cuda.synchronize()
        yield "bare" if bare else "with eager work", f"x {float(x[0])} (6 is right), y {float(y[0])}"


@probe(3, "torch.accelerator.Graph")
def accelerator() -> Iterator[tuple[str, str]]:
    import torch

    yield "torch", torch.__version__
    if not hasattr(torch.accelerator, "Graph"):
        yield "torch.accelerator.Graph", "does not exist in this torch"
        return
    try:
        torch.accelerator.Graph()
        yield "torch.accelerator.Graph()", "can be made"
    except Exception as error:
        yield "torch.accelerator.Graph()", said(error)


@probe(4, "the input of an eager step between segments dies: is its memory used again? (sgl-project/sglang#37606)")
def weak_inputs() -> Iterator[tuple[str, str]]:
    import torch

    x, stream, alive = torch.ones(1 << 16, device="cuda"), torch.cuda.Stream(), list[Any]()
    stream.wait_stream(torch.cuda.current_stream())
    for keep in (False, True):
        graph, other, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        alive += [graph, other]
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            between: Any = x * 2.0
            address = between.data_ptr()
            graph.capture_end()
            if not keep:
                between = None
            other.capture_begin(pool=pool, capture_error_mode="thread_local")
            junk = x * 100.0
            other.capture_end()
        yield (
            ("kept" if keep else "dropped"),
            (
                "the next capture took its address"
                if junk.data_ptr() == address
                else "its address stayed free of others"
            ),
        )


@probe(5, "a workspace that grows between two graphs")
def growth() -> Iterator[tuple[str, str]]:
    import torch

    x, held = torch.ones(1 << 16, device="cuda"), [torch.empty(1 << 16, device="cuda")]
    with capturing() as graph:
        torch.mul(x, 3.0, out=held[0])
        graph.capture_end()
    old = held[0].data_ptr()
    held[0] = torch.empty(1 << 20, device="cuda")
    taken = torch.zeros(1 << 16, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    where = "the old address was given to another tensor" if taken.data_ptr() == old else "the old address lies idle"
    yield "after the growth", f"{where}; a replay wrote {float(taken.sum()) / taken.numel()} over that tensor's zeros"


ORDERS = ("descending", "ascending", "shuffled")


@probe(6, "memory of a ladder by order of capture: one pool, or one workspace", lambda: list(ORDERS))
def one_ladder(order: str) -> Iterator[tuple[str, str]]:
    import random

    import torch

    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    random.seed(7)
    {
        "descending": lambda: sizes.sort(reverse=True),
        "ascending": sizes.sort,
        "shuffled": lambda: random.shuffle(sizes),
    }[order]()
    weight = [torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    inputs = torch.rand(256, 4096, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(8, 256, 4096, device="cuda", dtype=torch.bfloat16)

    def step(rows: int, placed: bool) -> Any:
        x = inputs[:rows]
        for index, matrix in enumerate(weight):
            x = torch.mm(x, matrix, out=big[index, :rows]) if placed else x @ matrix
        return x

    for placed in (False, True):
        step(256, placed)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool, graphs, outputs = torch.cuda.graph_pool_handle(), [], []
        falls: list[int] = []
        reserved = torch.cuda.memory_reserved()
        stream = torch.cuda.Stream()
        first = torch.cuda.mem_get_info()[0]
        for rows in sizes:
            before = torch.cuda.mem_get_info()[0]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                outputs.append(step(rows, placed))
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            graphs.append(graph)
            falls.append(before - torch.cuda.mem_get_info()[0])
        taken = first - torch.cuda.mem_get_info()[0]
        yield (
            f"{order}, {'results placed' if placed else 'results from the pool'}",
            (
                f"free memory fell by {taken / 2**20:.1f} MiB, the allocator's by "
                f"{(torch.cuda.memory_reserved() - reserved) / 2**20:.1f} MiB; by graph (MiB): "
                + " ".join(f"{fall / 2**20:.0f}" for fall in falls)
            ),
        )


@probe(7, "an empty segment")
def empty_segment() -> Iterator[tuple[str, str]]:
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with capturing() as graph:
            graph.capture_end()
    yield "end", f"warns: {str(caught[0].message)[:100]}" if caught else "nothing said"
    try:
        graph.replay()
        torch.cuda.synchronize()
        yield "replay", "works"
    except Exception as error:
        yield "replay", said(error)


@probe(8, "a cuda.core launch inside a torch capture")
def foreign_launch() -> Iterator[tuple[str, str]]:
    import torch
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    from cuda.core import Device, LaunchConfig, Program, launch  # pyright: ignore[reportMissingImports]

    device = Device(0)
    device.set_current()
    code = 'extern "C" __global__ void bump(float* x) { x[0] += 1.0f; }'
    kernel = Program(code, "c++").compile("cubin").get_kernel("bump")
    x = torch.zeros(4, device="cuda")
    yield "get_graph_data", "exists" if hasattr(torch.cuda.CUDAGraph, "get_graph_data") else "not in this torch"
    with capturing(keep_graph=True) as graph:
        x.add_(0.0)
        stream = device.create_stream(torch.cuda.current_stream())
        launch(stream, LaunchConfig(grid=1, block=1), kernel, x.data_ptr())
        graph.capture_end()
    _, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()), 0)
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    yield "nodes of one op and one launch", str(count)
    yield "after 3 replays", f"{float(x[0])} (3 is right)"


@probe(9, "two graphs of one pool replayed on two streams at once")
def concurrent() -> Iterator[tuple[str, str]]:
    import torch

    n, rounds, wrong = 1 << 22, 50, 0
    x, pool, stream = torch.rand(n, device="cuda"), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.empty(n, device="cuda") for _ in range(2)]
    stream.wait_stream(torch.cuda.current_stream())
    for number, (graph, out) in enumerate(zip(graphs, outs, strict=True)):
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            y = x
            for _ in range(20):
                y = y + float(number + 1)
            out.copy_(y)
            del y
            graph.capture_end()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(rounds):
        for graph, beside in zip(graphs, streams, strict=True):
            with torch.cuda.stream(beside):
                graph.replay()
        torch.cuda.synchronize()
        wrong += any(bool(((out - x - 20.0 * (n + 1)).abs() > 1e-3).any()) for n, out in enumerate(outs))
    yield "rounds with wrong results", f"{wrong} of {rounds}"


@probe(10, "a replay in another grad mode than its capture")
def grad_modes() -> Iterator[tuple[str, str]]:
    import torch

    modes = {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "inference_mode": torch.inference_mode}
    graph, alive = None, list[Any]()
    for name, mode in modes.items():
        alive.append(graph)  # a graph that dies amid the next capture breaks it: probe 1
        x = torch.zeros(4, device="cuda")
        with mode(), capturing() as graph:
            x.add_(1.0)
            graph.capture_end()
        answers: list[str] = []
        for other, enter in modes.items():
            try:
                with enter():
                    graph.replay()
                answers.append(f"{other} works")
            except Exception as error:
                answers.append(f"{other}: {said(error)}")
        torch.cuda.synchronize()
        yield f"captured under {name}", "; ".join(answers) + f"; x {float(x[0])}"


# -- driving -----------------------------------------------------------------------------------------------

ALONE = (6,)
"""Probes that read the device's free memory: nothing else may run beside them."""


def child(number: int, case: str = "") -> list[tuple[str, str]]:
    """A probe, or a case of one, in a process of its own; a crash or a hang is an answer."""
    command = [sys.executable, "-m", "benchmarks.probes_cuda", "--child", str(number), "--case", case]
    answers: list[tuple[str, str]] = []
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        output, ended = run.stdout, f"the process ended with status {run.returncode}" if run.returncode else ""
        last = (run.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ended, last = f"did not end within {SECONDS} s", ""
    for line in output.splitlines():
        if line.startswith("[") and line.endswith("]"):
            answers.append(tuple(json.loads(line)))  # type: ignore[arg-type]
    if ended:
        answers.append((f"{case or 'the probe'}: at its end", f"{ended}; {last[:150]}"))
    return answers


def main() -> int:
    """Run the probes. Returns 0 when all gave answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--only", default="", help="numbers of probes, separated by commas")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        function = probes[given.child][2]
        for answer in function(given.case) if given.case else function():
            print(json.dumps(answer), flush=True)
        return 0
    wanted = [int(part) for part in given.only.split(",") if part] or sorted(probes)
    jobs = [(number, case) for number in wanted for case in probes[number][1]()]
    with ThreadPoolExecutor(PROCESSES) as pool:
        waiting = {job: pool.submit(child, *job) for job in jobs if job[0] not in ALONE}
        answers = {job: future.result() for job, future in waiting.items()}
    answers |= {job: child(*job) for job in jobs if job[0] in ALONE}
    rows: list[Row] = []
    for number in wanted:
        question = probes[number][0]
        found = [pair for job in jobs if job[0] == number for pair in answers[job]]
        rows += [Row(number, question, case, answer) for case, answer in found]
        if not given.json:
            print(f"\n{number}. {question}")
            for case, answer in found:
                print(f"   {case}: {answer}")
    if given.json:
        print(json.dumps({"schema": "halma.probes/1", "rows": [asdict(row) for row in rows]}, indent=2))
    return 0 if {row.probe for row in rows} == set(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
