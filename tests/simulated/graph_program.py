"""What captures do on a simulator, by torch_musa's names alone and through the backend; prints JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

import halma
from halma.backends.musa import graphs as backend_graphs
from halma.backends.musa.seam import toolchain, torch_musa
from halma.backends.musa.simulator.faults import executables
from halma.hal.workspace import Workspace
from tests.simulated.device_program import refused

torch_musa()  # installs the stand-in, and with it the device
found: dict[str, Any] = {}
DEVICE = toolchain().device_type
CAPTURES = 2048


def captured(work: Callable[[], Any], stream: Any = None, mode: str = "thread_local") -> Any:
    """A graph of torch_musa's. Where its end fails, the allocator is told that the recording into the pool is over."""
    musa = torch_musa()
    graph, pool = musa.MUSAGraph(), musa.graph_pool_handle()
    with musa.stream(stream or musa.Stream()):
        graph.capture_begin(pool=pool, capture_error_mode=mode)
        try:
            work()
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):
                    musa._MUSAC._musa_endAllocateCurrentStreamToPool(0, pool)
                raise
    return graph


def replays() -> None:
    x, kept = torch.zeros(4, device=DEVICE), list[torch.Tensor]()

    def work() -> None:
        x.add_(1.0)
        kept.append((x * 2 + 1).to(torch.bfloat16))

    graph = captured(work)
    before = float(x[0])
    graph.replay()
    graph.replay()
    found["replays"] = [before, float(x[0]), float(kept[0][0])]
    held = x.data_ptr()
    graph.reset()
    found["after reset"] = [refused(graph.replay), x.data_ptr() == held]


def state_machine() -> None:
    musa, x = torch_musa(), torch.zeros(4, device=DEVICE)
    found["default stream"] = refused(lambda: musa.MUSAGraph().capture_begin())
    side = musa.Stream()

    def waits() -> None:
        x.add_(1.0)
        musa.synchronize()

    def unjoined() -> None:
        side.wait_stream(musa.current_stream())
        with musa.stream(side):
            x.add_(1.0)

    def joined() -> None:
        unjoined()
        musa.current_stream().wait_stream(side)

    def outside() -> None:
        musa.current_stream().wait_event(before)

    before = musa.Event()
    before.record()
    programs: dict[str, Callable[[], Any]] = {
        "joined": joined,
        "host read": lambda: x.sum().item(),
        "host wait": waits,
        "pageable copy": lambda: x.copy_(torch.ones(4)),
        "mask": lambda: x[x > 0],
        "unjoined": unjoined,
        "event from outside": outside,
    }
    for name, work in programs.items():
        found[name] = refused(lambda work=work: captured(work))
    found["usable afterwards"] = refused(lambda: captured(lambda: x.add_(1.0)).replay())
    found["unknown mode"] = refused(lambda: captured(lambda: None, mode="globally"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        captured(lambda: None)
    found["empty"] = str(said[-1].message) if said else ""
    found["global mode"] = threads("global")
    found["thread mode"] = threads("thread_local")


def threads(mode: str) -> str:
    """What another thread's wait does to a capture."""

    def work() -> None:
        thread = threading.Thread(target=lambda: refused(torch_musa().synchronize))
        thread.start()
        thread.join()
        torch.zeros(1, device=DEVICE).add_(1.0)

    return refused(lambda: captured(work, mode=mode))


def pools(release: bool) -> list[int]:
    """Bytes that throwaway captures leave reserved, one after the other."""
    musa, sizes = torch_musa(), list[int]()
    for _ in range(4):
        graph = captured(lambda: torch.ones(1 << 18, device=DEVICE).mul_(2.0))
        pool = graph.pool()
        graph.reset()
        if release:
            musa._MUSAC._musa_releasePool(0, pool)
        musa.empty_cache()
        sizes.append(musa.memory_reserved())
    return sizes


def ceiling() -> None:
    x, stream, live = torch.zeros(1, device=DEVICE), torch_musa().Stream(), list[Any]()
    room = CAPTURES - executables.live
    error = ""
    while not error and len(live) <= room:
        error = refused(lambda: live.append(captured(lambda: x.add_(1.0), stream)))
    found["ceiling"] = [len(live) == room, error]
    live.pop().reset()
    found["one less"] = refused(lambda: live.append(captured(lambda: x.add_(1.0), stream)))
    live.clear()
    gc.collect()


def by_the_backend(budget: bool) -> list[Any]:
    """How many captures the layer makes, and with which error it ends."""
    backend = halma.backend("musa")
    if not budget:
        backend_graphs.live_graphs.limit = None
    stream, templates, x = backend.device.new_stream("many"), list[Any](), torch.zeros(1, device=DEVICE)
    workspace = Workspace(backend.device.torch_device)
    workspace.seal()
    error = ""
    with torch.no_grad():
        while not error and len(templates) <= CAPTURES:
            backend.graphs.begin(stream, workspace)
            x.add_(1.0)
            error = refused(lambda: templates.append(backend.graphs.end(stream)))
            if not error and len(templates) == backend_graphs.EXECUTABLES and budget:
                error = refused(lambda: backend.graphs.begin(stream, workspace))
    return [len(templates), error]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({"captures": by_the_backend(sys.argv[1] == "budget")}))
    else:
        with torch.no_grad():
            replays()
            state_machine()
            found["kept"], found["released"] = pools(release=False), pools(release=True)
            ceiling()
        print(json.dumps(found))
