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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

SECONDS = 120
PROCESSES = 6
_probes: dict[int, tuple[str, Callable[[], list[str]], Callable[..., Iterator[tuple[str, str]]]]] = {}


@dataclass(frozen=True)
class Row:
    """One answer."""

    probe: int
    question: str
    case: str
    answer: str


def probe(number: int, question: str, cases: Callable[[], list[str]] = lambda: [""]) -> Callable[[Any], Any]:
    """Register a generator of (case, answer); with ``cases`` it is called with each, in a process of its own."""

    def wrap(function: Any) -> Any:
        _probes[number] = (question, cases, function)
        return function

    return wrap


def said(error: BaseException) -> str:
    """Class, code where there is one, and the first line."""
    code = getattr(error, "error_code", None)
    return f"{type(error).__name__}{f' [{code}]' if code is not None else ''}: {str(error).splitlines()[0][:150]}"


@contextmanager
def capturing(mode: str = "thread_local", **options: Any) -> Iterator[Any]:
    """A capture on a side stream; ended whatever happens inside."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(**options), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        yield graph


def attempt(work: Callable[[Any], object], mode: str = "thread_local") -> Iterator[tuple[str, str]]:
    """What ``work`` raises inside a capture, what the end raises, and whether the process is usable after both."""
    import torch

    x = torch.ones(4, device="cuda")
    inside = end = "nothing raised"
    with capturing(mode) as graph:
        x.add_(1.0)
        try:
            work(x)
        except Exception as error:
            inside = said(error)
        try:
            graph.capture_end()
        except Exception as error:
            end = said(error)
    yield "inside", inside
    yield "end", end
    yield "afterwards", usable()


def usable() -> str:
    """Whether eager work, another capture and a large allocation still work."""
    import torch

    try:
        torch.cuda.synchronize()
        y = torch.zeros(4, device="cuda")
        with capturing() as graph:
            y.add_(1.0)
            graph.capture_end()
        graph.replay()
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
        return "usable" if float(y[0]) == 1.0 else f"usable, wrong result {y.tolist()}"
    except Exception as error:
        return f"broken: {said(error)}"


ILLEGAL: dict[str, Callable[[Any], object]] = {}


def illegal(name: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        ILLEGAL[name] = function
        return function

    return wrap


@illegal("item")
def _item(x: Any) -> object:
    return x[0].item()


@illegal("pageable copy to the device")
def _pageable(x: Any) -> object:
    import torch

    return x.copy_(torch.ones(4))


@illegal("unjoined fork")
def _unjoined(x: Any) -> None:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)


@illegal("begin twice on one stream")
def _twice(x: Any) -> None:
    import torch

    torch.cuda.CUDAGraph().capture_begin(capture_error_mode="thread_local")


@illegal("device synchronize")
def _synchronize(x: Any) -> None:
    import torch

    torch.cuda.synchronize()


@illegal("a large allocation")
def _allocation(x: Any) -> object:
    import torch

    return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


@illegal("an allocation that cannot be had")
def _exhausted(x: Any) -> object:
    import torch

    return torch.empty(1 << 42, dtype=torch.uint8, device="cuda")


@illegal("loading a module")
def _module(x: Any) -> object:
    import torch

    return torch.linalg.inv(x.expand(4, 4) + torch.eye(4, device="cuda"))


@illegal("waiting for an event of before")
def _old_event(x: Any) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)


@illegal("destroying another graph")
def _destroy(x: Any) -> None:
    others.clear()


others: list[Any] = []
"""Graphs captured before the capture of a case."""


def in_thread(work: Callable[[], object]) -> str:
    """What ``work`` raises on another thread."""
    answer = ["nothing raised"]

    def run() -> None:
        try:
            work()
        except Exception as error:
            answer[0] = said(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answer[0]


MODES = ("global", "thread_local", "relaxed")


def error_cases() -> list[str]:
    """The cases of probe 1."""
    more = ["default stream", "end on another thread", "event across an end"]
    return [*ILLEGAL, *more, *(f"event query of another thread, {mode}" for mode in MODES)]


@probe(1, "what illegal work in a capture raises, where, and what is usable afterwards", error_cases)
def one_error(name: str) -> Iterator[tuple[str, str]]:
    """One case of probe 1, in a process of its own."""
    import torch

    if name == "destroying another graph":
        with capturing() as other:
            torch.ones(4, device="cuda").add_(1.0)
            other.capture_end()
        others.append(other)
        del other
    if name in ILLEGAL:
        yield from ((f"{name}: {where}", answer) for where, answer in attempt(ILLEGAL[name]))
    elif name == "default stream":
        try:
            torch.cuda.CUDAGraph().capture_begin()
            yield name, "nothing raised"
        except Exception as error:
            yield name, f"{said(error)}; {usable()}"
    elif name == "end on another thread":
        with capturing() as graph:
            torch.ones(4, device="cuda")

            def end() -> None:
                with torch.cuda.stream(graph_stream):
                    graph.capture_end()

            graph_stream = torch.cuda.current_stream()
            yield name, in_thread(end)
    elif name == "event across an end":
        event, x = torch.cuda.Event(), torch.ones(4, device="cuda")
        with capturing() as graph:
            x.add_(1.0)
            event.record()
            graph.capture_end()
        for case, use in (
            ("query", event.query),
            ("eager wait", lambda: torch.cuda.current_stream().wait_event(event)),
        ):
            try:
                use()
                yield f"{name}: {case}", "nothing raised"
            except Exception as error:
                yield f"{name}: {case}", said(error)
        yield from ((f"{name}: wait in the next capture, {where}", answer) for where, answer in attempt(
            lambda _: torch.cuda.current_stream().wait_event(event)))  # fmt: skip
    else:
        mode = name.rpartition(" ")[2]
        event = torch.cuda.Event()
        event.record()
        torch.cuda.synchronize()
        yield from ((f"{name}: {where}", answer) for where, answer in attempt(
            lambda _: queried(event), mode))  # fmt: skip


def queried(event: Any) -> None:
    """Query on another thread; raised here if it raised there."""
    answer = in_thread(event.query)
    if answer != "nothing raised":
        raise RuntimeError(f"on the other thread: {answer}")


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
        function = _probes[given.child][2]
        for answer in function(given.case) if given.case else function():
            print(json.dumps(answer), flush=True)
        return 0
    wanted = [int(part) for part in given.only.split(",") if part] or sorted(_probes)
    jobs = [(number, case) for number in wanted for case in _probes[number][1]()]
    with ThreadPoolExecutor(PROCESSES) as pool:
        waiting = {job: pool.submit(child, *job) for job in jobs if job[0] not in ALONE}
        answers = {job: future.result() for job, future in waiting.items()}
    answers |= {job: child(*job) for job in jobs if job[0] in ALONE}
    rows: list[Row] = []
    for number in wanted:
        question = _probes[number][0]
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
