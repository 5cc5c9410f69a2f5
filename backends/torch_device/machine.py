"""A machine's devices, as a probe tells of them, and asking a child process about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halma.backends.torch_device.visible import Visible

CHILD_SECONDS = 20.0
"""A driver that hangs must not hang us; starting one on a machine with eight devices takes a few seconds."""


class NoDriver(Exception):
    """The driver, or who would tell about it, does not answer; the text is the reason."""


@dataclass(frozen=True)
class Gpu:
    """One device of the machine, visible or not."""

    name: str
    uuid: str
    nbytes: int


def listed(gpus: Sequence[Gpu], chosen: Visible) -> str:
    """The visible devices for ``halma doctor``."""
    return "; ".join(f"{gpus[at].name}, {gpus[at].nbytes / 2**30:.0f} GiB" for at in chosen.positions)


def summary(gpus: Sequence[Gpu], chosen: Visible) -> str:
    """How many devices are visible, and why not all of them."""
    count = len(chosen.positions)
    text = f"{count} device{'s' if count > 1 else ''}: {gpus[chosen.positions[0]].name}"
    return text + (f" ({chosen.why}; the machine has {len(gpus)})" if chosen.why else "")


@dataclass(frozen=True)
class Asked:
    """A vendor's driver, to be asked by a child process.

    Attributes:
        vendor: for messages: ``NVIDIA``.
        source: a program that prints ``{"gpus": [[name, uuid, bytes], ...], ...}``, or ends with the reason.
        no_device: the reason that means an answer: there is a driver and no device.
        hide: the variable that would keep devices from the child.
    """

    vendor: str
    source: str
    no_device: str
    hide: str


def ask_child(asked: Asked, *, seconds: float, driver_files: Sequence[str]) -> dict[str, Any]:
    """What the child printed, with ``gpus`` as :class:`Gpu`; it sees every device of the machine.

    Raises:
        NoDriver: no driver is loaded, it fails, or it does not answer in time.
    """
    vendor = asked.vendor
    if not any(os.path.exists(path) for path in driver_files):
        raise NoDriver(f"no {vendor} driver: none of {', '.join(driver_files)} exists")
    hidden = {name: value for name, value in os.environ.items() if name != asked.hide}
    try:
        run = subprocess.run(
            [sys.executable, "-c", asked.source],
            capture_output=True, text=True, timeout=seconds, env=hidden, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoDriver(f"the {vendor} driver did not answer a child process within {seconds:g} s") from None
    if run.returncode:
        said = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        if said == asked.no_device:
            return {"gpus": ()}
        raise NoDriver(f"no usable {vendor} driver: a child process that asked it ended with: {said}")
    try:
        told = json.loads(run.stdout)
        return {**told, "gpus": tuple(Gpu(str(name), str(uuid), int(size)) for name, uuid, size in told["gpus"])}
    except (ValueError, KeyError, TypeError) as error:
        raise NoDriver(f"a child process that asked the driver answered {run.stdout[:80]!r}") from error
