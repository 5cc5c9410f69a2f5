"""Which of a machine's devices a process of ours would see, by a vendor's variable.

``CUDA_VISIBLE_DEVICES``: the driver reads the list from the left and stops at the first entry that names no device;
what stands behind it is not visible either. An empty variable hides all devices. A device named twice makes the whole
list void.
``MUSA_VISIBLE_DEVICES`` is read by the same rule; that it has no other is an assumption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Of families that a machine may be set up for."""
_NUMBER = re.compile(r"\s*([+-]?\d+)")  # as strtol: what follows the digits is not looked at
_UUID = ("GPU-", "MIG-")


@dataclass(frozen=True)
class Visible:
    """Positions of the visible devices among the machine's, in the order of the variable, and what hides others."""

    positions: tuple[int, ...]
    why: str = ""


def visible_devices(variable: str, value: str | None, uuids: Sequence[str]) -> Visible:
    """What ``value`` of ``variable`` leaves of the devices with these ``uuids``; None means that it is not set."""
    everything = tuple(range(len(uuids)))
    if value is None:
        return Visible(everything)
    if not value.strip():
        return Visible((), f"{variable} is empty, which hides every device")
    found: list[int] = []
    for entry in value.split(","):
        position = _position(entry, uuids)
        if position is None:
            return Visible(tuple(found), f"{variable}={value} ends at {entry.strip()!r}, which names no device here")
        if position in found:
            return Visible((), f"{variable}={value} names device {position} twice, which hides every device")
        found.append(position)
    return Visible(tuple(found), f"{variable}={value}" if tuple(found) != everything else "")


def _position(entry: str, uuids: Sequence[str]) -> int | None:
    entry = entry.strip()
    if entry.upper().startswith(_UUID):
        matches = [index for index, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        return matches[0] if len(matches) == 1 else None
    number = _NUMBER.match(entry)
    index = int(number[1]) if number else -1
    return index if 0 <= index < len(uuids) else None


def other_variables(own: str, environment: Mapping[str, str]) -> str:
    """Variables of other families that are set while ``own`` is not: whoever set them may mean this family."""
    if own in environment:
        return ""
    return ", ".join(f"{name}={environment[name]}" for name in VARIABLES if name != own and name in environment)
