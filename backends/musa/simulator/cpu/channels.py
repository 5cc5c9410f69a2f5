"""Channels, exchanges and rings where no kernel can run: the CPU's drivers, over the memory behind the device's.

The arena is this backend's: allocated by ``musaMalloc``, exported and opened by its handles, in rank processes. What
moves messages is the CPU backend's code instead of the dialect's kernels; the protocol in memory is one and the same.
A captured call is a node of the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from halma.backends.cpu.channel import CpuChannel
from halma.backends.cpu.exchange import CpuExchange
from halma.backends.cpu.memory_order import why_unordered
from halma.backends.cpu.rings import CpuRings
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu.blocks import block_of
from halma.backends.torch_device.collectives import TorchCollectives
from halma.backends.torch_device.memory import DeviceMemory
from halma.hal.backend import Stream
from halma.hal.collectives.contract import Box, Call, ChannelSite, Choice, Operands, StreamMix
from halma.hal.collectives.exchange_contract import ExchangeCall, ExchangeSite, Layout, Outgoing, Returning
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.ring_contract import RingItem, RingNext, RingSite, RingStaging
from halma.hal.graph.current import current_recorder, note_launch

_RECORDS = (
    ChannelSite, ExchangeSite, Layout, Operands, Outgoing, Returning, RingNext, RingSite, RingStaging, StreamMix,
)  # fmt: skip


@dataclass
class _HostMemory:
    """A :class:`halma.hal.backend.SharedMemory` as the CPU's drivers see it."""

    tensor: torch.Tensor
    address: int

    def close(self) -> None:
        """The arena closes its own."""


def hosted(value: Any) -> Any:
    """``value`` with CPU tensors over the same memory for those of the device; records keep their type."""
    if isinstance(value, torch.Tensor):
        return value if value.is_cpu else block_of(value).alias(value)
    if isinstance(value, (list, tuple)):
        return [hosted(item) for item in value]
    if isinstance(value, _RECORDS):
        return replace(value, **{one.name: hosted(getattr(value, one.name)) for one in fields(value)})
    if isinstance(value, DeviceMemory):
        return _HostMemory(hosted(value.tensor), value.address)
    return value


def put(
    name: str, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor],
    parameters: Sequence[tuple[str, Any]],
) -> None:  # fmt: skip
    """One call on the current stream: recorded where the thread records."""
    recorder = current_recorder()
    if recorder is not None:
        recorder.record_node(name, partial(_queue, run), reads=reads, writes=writes, parameters=parameters)
        return
    note_launch()
    _queue(run)


def _queue(run: Callable[[], None]) -> None:
    stream = driver.current_stream()
    if stream.capture is not None:
        stream.capture.add(stream, run)
    else:
        run()


class SimChannel(CpuChannel):
    """See :class:`halma.hal.collectives.contract.ChannelDriver`."""

    def __init__(self, site: ChannelSite) -> None:
        super().__init__(hosted(site))
        self._control = site.own.tensor[site.layout.control :]

    def launch(self, call: Call, choice: Choice, operands: Operands, box: Box | None, stream: Stream) -> None:
        """On ``stream``, which the caller has made the current one where it captures."""
        reads = [t for t in (operands.source, operands.residual, operands.weight) if t is not None]
        writes = [t for t in (operands.out, operands.norm_out, operands.scale_out) if t is not None]
        parameters = (
            ("call", call.describe()),
            ("digest", call.digest),
            ("way", f"{choice.algorithm.name}/{choice.wire.name}"),
            ("box", box and (box.offset, box.stride)),
            ("eps", operands.eps),
        )
        run = partial(self._run, call, choice, hosted(operands), box)
        put(f"collective:{self._name}", run, reads, [*writes, self._control], parameters)


class SimExchange(CpuExchange):
    """See :class:`halma.hal.collectives.exchange_contract.ExchangeDriver`."""

    def __init__(self, site: ExchangeSite) -> None:
        super().__init__(hosted(site))
        self._site = site
        self._given: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def dispatch(self, call: ExchangeCall, operands: Outgoing, stream: Stream) -> None:
        """As the CPU's, on the memory behind the operands."""
        landing = [self._site.rows, *([] if self._site.scales is None else [self._site.scales])]
        layout = operands.layout.tensors()
        if operands.ids is None or operands.weights is None:
            self._given = ([operands.x, *layout], landing)
        else:
            self._given = ([operands.x, operands.ids, operands.weights], [*layout, *landing])
        super().dispatch(call, hosted(operands), stream)

    def combine(self, call: ExchangeCall, operands: Returning, stream: Stream) -> None:
        """As :meth:`dispatch`."""
        layout = operands.layout
        self._given = ([operands.parts, layout.slots, layout.tokens, layout.sources], [operands.out])
        super().combine(call, hosted(operands), stream)

    def _make(
        self, call: ExchangeCall, work: Callable[[int], None], poison: Callable[[], Any],
        reads: list[torch.Tensor], writes: list[torch.Tensor],
    ) -> None:  # fmt: skip
        own_reads, own_writes = self._given
        control = self._site.channel.own.tensor[self._site.channel.layout.control :]
        parameters = (("call", call.describe()), ("digest", call.digest))
        run = partial(self._run, call, work, poison)
        put(f"collective:{self._memory.layout.name}", run, own_reads, [*own_writes, control], parameters)


class SimRings(CpuRings):
    """See :class:`halma.hal.collectives.ring_contract.RingDriver`."""

    def __init__(self, site: RingSite) -> None:
        super().__init__(hosted(site))
        self._given: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._control = site.own.tensor

    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stream: Stream) -> None:
        """As the CPU's, on the memory behind the operands."""
        self._given = ([x, ids, weights], [])
        super().submit(layer, hosted(x), hosted(ids), hosted(weights), stream)

    def collect(self, out: torch.Tensor, stream: Stream) -> None:
        """As :meth:`submit`."""
        self._given = ([], [out])
        super().collect(hosted(out), stream)

    def take(self, item: RingItem, staging: RingStaging, stream: Stream) -> None:
        """As :meth:`submit`; never captured."""
        super().take(item, hosted(staging), stream)

    def reply(self, item: RingItem, out: torch.Tensor, before: int, stream: Stream) -> None:
        """As :meth:`take`."""
        super().reply(item, hosted(out), before, stream)

    def take_next(self, staging: RingStaging, seen: RingNext, patience_ns: int, stream: Stream) -> None:
        """As :meth:`submit`."""
        told = [one for one in (seen.layer, seen.shared, seen.index, seen.counted) if one is not None]
        self._given = ([], [staging.rows, staging.ids, staging.weights, *told])
        super().take_next(hosted(staging), hosted(seen), patience_ns, stream)

    def reply_next(self, out: torch.Tensor, beside: torch.Tensor | None, stream: Stream) -> None:
        """As :meth:`submit`."""
        self._given = ([out, *([] if beside is None else [beside])], [out])
        super().reply_next(hosted(out), hosted(beside), stream)

    def _make(
        self, name: str, run: Callable[[], None], layer: int, reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        own_reads, own_writes = self._given
        put("collective:rings", run, own_reads, [*own_writes, self._control], (("call", name), ("layer", layer)))


class HostCollectives(TorchCollectives):
    """The backend's collectives, with the drivers above in place of kernels."""

    def unsupported(self) -> str | None:
        """Why this torch or this machine cannot, or None."""
        return self.no_bootstrap() or why_unordered()

    def channel(self, site: ChannelSite) -> SimChannel:
        """The driver of one channel."""
        return SimChannel(site)

    def rings(self, site: RingSite) -> SimRings:
        """The driver of this rank's ends of rings."""
        return SimRings(site)

    def exchange_blocks(self, size: int) -> int:
        """A process is one block; the number is not used."""
        return 2

    def no_exchange(self, geometry: Geometry) -> str | None:
        """None: there is one."""
        return None

    def exchange(self, site: ExchangeSite) -> SimExchange:
        """The driver of one exchange."""
        return SimExchange(site)
