"""What a launch of one of our kernels costs the host, beside cuda.core's launch and a torch call, on one GPU.

    python -m benchmarks.launch [--rounds 25] [--json]

Each row: the time from call to call of 300 launches of an empty kernel with eight arguments on an idle stream, so that
nothing waits for the device; median of the rounds, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import halma
from halma.backends.simt.sources import Target, headers, source
from halma.hal.backend import KernelSource

LAUNCHES = 300
EMPTY = '#include "dialect.h"\nextern "C" __global__ void empty(u64, u64, u64, u64, u64, u64, u64, u64) {}\n'
ARGUMENTS = tuple(range(8))


def programs() -> tuple[dict[str, Callable[[], Any]], Any]:
    """What is compared, and the stream that it goes to."""
    from cuda.core import Device, LaunchConfig, ObjectCode, launch  # pyright: ignore[reportMissingImports]

    backend = halma.backend("cuda")
    part: Any = backend.kernels
    defines = source("ring", 2, Target.of(part, backend.capabilities)).defines
    kernel = part.load(KernelSource("empty", EMPTY, headers(), defines), ("empty",))["empty"]
    stream: Any = backend.device.new_stream("launches")
    assert isinstance(kernel.code, ObjectCode)

    class Handle:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    queue, peer = Device(0).create_stream(Handle()), kernel.code.get_kernel("empty")
    plain, early = (
        LaunchConfig(grid=1, block=32),
        LaunchConfig(grid=1, block=32, programmatic_stream_serialization=True),
    )
    x = torch.zeros(1, device="cuda")
    stream.synchronize()
    return {
        "halma": lambda: part.launch(kernel, 1, 32, ARGUMENTS, stream=stream),
        "halma, dependent": lambda: part.launch(kernel, 1, 32, ARGUMENTS, stream=stream, dependent=True),
        "cuda.core": lambda: launch(queue, plain, peer, *ARGUMENTS),
        "cuda.core, dependent": lambda: launch(queue, early, peer, *ARGUMENTS),
        "torch, x.zero_()": x.zero_,
    }, stream


def measured(rounds: int) -> dict[str, float]:
    """Microseconds a launch."""
    compared, stream = programs()
    found: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds + 1):
        for name, program in compared.items():
            torch.cuda.synchronize()
            with stream:
                begin = time.perf_counter()
                for _ in range(LAUNCHES):
                    program()
                found[name].append((time.perf_counter() - begin) / LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.rounds)
    if given.json:
        print(json.dumps({"benchmark": "launch", "device": torch.cuda.get_device_name(), "us": found}, indent=2))
        return
    for name, us in found.items():
        print(f"{name:22} {us:6.2f} us")


if __name__ == "__main__":
    main()
