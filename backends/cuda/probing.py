"""Looks for GPUs without touching them: NVML where it can be imported, else a child process with a time limit.

No torch, no context and no driver initialised in this process (B1): whoever probes may still fork, or set
``CUDA_VISIBLE_DEVICES`` for its children.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halma.backends.torch_device import machine as machines
from halma.backends.torch_device.machine import CHILD_SECONDS, Asked, Gpu, NoDriver
from halma.backends.torch_device.visible import Visible, other_variables, visible_devices
from halma.hal.backend import Probe

VARIABLE = "CUDA_VISIBLE_DEVICES"

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""One of them is there wherever an NVIDIA driver is loaded; without any, no child is started."""

NEEDED_FOR_KERNELS = ("cuda.core", "cuda.bindings")


@dataclass(frozen=True)
class Machine:
    """What the driver says. ``cuda``: the newest CUDA that it runs, such as 13000 for 13.0."""

    gpus: tuple[Gpu, ...]
    cuda: int
    driver: str
    told_by: str


def probe(environment: Mapping[str, str] = os.environ) -> Probe:
    """Whether the backend can be used here; every reason is one that a person can act on. Never raises."""
    torch_cuda, problem = installed_torch()
    if problem is not None:
        return Probe(False, problem)
    try:
        machine = look()
    except NoDriver as error:
        return Probe(False, str(error))
    except Exception as error:  # a plugin's probe never raises; the reason is shown as it is
        return Probe(False, f"looking for NVIDIA GPUs failed with {type(error).__name__}: {error}")
    found = verdict(machine, torch_cuda, environment.get(VARIABLE), missing_packages())
    ignored = other_variables(VARIABLE, environment)
    return replace(found, detail={**found.detail, "ignored": f"{ignored}: CUDA reads {VARIABLE}"}) if ignored else found


def verdict(machine: Machine, torch_cuda: str, visible: str | None, missing: Sequence[str]) -> Probe:
    """The answer for a machine, the CUDA version of the installed torch, and what is not installed."""
    version = f"{machine.cuda // 1000}.{machine.cuda % 1000 // 10}"
    detail = {
        "driver": machine.driver,
        "driver's CUDA": version,
        "torch's CUDA": torch_cuda,
        "told by": machine.told_by,
    }
    if not machine.gpus:
        return Probe(False, "the NVIDIA driver is loaded and finds no device", detail)
    chosen = visible_devices(VARIABLE, visible, [gpu.uuid for gpu in machine.gpus])
    if not chosen.positions:
        return Probe(False, f"{chosen.why}; the machine has {len(machine.gpus)}", detail)
    if machine.cuda // 1000 < int(torch_cuda.partition(".")[0]):
        # Within one major version an older driver is enough: NVIDIA's minor-version compatibility.
        return Probe(
            False,
            f"the driver runs CUDA up to {version}, the installed torch was built for CUDA {torch_cuda}: "
            "install a newer driver, or a torch built for an older CUDA",
            detail,
        )
    detail |= {"devices": machines.listed(machine.gpus, chosen)}
    if missing:
        detail["kernels"] = kernels_missing(missing)
    return Probe(True, _summary(machine, chosen, missing), detail)


def kernels_missing(missing: Sequence[str]) -> str:
    """Why kernels and graphs cannot be had."""
    names = ", ".join(missing)
    return f"not installed: {names} (pip install 'halma[cuda]'); everything runs eagerly, in torch's kernels"


def missing_packages(find: Callable[[str], object | None] | None = None) -> list[str]:
    """Which of the packages for kernels and graphs are not installed; imports none of them."""

    def there(name: str) -> object | None:
        try:
            return importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent package is not there
            return None

    return [name.replace(".", "-") for name in NEEDED_FOR_KERNELS if (find or there)(name) is None]


def _summary(machine: Machine, chosen: Visible, missing: Sequence[str]) -> str:
    text = machines.summary(machine.gpus, chosen)
    return text + ("; no kernels and no graphs: " + " and ".join(missing) + " not installed" if missing else "")


# -- torch, unimported -------------------------------------------------------------------------------------


def installed_torch(root: Path | None = None) -> tuple[str, str | None]:
    """(CUDA version of the installed torch, None), or ("", why it cannot be used). Reads torch's version file."""
    if root is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return "", "torch is not installed"
        root = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (root / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        return "", f"torch's version cannot be read: {error}"
    built = re.search(r"^cuda\s*(?::[^=\n]*)?=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    if built is None:
        named = re.search(r"__version__\s*=\s*['\"]([^'\"]+)['\"]", text)
        return "", f"the installed torch ({named[1] if named else 'of unknown version'}) was built without CUDA"
    return built[1], None


# -- the machine -------------------------------------------------------------------------------------------


def look() -> Machine:
    """Ask NVML, or a child process where nvidia-ml-py is not installed.

    Raises:
        NoDriver: there is no driver, or it does not answer.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ask_child()
    return ask_nvml(nvml)


def ask_nvml(nvml: Any) -> Machine:
    """What NVML says; ``nvml`` is the module ``pynvml``. NVML makes no context and leaves CUDA alone.

    Raises:
        NoDriver: NVML's library or the driver is not there.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(f"no NVIDIA driver: NVML says {_text(error)!r}") from error
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return Machine(gpus, cuda, _plain(nvml.nvmlSystemGetDriverVersion()), "NVML")
    except nvml.NVMLError as error:
        raise NoDriver(f"NVML fails with {_text(error)!r}") from error
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = (_plain(ask(handle)) for ask in (nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID))
    return Gpu(name, uuid, int(nvml.nvmlDeviceGetMemoryInfo(handle).total))


def _plain(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text  # older bindings give bytes


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


CHILD = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def ask(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise SystemExit(f"{name} answers error {code}")
version, count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
ask("cuInit", 0)
ask("cuDriverGetVersion", ctypes.byref(version))
ask("cuDeviceGetCount", ctypes.byref(count))
gpus = []
for index in range(count.value):
    name, raw = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    ask("cuDeviceGet", ctypes.byref(device), index)
    ask("cuDeviceGetName", name, 256, device)
    ask("cuDeviceGetUuid", raw, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    gpus.append([name.value.decode(), f"GPU-{uuid.UUID(bytes=bytes(raw))}", size.value])
print(json.dumps({"gpus": gpus, "cuda": version.value}))
"""
NO_DEVICE = "cuInit answers error 100"


def ask_child(
    source: str = CHILD, *, seconds: float = CHILD_SECONDS, driver_files: Sequence[str] = DRIVER_FILES
) -> Machine:
    """What the driver says to a child process, which sees every device of the machine.

    Raises:
        NoDriver: no driver is loaded, it fails, or it does not answer in time.
    """
    told = machines.ask_child(Asked("NVIDIA", source, NO_DEVICE, VARIABLE), seconds=seconds, driver_files=driver_files)
    try:
        return Machine(told["gpus"], int(told["cuda"]) if told["gpus"] else 0, "unknown", "a child process")
    except (ValueError, KeyError, TypeError) as error:
        raise NoDriver(f"a child process that asked the driver answered {told!r}") from error
