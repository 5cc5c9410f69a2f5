"""The CPU backend, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from halma.backends.cpu.channel import CpuChannel
from halma.backends.cpu.device import CpuDevice
from halma.backends.cpu.exchange import CpuExchange
from halma.backends.cpu.graphs import CpuGraphs
from halma.backends.cpu.memory import CpuMemory
from halma.backends.cpu.memory_order import store_atomicity, why_unordered
from halma.backends.cpu.rings import CpuRings
from halma.backends.cpu.streams import StreamState
from halma.hal.backend import KernelSource, Stream
from halma.hal.capabilities import Capabilities
from halma.hal.collectives.contract import ChannelDriver, ChannelSite
from halma.hal.collectives.exchange_contract import ExchangeDriver, ExchangeSite
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.ring_contract import RingDriver, RingSite
from halma.hal.errors import CapabilityError


class CpuBackend:
    """A device family of one: the host.

    Args:
        graph_capture: False makes a backend that cannot capture and is otherwise the same, to compare with (G4).
    """

    name = "cpu"
    evidence = "cpu"

    def __init__(self, *, graph_capture: bool = True) -> None:
        state = StreamState()
        self.device = CpuDevice(state)
        self.memory = CpuMemory()
        reason = None if graph_capture else "this cpu backend was made without capture (graph_capture=False)"
        self.graphs = CpuGraphs(self.device, state, reason)
        self.kernels = NoKernels()
        self.collectives = SharedMemoryCollectives()
        self.capabilities = Capabilities(
            graph_capture=graph_capture,
            graph_segments=graph_capture,
            graph_parameters=graph_capture,
            graph_executable_limit=None,
            graph_reinstantiate=graph_capture,
            memory_info_exact=False,  # it is the whole machine's
            graph_debug_dump=False,
            thread_local_capture=False,  # another thread's work is refused while a capture is open
            pool_freed_by_reset=True,
            remote_store_atomicity=store_atomicity(),
            stream_mixing=False,
            dependent_launch=False,
            ipc=self.memory.not_exportable() is None,
            fp8_e4m3fn=_has_fp8_e4m3fn(),
            float64=True,
            row_invariant=True,
            triton_target=None,
            collective_backend="gloo",
        )


class NoKernels:
    """There is no kernel compiler here: ops run their references or routes made of ATen and Python."""

    dialect = ""
    clock_khz = None

    def unsupported(self) -> str | None:
        """The reason."""
        return "the cpu backend compiles no kernels: its ops are ATen calls and opaque routes"

    def load(self, source: KernelSource, entries: Sequence[str]) -> Mapping[str, Any]:
        """Refuses.

        Raises:
            CapabilityError: always.
        """
        self._refuse(f"to load {source.name!r}")

    def launch(
        self,
        kernel: Any,
        grid: int,
        block: int,
        args: Sequence[Any],
        *,
        stream: Stream,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Refuses.

        Raises:
            CapabilityError: always.
        """
        self._refuse("to launch a kernel")

    def _refuse(self, asked: str) -> NoReturn:
        raise CapabilityError(
            "the cpu backend has no kernels", asked=asked, found=self.unsupported(), do="use the op's reference route"
        )


class SharedMemoryCollectives:
    """Channels over memory that processes share; gloo for bootstrap and for what no channel does."""

    torch_backend = "gloo"

    def unsupported(self) -> str | None:
        """Why this torch or this machine cannot, or None."""
        import torch.distributed as distributed

        if not distributed.is_available():
            return "this torch was built without torch.distributed"
        if not distributed.is_gloo_available():
            return "this torch was built without gloo"
        return why_unordered()

    def channel(self, site: ChannelSite) -> ChannelDriver:
        """The driver of one channel."""
        return CpuChannel(site)

    def rings(self, site: RingSite) -> RingDriver:
        """The driver of this rank's ends of rings."""
        return CpuRings(site)

    def exchange_blocks(self, size: int) -> int:
        """A process is one block; the number is not used."""
        return 2

    def no_exchange(self, geometry: Geometry) -> str | None:
        """Why there is no exchange over shared memory, or None."""
        return None

    def exchange(self, site: ExchangeSite) -> ExchangeDriver:
        """The driver of one exchange."""
        return CpuExchange(site)


def _has_fp8_e4m3fn() -> bool:
    """Whether the fp8 type is the OCP one: 0x80 is minus zero, 0x7e is 448, 0x7f is NaN (K3)."""
    dtype = getattr(torch, "float8_e4m3fn", None)
    if dtype is None:
        return False
    zero, largest, nan = torch.tensor([0x80, 0x7E, 0x7F], dtype=torch.uint8).view(dtype).to(torch.float32).tolist()
    return zero == 0 and str(zero) == "-0.0" and largest == 448.0 and nan != nan
