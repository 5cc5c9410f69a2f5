"""Devices: signatures of torch_musa/core/device.py, 2.7.1."""

from __future__ import annotations

from typing import Any

import torch

from halma.backends.musa.simulator.chosen import musac

_C = musac()
OWN_TYPES = ("musa", _C._device_type) if hasattr(_C, "_device_type") else ("musa",)
"""Types of torch devices that mean this device."""


def index_of(device: Any, optional: bool = False) -> int:
    """A device's number; the current one for None where that is allowed, and for a device without a number.

    Raises:
        ValueError: it is none of ours.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type not in OWN_TYPES:
            raise ValueError(f"Expected a musa device, but got: {device}")
        device = device.index
    elif isinstance(device, int):
        return device
    elif device is not None:
        raise ValueError(f"Expected a torch.device or an integer, but got: {device!r}")
    elif not optional:
        raise ValueError("Expected a torch.device with a specified index or an integer, but got: None")
    return _C._musa_getDevice() if device is None else device


class Device:
    """A device is current inside; nothing for None or a negative number."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C._musa_exchangeDevice(self.idx)

    def __exit__(self, *args: object) -> bool:
        self.idx = _C._musa_maybeExchangeDevice(self.prev_idx)
        return False


class DeviceOf(Device):
    """The device of a tensor is current inside."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type in OWN_TYPES else -1)


def set_device(device: Any) -> None:
    index = index_of(device)
    if index >= 0:
        _C._musa_setDevice(index)


def current_device() -> int:
    return _C._musa_getDevice()


def device_count() -> int:
    return _C._musa_getDeviceCount()


def is_available() -> bool:
    return _C._musa_getDeviceCount() > 0


def synchronize(device: Any = None) -> None:
    with Device(device):
        _C._musa_synchronize()


def get_device_properties(device: Any) -> Any:
    index = index_of(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _C._get_device_properties(index)


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    mine, other = index_of(device, optional=True), index_of(peer_device)
    if not 0 <= mine < device_count():
        raise AssertionError("Invalid device id")
    if not 0 <= other < device_count():
        raise AssertionError("Invalid peer device id")
    return _C._musa_canDeviceAccessPeer(mine, other)


def get_arch_list() -> list[str]:
    return _C._musa_getArchFlags().split() if is_available() else []


def is_bf16_supported(including_emulation: bool = True) -> bool:
    major, minor = get_device_capability(current_device())
    return major * 10 + minor >= 22 or including_emulation


def is_tf32_supported() -> bool:
    return is_bf16_supported(including_emulation=False)
