"""Probe 1 of :mod:`benchmarks.probes_cuda`: what illegal work in a capture raises, and what is usable afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.capture_probes import attempt, capturing, probe, said, usable

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
