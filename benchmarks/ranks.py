"""Ranks of one channel for benchmarks: streams of this process (virtual), or this process's own, one a GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import halma
from benchmarks.virtual_ranks import SECOND, VirtualRanks
from halma.backends.simt.channel import SimtChannel
from halma.hal.arena.layout import GUARD_BYTE, GUARD_BYTES, ChannelLayout
from halma.hal.backend import Backend
from halma.hal.collectives.contract import FLIGHT_BYTES, Call, ChannelSite, Choice, Operands

BACKEND = "cuda"


@dataclass
class Rank:
    """One rank that lives in this process."""

    rank: int
    channel: SimtChannel
    stream: Any

    def launch(self, call: Call, choice: Choice, operands: Operands) -> None:
        self.channel.launch(call, choice, operands, None, self.stream)

    def capture(self, program: Callable[[], None]) -> Any:
        """A graph of ``program`` on this rank's stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream.torch, capture_error_mode="thread_local"):
            program()
        return graph


@dataclass
class Ranks:
    """The ranks of this process.

    Attributes:
        here: all of them where they are virtual, else the one.
        meet: waits for every rank's process.
        gather: a value of each process, everywhere.
    """

    size: int
    here: Sequence[Rank]
    virtual: bool
    meet: Callable[[], None]
    gather: Callable[[Any], list[Any]]
    layout: ChannelLayout
    memory: Sequence[torch.Tensor]

    def guards_hold(self) -> bool:
        return all(
            bool((memory[guard : guard + GUARD_BYTES] == GUARD_BYTE).all())
            for memory in self.memory
            for guard in self.layout.guards
        )


def virtual_ranks(backend: Backend, layout: ChannelLayout, **options: Any) -> Ranks:
    """Every rank as a stream of this process."""
    lab = VirtualRanks(backend, layout.size, layout=layout, **options)
    here = [Rank(at, lab.channels[at], lab.streams[at]) for at in range(layout.size)]
    memory = [region.tensor for region in lab.regions]
    return Ranks(layout.size, here, True, lambda: None, lambda value: [value], layout, memory)


def process_ranks(
    backend: Backend,
    layout: ChannelLayout,
    *,
    bound_ns: int = 20 * SECOND,
    first_epoch: int = 0,
    entries: int = 64,
    dependent: bool = True,
    without: tuple[str, ...] = (),
) -> Ranks:
    """This process's rank; the others map its memory. torch.distributed must be up (gloo is enough)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, handle = backend.memory.exportable(layout.end)
    for lane in layout.lanes.values():
        own.tensor[lane.offset : lane.offset + lane.nbytes].fill_(lane.fill)
    for guard in layout.guards:
        own.tensor[guard : guard + GUARD_BYTES].fill_(GUARD_BYTE)
    recorder = backend.memory.pinned((entries * FLIGHT_BYTES,), torch.uint8).zero_()
    backend.device.synchronize()
    handles = gather(handle)
    peers = [own if at == rank else backend.memory.open(other) for at, other in enumerate(handles)]
    site = ChannelSite(rank, size, layout, own, peers, bound_ns, dependent, recorder, first_epoch)
    channel = SimtChannel(site, backend, without=without)
    backend.device.synchronize()
    dist.barrier()
    here = [Rank(rank, channel, backend.device.new_stream("calls"))]
    return Ranks(size, here, False, dist.barrier, gather, layout, [own.tensor])


def gather(value: Any) -> list[Any]:
    """``value`` of every process."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start(size: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """``work(*arguments)`` in ``size`` processes, one a GPU: torchrun's own where it started this one, else spawned."""
    if "RANK" in os.environ:
        _process(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), None, size, work, arguments)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    multiprocessing.spawn(_process, args=(port, size, work, arguments), nprocs=size)  # type: ignore[attr-defined]


def _process(local: int, port: int | None, size: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.cuda.set_device(local)
    if port is None:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=local, world_size=size)
    try:
        work(*arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def backend() -> Backend:
    """The GPU's backend.

    Raises:
        BackendError: there is none to be used here.
    """
    return halma.backend(BACKEND)
