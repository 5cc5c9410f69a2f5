"""A MUSA device: torch_musa's names, and what its properties do not say asked of the runtime."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch

from halma.backends.musa import runtime
from halma.backends.musa.seam import toolchain, torch_musa
from halma.backends.torch_device.device import ThreadState, TorchDevice
from halma.backends.torch_device.family import Family

NAME: Final = "musa"
_NON_BLOCKING: Final = 1
"""musaStreamNonBlocking: the legacy default stream and this one do not wait for each other."""

ATTRIBUTES: Final = {
    "warp_size": 10,
    "clock_khz": 13,
    "shared_bytes": 8,
    "shared_bytes_optin": 97,
    "threads_per_multiprocessor": 39,
}
"""What torch_musa's properties lack -> number of the runtime's device attribute (CUDA's, by the rule of names)."""


def attribute(name: str, index: int) -> int | None:
    """A device attribute, or None where the runtime does not tell."""
    try:
        return runtime.value("musaDeviceGetAttribute", ATTRIBUTES[name], index) or None
    except (runtime.LibraryError, runtime.Missing):
        return None


class _Ready(threading.local):
    device: int | None = None


_ready = _Ready()


def ensure_context(index: int) -> None:
    """Make the device torch's current one on this thread, and with it the context that the libraries use.

    What this thread was made ready for is noted and not asked again: a caller who moves the thread to another device
    (``torch_musa.set_device``) between two calls of ours moves it back before the next. Asking the runtime each time
    would cost more than the note itself, on every launch.
    """
    if _ready.device != index:
        torch_musa().set_device(index)
        _ready.device = index


def is_capturing(stream: int) -> bool:
    """Whether the stream of this handle takes part in a capture, an invalidated one included."""
    return runtime.value_after("musaStreamIsCapturing", stream) != 0


def new_queue(index: int) -> Any:
    """A queue of the runtime's own making, which torch gives to nobody. Never destroyed."""
    return torch_musa().ExternalStream(runtime.value("musaStreamCreateWithFlags", _NON_BLOCKING), device=index)


def _on_device(kind: str) -> Any:
    def test(tensor: torch.Tensor) -> bool:
        return tensor.device.type == kind

    return test


@cache
def family() -> Family:
    """The record of torch_musa's names."""
    module, kind = torch_musa(), toolchain().device_type
    return Family(
        name=NAME,
        device_type=kind,
        module=module,
        raw=attrgetter("musa_stream"),
        get_current=module._MUSAC._musa_getCurrentStream,
        set_current=module._MUSAC._musa_setStream,
        on_device=_on_device(kind),
        ensure_context=ensure_context,
        is_capturing=is_capturing,
        why_no_driver=lambda: runtime.why_missing("musart"),
        new_queue=new_queue,
        more_queues="see that libmusart.so can be loaded, which makes more",
        empty_graph="The MUSA Graph is empty",
    )


class MusaDevice(TorchDevice):
    """Properties, memory, streams and events of one device.

    Args:
        state: what is current on each thread, shared with the graph part.
        index: torch's number of the device.
    """

    def __init__(self, state: ThreadState, index: int) -> None:
        super().__init__(family(), state, index)
        found = torch_musa().get_device_properties(index)
        self.capability = (int(found.major), int(found.minor))
        self.multiprocessors = int(found.multi_processor_count)

    def properties(self) -> Mapping[str, str]:
        """Name, architecture, sizes and versions, for reports. torch_musa tells seven properties and no more."""
        found, simulated = torch_musa().get_device_properties(self.index), toolchain().simulated
        return {
            "name": found.name,
            "arch": "mp_{}{}".format(*self.capability),
            "multiprocessors": str(self.multiprocessors),
            "memory": f"{found.total_memory:,} bytes",
            "torch": torch.__version__,
            "torch_musa": str(getattr(torch_musa(), "__version__", "unknown")),
            NAME: str(getattr(torch.version, NAME, "unknown")),
            **({"simulated": simulated} if simulated else {}),
        }
