"""What the probes of :mod:`benchmarks.probes_cuda` share: the register, a capture, whether a process is usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

probes: dict[int, tuple[str, Callable[[], list[str]], Callable[..., Iterator[tuple[str, str]]]]] = {}
"""Number -> question, cases, the generator of answers."""


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
        probes[number] = (question, cases, function)
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
