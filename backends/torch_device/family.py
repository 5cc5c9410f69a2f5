"""The record of names and calls by which the shared code knows a device family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MODULE_NAMES = (
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "is_current_stream_capturing",
    "mem_get_info",
    "memory_reserved",
    "stream",
    "synchronize",
)
"""What the shared code takes from a family's module: with torch.cuda's names, signatures and meaning."""


@dataclass(frozen=True, eq=False)
class Family:
    """One family: which module of torch drives it, under which names, and what its driver is asked.

    Streams, events and graphs below are the module's own objects.

    Attributes:
        name: of the backend.
        device_type: torch's type of the family's tensors.
        module: torch's module for the family: ``torch.cuda`` or what has its functions.
        raw: a stream -> the driver's handle of it.
        get_current: number of a device -> (stream_id, device_index, device_type) of this thread's current stream.
        set_current: makes the stream of these three keywords the current one.
        on_device: whether a tensor lies on a device of the family.
        ensure_context: makes the device's context current on this thread.
        is_capturing: whether the stream of this handle takes part in a capture.
        why_no_driver: why the driver's own calls cannot be made, or None.
        new_queue: number of a device -> a stream of the driver's own making, that torch gives to nobody.
        more_queues: what to install where there are no more of torch's streams.
        empty_graph: how torch's warning about a graph without nodes begins.
    """

    name: str
    device_type: str
    module: Any
    raw: Callable[[Any], int]
    get_current: Callable[[int], tuple[int, int, int]]
    set_current: Callable[..., None]
    on_device: Callable[[torch.Tensor], bool]
    ensure_context: Callable[[int], None]
    is_capturing: Callable[[int], bool]
    why_no_driver: Callable[[], str | None]
    new_queue: Callable[[int], Any]
    more_queues: str
    empty_graph: str

    def torch_device(self, index: int) -> torch.device:
        """A device of the family."""
        return torch.device(self.device_type, index)
