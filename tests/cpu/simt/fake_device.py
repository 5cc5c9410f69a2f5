"""A backend whose device is host memory and whose kernels are only noted: what the driver asks for can be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.virtual_ranks import Region, lay_out
from halma.backends.simt.channel import SimtChannel
from halma.hal.capabilities import Capabilities
from halma.hal.collectives.contract import FLIGHT_BYTES, ChannelSite

RESIDENT = 132 * 2048


@dataclass
class Launch:
    kernel: str
    grid: int
    block: int
    args: tuple[int, ...]
    dependent: bool


class NotedStream:
    """Work on host memory is done when it is asked for."""

    entered = 0
    """How often any of them was made current: each time the driver asked something of the device."""

    def __enter__(self) -> NotedStream:
        NotedStream.entered += 1
        return self

    def __exit__(self, *exc: object) -> None: ...

    def synchronize(self) -> None: ...


@dataclass
class NotedKernels:
    dialect: str = "cuda"
    clock_khz: int | None = None
    loaded: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def load(self, source: Any, entries: Sequence[str]) -> Mapping[str, Any]:
        self.loaded += entries
        return {entry: entry for entry in entries}

    def launch(self, kernel: Any, grid: int, block: int, args: Sequence[Any], *, stream: Any, dependent: bool) -> None:
        self.launches.append(Launch(kernel, grid, block, tuple(args), dependent))


def fake_backend(**capabilities: Any) -> Any:
    """What the driver uses of a backend."""
    known = {"warp_width": 32, "dependent_launch": True, "remote_store_atomicity": 16, "resident_threads": RESIDENT}
    return SimpleNamespace(
        name="cuda",
        capabilities=Capabilities(**{**known, **capabilities}),
        kernels=NotedKernels(),
        memory=SimpleNamespace(pinned=lambda shape, dtype: torch.full(tuple(shape), 0x5A, dtype=dtype)),
        device=SimpleNamespace(new_stream=lambda name: NotedStream(), torch_device=torch.device("cpu")),
    )


def fake_channel(size: int = 2, rank: int = 0, *, backend: Any = None, entries: int = 8, **site: Any) -> SimtChannel:
    """A channel over host memory."""
    layout = site.pop("layout", None) or lay_out(size, 1 << 20)
    regions = [Region(torch.zeros(layout.end, dtype=torch.uint8)) for _ in range(size)]
    for region in regions:
        for lane in layout.lanes.values():
            region.tensor[lane.offset : lane.offset + lane.nbytes].fill_(lane.fill)
    recorder = torch.zeros(entries * FLIGHT_BYTES, dtype=torch.uint8)
    where: dict[str, Any] = {"bound_ns": 10**9, "dependent": True, **site}
    return SimtChannel(
        ChannelSite(rank, size, layout, regions[rank], regions, recorder=recorder, **where), backend or fake_backend()
    )
