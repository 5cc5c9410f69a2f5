"""Captures of CUDA: torch records, the driver instantiates, uploads and launches.

Executables are made through the driver: a template can then be instantiated again after its executable was destroyed,
which torch's object cannot.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.backends.cuda import driver
from halma.backends.cuda.pools import CudaPool
from halma.backends.torch_device.device import TorchDevice
from halma.backends.torch_device.graphs import Template
from halma.backends.torch_device.pools import GraphPool
from halma.backends.torch_device.watch import CaptureWatch
from halma.hal.backend import GraphCounts

_NO_WORK = frozenset({"EMPTY", "WAIT_EVENT", "EVENT_RECORD", "MEM_ALLOC", "MEM_FREE"})


class CudaRecipe:
    """See :class:`halma.backends.torch_device.graphs.Recipe`.

    Args:
        device: its streams.
    """

    mode = "thread_local"
    """Calls of other threads do not break a capture."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def new_graph(self, pool: GraphPool) -> torch.cuda.CUDAGraph:
        """A graph that keeps its template."""
        return torch.cuda.CUDAGraph(keep_graph=True)

    def new_pool(self) -> CudaPool:
        """A pool of torch's allocator."""
        return CudaPool()

    def stop_recording(self, graph: Any, pool: GraphPool) -> None:
        """What ``capture_end()`` would have done."""
        torch._C._cuda_endAllocateToPool(self._device.index, pool.id)

    def counts(self, graph: torch.cuda.CUDAGraph, watch: CaptureWatch) -> GraphCounts:
        """The driver's nodes, counted."""
        kinds = driver.node_kinds(graph.raw_cuda_graph())
        copies = kinds.count("MEMCPY")
        kernels = sum(kind not in _NO_WORK for kind in kinds) - copies
        return GraphCounts(kernels=kernels, copies=copies, allocations=len(watch.uses))

    def instantiate(self, template: Template) -> Any:
        """An executable of the driver's, uploaded; None where torch's generators are used, so torch replays.

        Raises:
            RuntimeError: the driver has no memory for it.
        """
        if template.random:
            template.graph.instantiate()
            return None
        graph = driver.bindings().CUgraph(template.graph.raw_cuda_graph())
        handle = driver.call("cuGraphInstantiate", graph, 0)
        stream = self._device.upload_stream
        driver.call("cuGraphUpload", handle, driver.bindings().CUstream(stream.cuda_stream))
        stream.synchronize()
        return handle

    def launch(self, handle: Any, stream: int) -> None:
        """Queue it."""
        driver.call("cuGraphLaunch", handle, stream)

    def destroy(self, handle: Any) -> None:
        """Give it back; the template stays."""
        driver.call("cuGraphExecDestroy", handle)

    def retire(self, template: Template) -> None:
        """Nothing: the template can make another."""
