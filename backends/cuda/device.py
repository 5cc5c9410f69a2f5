"""A CUDA device: torch.cuda's names, and streams that cuda.core takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Final

import torch

from halma.backends.cuda import driver
from halma.backends.torch_device.device import DeviceStream, ThreadState, TorchDevice
from halma.backends.torch_device.family import Family

_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: the legacy default stream and this one do not wait for each other."""


def new_queue(index: int) -> torch.cuda.Stream:
    """A queue of the driver's own making, which torch gives to nobody. Never destroyed."""
    return torch.cuda.ExternalStream(int(driver.call("cuStreamCreate", _NON_BLOCKING)), device=index)


@cache
def family() -> Family:
    """The record of torch.cuda's names."""
    return Family(
        name="cuda",
        device_type="cuda",
        module=torch.cuda,
        raw=attrgetter("cuda_stream"),
        get_current=torch._C._cuda_getCurrentStream,
        set_current=torch._C._cuda_setStream,
        on_device=attrgetter("is_cuda"),
        ensure_context=driver.ensure_context,
        is_capturing=driver.is_capturing,
        why_no_driver=lambda: driver.why_missing(),
        new_queue=new_queue,
        more_queues="install halma[cuda], whose bindings make more",
        empty_graph="The CUDA Graph is empty",
    )


class CudaStream(DeviceStream):
    """A stream that cuda.core takes as it is."""

    __slots__ = ()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CudaDevice(TorchDevice):
    """Properties, memory, streams and events of one device.

    Args:
        state: what is current on each thread, shared with the graph part.
        index: torch's number of the device.
    """

    stream_class = CudaStream

    def __init__(self, state: ThreadState, index: int) -> None:
        super().__init__(family(), state, index)

    def properties(self) -> Mapping[str, str]:
        """Name, architecture, sizes and versions, for reports."""
        found = torch.cuda.get_device_properties(self.index)
        return {
            "name": found.name,
            "arch": f"sm_{found.major}{found.minor}",
            "multiprocessors": str(found.multi_processor_count),
            "memory": f"{found.total_memory:,} bytes",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }
