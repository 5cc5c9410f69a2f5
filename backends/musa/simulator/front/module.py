"""``torch_musa`` itself, put together of the stand-in's parts."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from halma.backends.musa.simulator.chosen import musac
from halma.backends.musa.simulator.front import device, graphs, memory, stream

_C = musac()

VERSION = "2.7.1"
"""The tag whose names and signatures the stand-in has."""

_DEVICE = (
    "set_device", "current_device", "device_count", "is_available", "synchronize", "get_device_name",
    "get_device_properties", "get_device_capability", "can_device_access_peer", "get_arch_list",
    "is_bf16_supported", "is_tf32_supported",
)  # fmt: skip
_STREAM = (
    "Stream", "ExternalStream", "Event", "StreamContext", "stream", "set_stream", "current_stream", "default_stream",
    "_set_stream_by_id",
)  # fmt: skip
_GRAPHS = (
    "MUSAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing", "update_musa_graph_with_profile",
)  # fmt: skip
_MEMORY = (
    "set_per_process_memory_fraction", "empty_cache", "memory_stats", "memory_stats_as_nested_dict",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats", "memory_snapshot", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info", "get_allocator_backend",
    "MemPool", "MemPoolContext", "use_mem_pool",
)  # fmt: skip
_MUSART = ("musaError", "musaGetErrorString", "musaMemGetInfo", "musaHostRegister", "musaHostUnregister")


def make(simulated: str, more: dict[str, Any]) -> ModuleType:
    """The module; ``simulated`` says what stands in for the device, ``more`` are names of the engine's own."""
    made = ModuleType("torch_musa", f"a stand-in for torch_musa {VERSION}: {simulated}")
    made.__spec__ = ModuleSpec("torch_musa", None)
    made.__path__ = []  # a package: torch_musa._MUSAC is imported from it
    for home, names in ((device, _DEVICE), (stream, _STREAM), (graphs, _GRAPHS), (memory, _MEMORY)):
        vars(made).update({name: getattr(home, name) for name in names})
    made.__dict__.update(
        __version__=VERSION,
        _MUSAC=_C,
        device=device.Device,
        device_of=device.DeviceOf,
        memory=memory,
        _lazy_init=_C._musa_init,
        is_initialized=lambda: True,
        _is_in_bad_fork=_C._musa_isInBadFork,
        musart=_musart,
        mccl=SimpleNamespace(version=_C._mccl_version),
        _halma_simulated=simulated,
        **more,
    )
    return made


def _musart() -> Any:
    """What 2.7.1's binding offers of libmusart, and no more: there is no IPC among it."""
    return SimpleNamespace(**{name: getattr(_C._musart, name) for name in _MUSART if hasattr(_C._musart, name)})
