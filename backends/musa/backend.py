"""The MUSA backend, put together: for the device that is torch_musa's current one when it is made."""

from __future__ import annotations

from typing import Any

import torch.distributed as distributed

from halma.backends.musa import runtime
from halma.backends.musa.device import MusaDevice, attribute
from halma.backends.musa.graphs import EXECUTABLES, MusaRecipe
from halma.backends.musa.kernels import MusaKernels
from halma.backends.musa.memory import RuntimeMemory
from halma.backends.musa.needs import no_triton, triton_target
from halma.backends.musa.seam import toolchain, torch_musa
from halma.backends.musa.trials import MusaTrials, choose_mode
from halma.backends.musa.v4_policy import HEADROOM
from halma.backends.torch_device.collectives import TorchCollectives
from halma.backends.torch_device.device import ThreadState
from halma.backends.torch_device.graphs import TorchGraphs
from halma.backends.torch_device.memory import TorchMemory
from halma.hal.capabilities import UNKNOWN, Capabilities


class MusaBackend:
    """One Moore Threads GPU, or what stands in for it.

    Args:
        index: torch's number of the device; its current one by default, so a rank says
            ``torch.musa.set_device(local_rank)`` first.
        graph_capture: False makes a backend that cannot capture and is otherwise the same, to compare with (G4).
    """

    name = "musa"
    headroom = HEADROOM

    def __init__(self, index: int | None = None, *, graph_capture: bool = True) -> None:
        tools = toolchain()
        self.evidence = "simulated" if tools.simulated else "musa"
        number = torch_musa().current_device() if index is None else index
        state = ThreadState()
        # Whether a stream takes part in a capture is the runtime's to say, and a failing question must not pass (G25).
        missing = runtime.why_missing("musart")
        reason = missing if graph_capture else "this musa backend was made without capture (graph_capture=False)"
        self.device = MusaDevice(state, number)
        self.memory = TorchMemory(self.device.family, number, RuntimeMemory(number, self.device.torch_device))
        recipe = MusaRecipe(number)
        self.graphs = TorchGraphs(self.device, state, recipe, reason)
        self.kernels = MusaKernels(self.device, state)
        self.collectives = (tools.collectives or TorchCollectives)(self, tools.library_backend, _no_library)
        self.trials = MusaTrials(self.device, self.graphs, self.memory)
        self.capabilities = self._capabilities(recipe)

    def _capabilities(self, recipe: MusaRecipe) -> Capabilities:
        """What was tried out, what is known of the architecture, and unknown for the rest (B8)."""
        ask, trials = self.trials.ask, self.trials
        captures = choose_mode(trials, recipe) if self.graphs.unsupported() is None else False
        kernels = self.kernels.unsupported() is None
        threads = attribute("threads_per_multiprocessor", self.device.index)
        return Capabilities(
            graph_capture=captures,
            graph_segments=ask("graph_segments", trials.graph_segments) if captures else False,
            graph_parameters=captures,  # from the dispatcher; see halma.backends.torch_device.watch
            graph_executable_limit=EXECUTABLES,
            graph_reinstantiate=False,  # see halma.backends.musa.graphs
            memory_info_exact=False,
            graph_debug_dump=False,  # 2.7.1's destroys the template that reset() destroys again
            thread_local_capture=self._thread_local(recipe) if captures else False,
            pool_freed_by_reset=False,
            warp_width=trials.warp_width(self.device),
            remote_store_atomicity=UNKNOWN,  # nothing public says it of MTLink
            stream_mixing=kernels,
            dependent_launch=False,
            resident_threads=UNKNOWN if threads is None else threads * self.device.multiprocessors,
            ipc=ask("ipc", trials.ipc) if self.memory.not_exportable() is None else False,
            fp8_e4m3fn=trials.fp8(self.device),
            float64=ask("float64", trials.float64),
            row_invariant=False,
            triton_target=None if no_triton() else triton_target(),
            collective_backend=self.collectives.torch_backend if self.collectives.torch_backend_there() else None,
        )

    def _thread_local(self, recipe: MusaRecipe) -> Any:
        """In the global mode another thread's work breaks a capture, by definition."""
        if recipe.mode == "global":
            return False
        return self.trials.ask("thread_local_capture", self.trials.thread_local_capture)


def _no_library() -> str | None:
    name = toolchain().library_backend
    if distributed.is_backend_available(name):
        return None
    return f"this torch_musa was built without {name} (builds for S80-class devices are)"
