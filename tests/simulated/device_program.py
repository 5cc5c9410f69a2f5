"""What tensors, streams, events and memory do on the CPU simulator; prints its findings as JSON."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch

from halma.backends.musa.seam import toolchain, torch_musa

torch_musa()  # installs the stand-in, and with it the device
found: dict[str, Any] = {}


def refused(work: Callable[[], Any]) -> str:
    """The error's first line; empty where there is none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def tensors() -> None:
    on, host = torch.arange(12.0, device="musa").view(3, 4), torch.arange(12.0).view(3, 4)
    found["device"] = str(on.device)
    found["plain"] = type(on) is torch.Tensor
    found["address"] = on[1:].data_ptr() - on.data_ptr() == 16 and on.untyped_storage().data_ptr() == on.data_ptr()
    written = torch.zeros(3, 4, device="musa")
    written[1] = 2.0
    written[:, 2] += 5
    written[written > 4] = 9
    torch.mul(on, 3, out=written[:, :4])
    pairs = [
        (on @ on.T, host @ host.T),
        (on.to(torch.float8_e4m3fn).view(torch.uint8), host.to(torch.float8_e4m3fn).view(torch.uint8)),
        (on[torch.tensor([2, 0], device="musa")], host[[2, 0]]),
        (torch.remainder(on.long(), 5), torch.remainder(host.long(), 5)),
        (on.sort(descending=True).values, host.sort(descending=True).values),
        (torch.nn.functional.softmax(on, -1), torch.nn.functional.softmax(host, -1)),
        (written, host * 3),
        (torch.where(on > 3, on, 0.5), torch.where(host > 3, host, 0.5)),
    ]
    found["same"] = [bool((mine.cpu() == theirs).all()) for mine, theirs in pairs]
    grown = torch.empty(0, device="musa")
    torch.add(on, 1, out=grown)
    found["grown"] = [list(grown.shape), float(grown[2, 3])]
    found["item"] = float(on.sum())
    found["refused"] = {
        "host operand": refused(lambda: on + host),
        "host destination": refused(lambda: torch.add(on, on, out=torch.empty(3, 4))),
        "numpy": refused(lambda: on.numpy()),
        "cuda literal": refused(lambda: torch.empty(1, device="cuda")),
        "cuda event": refused(lambda: torch.cuda.Event()),
    }
    found["number on the host"] = refused(lambda: on + torch.tensor(1.0))
    pinned = torch.empty(8, pin_memory=True)
    found["pinned"] = [pinned.is_pinned(), pinned[2:].is_pinned(), host.is_pinned()]


def events() -> None:
    musa = torch_musa()
    stream, event = musa.Stream(), musa.Event(enable_timing=True)
    foreign = torch.Event("cpu")
    found["events"] = {
        "own": refused(lambda: stream.wait_event(stream.record_event(event))),
        "foreign wait": refused(lambda: stream.wait_event(foreign)),
        "foreign record": refused(lambda: stream.record_event(foreign)),
        "foreign stream": refused(lambda: event.record(torch.Stream("cpu"))),
    }
    with musa.stream(stream):
        inside = musa.current_stream() == stream
    found["stream"] = [inside, musa.current_stream() == musa.default_stream(), stream.musa_stream != 0]


def names() -> None:
    musa = torch_musa()
    properties = musa.get_device_properties(0)
    found["fields"] = sorted(vars(properties))
    found["no argument"] = refused(lambda: musa.get_device_properties())
    found["graph keyword"] = refused(lambda: musa.graph(cuda_graph=musa.MUSAGraph()))
    found["musart"] = sorted(vars(musa.musart()))
    found["missing"] = [
        name for name in ("CUDAGraph", "nccl", "cudart", "caching_allocator_alloc") if hasattr(musa, name)
    ]
    found["is torch.musa"] = vars(torch)["musa"] is musa


def libraries() -> None:
    library = toolchain().load("musart")
    out, handle = ctypes.c_void_p(), (ctypes.c_ubyte * 256)()
    found["malloc"] = library.musaMalloc(ctypes.byref(out), 1 << 20)
    tensor = toolchain().tensor_at(out.value or 0, 1 << 20, torch.device("musa", 0), None)
    tensor.fill_(7)
    found["filled"] = ctypes.string_at(out.value or 0, 4).hex()
    found["interior handle"] = library.musaIpcGetMemHandle(handle, (out.value or 0) + 256)
    found["free"] = [library.musaFree(out.value), library.musaFree(out.value)]
    found["too much"] = library.musaMalloc(ctypes.byref(out), 1 << 50)
    found["last error"] = [library.musaGetLastError(), library.musaGetLastError()]
    found["kernels"] = hasattr(toolchain().load("musa"), "muLaunchKernel")


if __name__ == "__main__":
    for part in (tensors, events, names, libraries):
        part()
    print(json.dumps(found))
