"""What this machine and this installation look like, for reports of defects.

Standard library only, and every question is asked under guard: a broken torch, a missing tool or a plugin that
raises becomes the answer to its question. What may crash or hang (importing torch, starting a backend) is
asked of a child process with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHILD_SECONDS = 120.0
"""A cold import of torch from a slow disk took 40 s once; a hang is longer than this."""

PACKAGES = (
    *("halma", "torch", "triton", "torch_musa", "torchada", "mthreads-ml-py"),
    *("cuda-python", "cuda-core", "cuda-bindings", "nvidia-ml-py"),
    *("pluggy", "numpy", "safetensors", "tokenizers", "transformers", "typer", "rich"),
)
TOOLS = ("mcc", "mthreads-gmi", "nvcc", "nvidia-smi")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME"),
    *("MUSA_VISIBLE_DEVICES", "MTHREADS_VISIBLE_DEVICES", "MUSA_HOME"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
)
LIBRARIES = (
    "cuda",
    "cudart",
    "nccl",
    "nvrtc",
    "cublas",
    "musa",
    "mccl",
    "mublas",
    "torch",
    "mkl",
    "openblas",
    "gomp",
    "iomp",
)
"""Families of shared libraries of which one copy should be loaded."""

_TORCH_CHILD = """
import json, sys
import torch
from halma.hal.patches import replaced_modules
versions = {name: value for name, value in vars(torch.version).items()
            if isinstance(value, str) and (name == "__version__" or not name.startswith("__"))}
try:
    libraries = sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line})
except OSError:
    libraries = []
print(json.dumps({"file": torch.__file__, "versions": versions, "threads": torch.get_num_threads(),
                  "patched": replaced_modules(), "libraries": libraries}))
"""
_BACKEND_CHILD = """
import json, sys
from halma.hal.errors import HalmaError
from halma.hal.registry import default_registry
try:
    backend = default_registry().select(sys.argv[1])
    facts = {"capabilities": backend.capabilities.as_json(), "properties": dict(backend.device.properties())}
except HalmaError as error:
    facts = {"failed": "; ".join((error.what, *error.found))}
print(json.dumps(facts, default=str))
"""


def guard(question: Callable[[], Any]) -> Any:
    """The answer, or what went wrong as ``{"failed": reason}``."""
    try:
        return question()
    except Exception as error:
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())}


def child(code: str, *arguments: str, seconds: float = CHILD_SECONDS) -> Any:
    """The JSON that a Python child prints last.

    Raises:
        RuntimeError: it crashed, hung or failed, with its last line.
    """
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {seconds:g} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
        raise RuntimeError(f"exit code {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def python_report() -> dict[str, Any]:
    """Interpreter and platform."""
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "platform": platform.platform(),
    }


def packages_report() -> dict[str, str]:
    """Installed distributions that matter here."""
    return {name: _version(name) for name in PACKAGES}


def tools_report() -> dict[str, Any]:
    """Vendors' tools on the path, and the compiler of MUSA_HOME."""
    found: dict[str, Any] = {name: shutil.which(name) or "not on the PATH" for name in TOOLS}
    home = os.environ.get("MUSA_HOME")
    if home is not None:
        compiler = Path(home) / "bin" / "mcc"
        found["mcc of MUSA_HOME"] = str(compiler) if compiler.is_file() else f"{compiler} does not exist"
    return found


def variables_report() -> dict[str, str]:
    """Variables of the outside world that change what devices are seen."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} or {"set": "none of those looked at"}


def machine_report() -> dict[str, Any]:
    """Processor, memory and what the container allows."""
    return {
        "processor": guard(_processor),
        "cores": guard(lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        "memory": guard(_memory),
        "memory limit": guard(lambda: _limit(_cgroup("memory.max", "memory/memory.limit_in_bytes"))),
        "cpu limit": guard(lambda: _limit(_cgroup("cpu.max", "cpu/cpu.cfs_quota_us"))),
    }


def torch_report() -> dict[str, Any]:
    """torch as a child process loads it: versions, who patched it, and libraries loaded more than once."""
    loaded: dict[str, Any] = child(_TORCH_CHILD)
    libraries = library_copies(loaded.pop("libraries"))
    installed = _version("torch")
    if loaded["versions"].get("__version__", "").split("+")[0] != installed.split("+")[0]:
        loaded["mismatch"] = f"{installed} is installed, {loaded['versions'].get('__version__')} was loaded"
    loaded["libraries"] = {name: paths[0] for name, paths in libraries.items() if len(paths) == 1}
    loaded["several copies"] = {name: paths for name, paths in libraries.items() if len(paths) > 1}
    return loaded


def library_copies(paths: list[str]) -> dict[str, list[str]]:
    """Loaded files by library family; a family with several files is the usual cause of what cannot be reproduced."""
    found: dict[str, list[str]] = {}
    for path in paths:
        family = os.path.basename(path).removeprefix("lib").split(".so")[0].split("-")[0]
        if family in LIBRARIES:
            found.setdefault(family, []).append(path)
    return found


def backend_report(name: str) -> dict[str, Any]:
    """Capabilities and properties of a usable backend, started in a child process."""
    report: dict[str, Any] = child(_BACKEND_CHILD, name)
    return report


def flatten(report: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A report as (what, answer) lines for a person."""
    lines: list[tuple[str, str]] = []
    for name, value in report.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping) and set(value) == {"failed"}:
            lines.append((label, f"failed: {value['failed']}"))
        elif isinstance(value, Mapping):
            lines += flatten(value, f"{label} ")
        elif isinstance(value, (list, tuple)):
            lines += [(label, str(item)) for item in value]
        elif value not in (None, ""):
            lines.append((label, str(value)))
    return lines


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> str:
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    kibibytes = {parts[0].rstrip(":"): int(parts[1]) for parts in lines}
    return f"{kibibytes['MemAvailable'] / 2**20:.1f} of {kibibytes['MemTotal'] / 2**20:.1f} GiB available"


def _cgroup(unified: str, legacy: str) -> str:
    root = Path("/sys/fs/cgroup")
    for path in (root / unified, root / legacy):
        if path.is_file():
            return path.read_text(encoding="utf-8").strip()
    return "max"


def _limit(text: str) -> str:
    """A control group's answer; its ways of saying "no limit" are max, -1 and the largest number of pages."""
    first, *period = text.split()
    if first in ("max", "-1") or int(first) > 1 << 60:
        return "none"
    if period:
        return f"{int(first) / int(period[0]):g} cores"
    return f"{int(first) / 2**30:.1f} GiB" if int(first) > 1 << 24 else f"{int(first)} us a period"
