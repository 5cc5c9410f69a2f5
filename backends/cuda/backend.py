"""The CUDA backend, put together: for the device that is torch's current one when it is made."""

from __future__ import annotations

import torch
import torch.distributed as distributed

from halma.backends.cuda import driver
from halma.backends.cuda.device import CudaDevice
from halma.backends.cuda.graphs import CudaRecipe
from halma.backends.cuda.kernels import DEPENDENT_FROM, CudaKernels
from halma.backends.cuda.memory import DriverMemory
from halma.backends.cuda.trials import CudaTrials
from halma.backends.torch_device.collectives import TorchCollectives
from halma.backends.torch_device.device import ThreadState
from halma.backends.torch_device.graphs import TorchGraphs
from halma.backends.torch_device.memory import TorchMemory
from halma.hal.capabilities import UNKNOWN, Capabilities


class CudaBackend:
    """One NVIDIA GPU.

    Args:
        index: torch's number of the device; its current one by default, so a rank says
            ``torch.cuda.set_device(local_rank)`` first.
        graph_capture: False makes a backend that cannot capture and is otherwise the same, to compare with (G4).
    """

    name = "cuda"
    evidence = "cuda"

    def __init__(self, index: int | None = None, *, graph_capture: bool = True) -> None:
        torch.cuda.init()
        number = torch.cuda.current_device() if index is None else index
        state, missing = ThreadState(), driver.why_missing()
        reason = missing if graph_capture else "this cuda backend was made without capture (graph_capture=False)"
        self.device = CudaDevice(state, number)
        self.memory = TorchMemory(self.device.family, number, DriverMemory(number))
        self.graphs = TorchGraphs(self.device, state, CudaRecipe(self.device), reason)
        self.kernels = CudaKernels(self.device, state, missing)
        self.collectives = TorchCollectives(self, "nccl", _no_nccl)
        self.trials = CudaTrials(self.device, self.graphs, self.memory)
        self.capabilities = self._capabilities(missing)

    def _capabilities(self, missing: str | None) -> Capabilities:
        ask, trials, captures = self.trials.ask, self.trials, self.graphs.unsupported() is None
        properties = torch.cuda.get_device_properties(self.device.index)
        graph_capture = ask("graph_capture", trials.graph_capture) is True if captures else False
        return Capabilities(
            graph_capture=graph_capture,
            graph_segments=ask("graph_segments", trials.graph_segments) if graph_capture else False,
            graph_parameters=graph_capture,  # from the dispatcher; see halma.backends.torch_device.watch
            graph_executable_limit=None,
            graph_reinstantiate=ask("graph_reinstantiate", trials.graph_reinstantiate) if graph_capture else False,
            # The driver grants memory in steps of 2 MiB and reuses what earlier graphs gave back, and other
            # processes take from the same device: one capture's cost cannot be read from it.
            memory_info_exact=False,
            graph_debug_dump=False,
            thread_local_capture=ask("thread_local_capture", trials.thread_local_capture) if graph_capture else False,
            pool_freed_by_reset=False,  # the pool is the workspace's, and lives as long as it does
            warp_width=properties.warp_size,
            remote_store_atomicity=UNKNOWN if missing else ask("remote_store_atomicity", trials.remote_store_atomicity),
            stream_mixing=missing is None,
            dependent_launch=missing is None and (properties.major, properties.minor) >= DEPENDENT_FROM,
            resident_threads=properties.multi_processor_count * properties.max_threads_per_multi_processor,
            ipc=False if missing else ask("ipc", trials.ipc),
            fp8_e4m3fn=ask("fp8_e4m3fn", trials.fp8_e4m3fn),
            float64=ask("float64", trials.float64),
            row_invariant=False,  # matrix products choose their kernel by the number of rows
            triton_target="cuda",
            collective_backend="nccl" if self.collectives.torch_backend_there() else None,
        )


def _no_nccl() -> str | None:
    return None if distributed.is_nccl_available() else "this torch was built without nccl"
