"""The simulator over torch.cuda, over a torch.cuda of bookkeeping alone; prints JSON."""

from __future__ import annotations

import gc
import json
from typing import Any

import torch

from tests.simulated import fake_cuda

fake_cuda.install()

from halma.backends.musa.simulator.cuda.installing import install  # noqa: E402
from halma.backends.musa.simulator.faults import CEILING  # noqa: E402

tools = install()
import torch_musa  # noqa: E402 # pyright: ignore[reportMissingImports]


def refused(work: Any) -> str:
    """The error; empty where there is none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def captured(stream: Any, pool: Any = None) -> Any:
    graph = torch_musa.MUSAGraph()
    with torch_musa.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        graph.capture_end()
    return graph


def main() -> dict[str, Any]:
    stream, event = torch_musa.Stream(0, priority=-1), torch_musa.Event()
    external = torch_musa.ExternalStream(0x1230, device=0)
    found: dict[str, Any] = {
        "toolchain": [tools.device_type, tools.dialect, tools.library_backend, tools.simulated],
        "raw": [stream.musa_stream == 16 * stream.stream_id, external.musa_stream == 16 * 0x1230],
        "hidden": [refused(lambda: stream.cuda_stream), refused(lambda: event.cuda_event)],
        "priority": stream.priority,
    }
    stream.record_event(event)
    stream.wait_event(event)
    found["foreign"] = [
        refused(lambda: stream.wait_event(fake_cuda.Event())),
        refused(lambda: event.record(fake_cuda.Stream())),
    ]
    found["trapped"] = [refused(getattr(torch.cuda, name)) for name in ("Event", "Stream")]
    found["trapped graph"] = refused(lambda: torch.cuda.CUDAGraph(keep_graph=True))
    in_torch = eval("lambda: torch.cuda.Event()", {"torch": torch, "__name__": "torch.utils"})
    found["for torch"] = refused(in_torch)
    with torch_musa.stream(stream):
        found["current"] = torch_musa.current_stream() == stream
    found["default"] = refused(lambda: torch_musa.MUSAGraph().capture_begin())
    found["fields"] = sorted(vars(torch_musa.get_device_properties(0)))
    found["capability"] = list(torch_musa.get_device_capability())
    found["memory"] = [
        list(torch_musa.mem_get_info(0)),
        torch_musa.memory_reserved(),
        torch_musa.memory_snapshot()[0]["total_size"],
    ]

    pool = torch_musa.graph_pool_handle()
    graph = captured(stream, pool)
    uses = [fake_cuda.pool_uses[pool]]
    graph.reset()
    del graph
    gc.collect()
    uses.append(fake_cuda.pool_uses[pool])
    torch_musa._MUSAC._musa_releasePool(0, pool)
    uses.append(fake_cuda.pool_uses[pool])
    early = captured(stream, pool)
    torch_musa._MUSAC._musa_releasePool(0, pool)  # before the reset: the graph itself still holds it
    uses.append(fake_cuda.pool_uses[pool])
    early.reset()
    uses.append(fake_cuda.pool_uses[pool])
    found["pool uses"] = uses

    live = [captured(stream) for _ in range(CEILING)]
    found["after the last"] = refused(lambda: captured(stream))
    live.pop().reset()
    found["one less"] = refused(lambda: live.append(captured(stream)))
    before = fake_cuda.instantiated[0]
    live[0].reinstantiate_graph()
    found["reinstantiated"] = fake_cuda.instantiated[0] - before
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
