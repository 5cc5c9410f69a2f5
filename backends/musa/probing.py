"""Looks for Moore Threads GPUs without touching them: pymtml where it can be imported, else a child process.

No torch, no torch_musa and no driver initialised in this process (B1).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from halma.backends.musa.compiler import NO_MCC, find_mcc
from halma.backends.musa.contract import CONTRACT, version_warning
from halma.backends.musa.seam import LIBRARIES
from halma.backends.torch_device import machine as machines
from halma.backends.torch_device.machine import CHILD_SECONDS, Asked, Gpu, NoDriver
from halma.backends.torch_device.visible import other_variables, visible_devices
from halma.hal.backend import Probe

VARIABLE: Final = "MUSA_VISIBLE_DEVICES"
OLDEST: Final = (2, 7)
"""Before it, graphs are not as they are written down."""
DRIVER_FILES: Final = ("/dev/mtgpu.0", "/dev/mtgpu0", "/sys/module/mtgpu")
"""One of them is there wherever the driver is loaded; without any, no child is started."""


@dataclass(frozen=True)
class Machine:
    """What the driver says."""

    gpus: tuple[Gpu, ...]
    driver: str
    told_by: str


def probe(environment: Mapping[str, str] = os.environ) -> Probe:
    """Whether the backend can be used here; every reason is one that a person can act on. Never raises."""
    try:
        problem, detail = installed(installed_version)
        if problem is not None:
            return Probe(False, problem, detail)
        machine = look()
    except NoDriver as error:
        return Probe(False, str(error))
    except Exception as error:  # a plugin's probe never raises; the reason is shown as it is
        return Probe(False, f"looking for Moore Threads GPUs failed with {type(error).__name__}: {error}")
    return verdict(machine, environment, detail, find_mcc(environment))


def verdict(machine: Machine, environment: Mapping[str, str], detail: Mapping[str, str], mcc: str | None) -> Probe:
    """The answer for a machine; ``detail``: what is known of the software; ``mcc``: where the compiler is."""
    told = {**detail, "driver": machine.driver, "told by": machine.told_by}
    ignored = other_variables(VARIABLE, environment)
    if ignored:
        told["ignored"] = f"{ignored}: this family reads {VARIABLE}"
    if not machine.gpus:
        return Probe(False, "the Moore Threads driver is loaded and finds no device", told)
    chosen = visible_devices(VARIABLE, environment.get(VARIABLE), [gpu.uuid for gpu in machine.gpus])
    if not chosen.positions:
        return Probe(False, f"{chosen.why}; the machine has {len(machine.gpus)}", told)
    told["devices"] = machines.listed(machine.gpus, chosen)
    reason = machines.summary(machine.gpus, chosen)
    if mcc is None:
        told["kernels"] = f"{NO_MCC}; without MTRTC either, ops run in torch's or Triton's kernels, and ranks over mccl"
        reason += "; mcc not found"
    return Probe(True, reason, told)


# -- the software, unimported ------------------------------------------------------------------------------


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def beside_torchada() -> str | None:
    """Why neither torch_musa nor a stand-in for it can be used in this process, where torchada was imported first."""
    if "torchada" not in sys.modules:
        return None
    return (
        "torchada was imported in this process, which replaces torch.cuda, torch.device and ctypes.CDLL: what "
        "answers here would be neither's; start a process that does not import it"
    )


def installed(version_of: Callable[[str], str | None]) -> tuple[str | None, dict[str, str]]:
    """(why the software cannot be used, or None; what it is)."""
    beside = beside_torchada()
    if beside is not None:
        return beside, {}
    torch, musa = version_of("torch"), version_of("torch_musa")
    if torch is None:
        return "torch is not installed", {}
    if musa is None:
        return "torch_musa is not installed: install Moore Threads' build for your torch, it is not on PyPI", {}
    detail = {"torch": torch, "torch_musa": musa, "contract": CONTRACT}
    if _numbers(musa)[:2] < OLDEST:
        return f"torch_musa {musa} is too old: {'.'.join(map(str, OLDEST))} is the first that captures graphs", detail
    if _numbers(musa)[:2] != _numbers(torch)[:2]:
        return f"torch_musa {musa} was built for torch {'.'.join(map(str, _numbers(musa)))}, not {torch}", detail
    if ".".join(map(str, _numbers(musa))) != CONTRACT:  # a build's own suffix (.post2) does not count
        detail["contract"] = f"{CONTRACT} (warning: {version_warning(musa)})"
    return None, detail


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


# -- the machine -------------------------------------------------------------------------------------------


def look() -> Machine:
    """Ask the management library, or a child process where its binding is not installed.

    Raises:
        NoDriver: there is no driver, or it does not answer.
    """
    try:
        mtml = importlib.import_module("pymtml")
    except ImportError:
        return ask_child()
    return ask_mtml(mtml)


def ask_mtml(mtml: Any) -> Machine:
    """What the management library says; ``mtml`` is the module ``pymtml``.

    It is not shut down: a library that was shut down cannot be started again in the process, so whoever asks it next,
    ourselves included, would fail.

    Raises:
        NoDriver: the library or the driver is not there.
    """
    try:
        mtml.mtmlLibraryInit()
    except (OSError, mtml.MTMLError) as error:
        raise NoDriver(f"no Moore Threads driver: MTML says {_text(error)!r}") from error
    try:
        devices = [mtml.mtmlLibraryInitDeviceByIndex(index) for index in range(mtml.mtmlLibraryCountDevice())]
        gpus = tuple(
            Gpu(
                _plain(mtml.mtmlDeviceGetName(device)),
                _plain(mtml.mtmlDeviceGetUUID(device)),
                int(mtml.mtmlMemoryGetTotal(mtml.mtmlDeviceInitMemory(device))),
            )
            for device in devices
        )
        return Machine(gpus, _plain(mtml.mtmlSystemGetDriverVersion(mtml.mtmlLibraryInitSystem())), "MTML")
    except mtml.MTMLError as error:
        raise NoDriver(f"MTML fails with {_text(error)!r}") from error


def _plain(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _text(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


CHILD: Final = """
import ctypes, json, uuid
failed = []
for file in LIBRARY_FILES:
    try:
        musa = ctypes.CDLL(file)
        break
    except OSError as error:
        failed.append(str(error))
else:
    raise OSError("; ".join(failed))
def ask(name, *args):
    call = getattr(musa, name, None) or getattr(musa, name + "_v2")
    code = call(*args)
    if code:
        raise SystemExit(f"{name} answers error {code}")
count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
ask("muInit", 0)
ask("muDeviceGetCount", ctypes.byref(count))
gpus = []
for index in range(count.value):
    name, raw = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    ask("muDeviceGet", ctypes.byref(device), index)
    ask("muDeviceGetName", name, 256, device)
    ask("muDeviceGetUuid", raw, device)
    ask("muDeviceTotalMem", ctypes.byref(size), device)
    gpus.append([name.value.decode(), f"GPU-{uuid.UUID(bytes=bytes(raw))}", size.value])
print(json.dumps({"gpus": gpus}))
""".replace("LIBRARY_FILES", repr(LIBRARIES["musa"]))
NO_DEVICE: Final = "muInit answers error 100"


def ask_child(
    source: str = CHILD, *, seconds: float = CHILD_SECONDS, driver_files: tuple[str, ...] = DRIVER_FILES
) -> Machine:
    """What the driver says to a child process, which sees every device of the machine.

    Raises:
        NoDriver: no driver is loaded, it fails, or it does not answer in time.
    """
    asked = Asked("Moore Threads", source, NO_DEVICE, VARIABLE)
    told = machines.ask_child(asked, seconds=seconds, driver_files=driver_files)
    return Machine(told["gpus"], "unknown", "a child process")
