"""Channels of several ranks on one GPU: each rank is a stream of this process, its peers' arenas are plain pointers.

The kernels cannot tell: they see base addresses. What is missing is the link between two GPUs, its order of stores and
its latency. Grids are sized so that all ranks' calls, and the next ones under dependent launch, fit the device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halma.backends.simt.channel import SimtChannel
from halma.backends.simt.geometry import room
from halma.hal.arena.layout import ALIGNMENT, GUARD_BYTE, GUARD_BYTES, HEADER_BYTES, MAX_BLOCKS, ChannelLayout, Lane
from halma.hal.backend import Backend
from halma.hal.collectives.contract import (
    FLIGHT_BYTES,
    Box,
    Call,
    ChannelSite,
    Choice,
    Operands,
)
from halma.hal.collectives.control import CONTROL_BYTES
from halma.hal.collectives.mixing import PART_BYTES

SECOND = 10**9
SENTINEL_FILL = 0xFF
WORDS_PAYLOAD = 64 << 10


def lay_out(size: int, largest: int, *, sentinel: int | None = None) -> ChannelLayout:
    """A channel with every lane, push and staged, for messages of up to ``largest`` bytes; guard zones between."""
    guards: list[int] = []
    end = 0

    def take(nbytes: int) -> int:
        nonlocal end
        guards.append(end)
        start = end + GUARD_BYTES
        end = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return start

    def lane(buffers: int, senders: int, payload: int, *, wire: int = 1, fill: int = 0) -> Lane:
        box = -(-payload * wire // ALIGNMENT) * ALIGNMENT
        return Lane(take(buffers * senders * box), buffers, senders, box, payload, fill)

    def words(buffers: int, box: int) -> Lane:
        return Lane(take(buffers * size * box), buffers, size, box, box)

    control = take(CONTROL_BYTES)
    shard = -(-largest // (16 * size)) * 16
    layout = ChannelLayout(
        name="lab",
        size=size,
        control=control,
        headers=words(2, HEADER_BYTES),
        largest=largest,
        end=0,
        words=lane(2, size, WORDS_PAYLOAD, wire=2),
        sentinel=lane(2, size, sentinel or largest, fill=SENTINEL_FILL),
        scatter=lane(1, size, shard),
        gather=lane(1, size, shard),
        chunk_flags=words(2, 4 * MAX_BLOCKS),
        staging=lane(2, 1, largest),
        stage_sum=lane(2, 1, shard),
        stage_flags=words(2, 4 * MAX_BLOCKS),
        parts=lane(1, 1, PART_BYTES),
    )
    guards.append(end)
    return replace(layout, guards=tuple(guards), end=end + GUARD_BYTES)


@dataclass
class Region:
    """Device memory of one rank, as the others see it too."""

    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def close(self) -> None: ...


class VirtualRanks:
    """``size`` ranks of one channel.

    Args:
        spare: bytes behind the channel in every arena, for slots.
    """

    def __init__(
        self,
        backend: Backend,
        size: int,
        *,
        largest: int = 1 << 20,
        bound_ns: int = 20 * SECOND,
        first_epoch: int = 0,
        first_epochs: Sequence[int] | None = None,
        entries: int = 64,
        dependent: bool = True,
        spare: int = 0,
        layout: ChannelLayout | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.backend, self.size = backend, size
        self.device = backend.device.torch_device
        self.layout = layout or lay_out(size, largest)
        self.regions = [self._region(spare) for _ in range(size)]
        self.streams = [backend.device.new_stream(f"rank {rank}") for rank in range(size)]
        self.recorders = [backend.memory.pinned((entries * FLIGHT_BYTES,), torch.uint8) for _ in range(size)]
        for recorder in self.recorders:
            recorder.zero_()
        self.synchronize()
        self.channels = [
            SimtChannel(
                ChannelSite(
                    rank=rank,
                    size=size,
                    layout=self.layout,
                    own=self.regions[rank],
                    peers=self.regions,
                    bound_ns=bound_ns,
                    dependent=dependent,
                    recorder=self.recorders[rank],
                    first_epoch=first_epochs[rank] if first_epochs else first_epoch,
                ),
                backend,
                resident_threads=room(backend.capabilities) // size,
                without=without,
            )
            for rank in range(size)
        ]

    def _region(self, spare: int) -> Region:
        memory = torch.zeros(self.layout.end + spare, dtype=torch.uint8, device=self.device)
        for lane in self.layout.lanes.values():
            memory[lane.offset : lane.offset + lane.nbytes].fill_(lane.fill)
        for guard in self.layout.guards:
            memory[guard : guard + GUARD_BYTES].fill_(GUARD_BYTE)
        return Region(memory)

    def launch(
        self,
        call: Call,
        choice: Choice,
        operands: Sequence[Operands],
        box: Box | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """One call of every rank, or of ``ranks``, each on its stream."""
        for rank in range(self.size) if ranks is None else ranks:
            self.channels[rank].launch(call, choice, operands[rank], box, self.streams[rank])

    def synchronize(self) -> None:
        self.backend.device.synchronize()

    def graphs(self, program: Callable[[int], None]) -> Callable[[], None]:
        """``program(rank)`` captured for each rank; what comes back replays all of them side by side."""
        made: list[Any] = []
        for rank in range(self.size):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.streams[rank].torch, capture_error_mode="thread_local"):  # type: ignore[attr-defined]
                program(rank)
            made.append(graph)

        def replay() -> None:
            for rank in range(self.size):
                with self.streams[rank]:
                    made[rank].replay()

        return replay

    def guards_hold(self) -> bool:
        """Whether no byte between the lanes of any rank has changed."""
        return all(
            bool((region.tensor[guard : guard + GUARD_BYTES] == GUARD_BYTE).all())
            for region in self.regions
            for guard in self.layout.guards
        )

    def errors(self) -> list[Any]:
        return [channel.error() for channel in self.channels]

    def delay(self, rank: int, cycles: int) -> None:
        """Hold a rank's stream back on the device."""
        with self.streams[rank]:
            torch.cuda._sleep(cycles)
