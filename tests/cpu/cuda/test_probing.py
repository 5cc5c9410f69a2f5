"""Looking for GPUs: NVML's answers, a child's, and every reason why not; no torch, no driver, nothing raised."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halma.backends.cuda import probing
from halma.backends.cuda.probing import Gpu, Machine, NoDriver, ask_child, ask_nvml, installed_torch, verdict

pytestmark = pytest.mark.torchfree

GPU = Gpu("NVIDIA H200", "GPU-aa", 150 << 30)
TWO = Machine((GPU, Gpu("NVIDIA L4", "GPU-bb", 24 << 30)), 13000, "580.1", "NVML")


class NVMLError(Exception):
    """As pynvml has it."""


def nvml(**replaced: Any) -> Any:
    """A stand-in for the module pynvml with two devices; ``replaced`` functions take the place of its own."""
    calls: list[str] = []
    module = SimpleNamespace(
        calls=calls,
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: ["NVIDIA H200", b"NVIDIA L4"][handle],
        nvmlDeviceGetUUID=lambda handle: ["GPU-aa", "GPU-bb"][handle],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=[150 << 30, 24 << 30][handle]),
    )
    for name, function in replaced.items():
        setattr(module, name, function)
    return module


def raising(text: str) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise NVMLError(text)

    return function


# -- NVML --------------------------------------------------------------------------------------------------


@pytest.mark.invariant("B1", control=True)
def test_nvml_tells_the_devices_and_is_shut_down_again() -> None:
    module = nvml()
    assert ask_nvml(module) == TWO and module.calls == ["init", "shutdown"]


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("replaced", "says"),
    [
        ({"nvmlInit": raising("NVML Shared Library Not Found")}, "no NVIDIA driver: NVML says 'NVML Shared"),
        ({"nvmlInit": raising("Driver Not Loaded")}, "no NVIDIA driver: NVML says 'Driver Not Loaded'"),
        ({"nvmlDeviceGetCount": raising("Unknown Error")}, "NVML fails with 'Unknown Error'"),
    ],
)
def test_without_a_driver_nvml_says_why(replaced: dict[str, Any], says: str) -> None:
    with pytest.raises(NoDriver, match=says):
        ask_nvml(nvml(**replaced))


@pytest.mark.invariant("B1")
@pytest.mark.parametrize("installed", [True, False])
def test_nvml_is_asked_where_it_can_be_imported_and_a_child_where_not(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml() if installed else None)  # None: importing it fails
    monkeypatch.setattr(probing, "ask_child", lambda: "the child")
    assert probing.look() == (TWO if installed else "the child")


# -- a child process ---------------------------------------------------------------------------------------

HERE = (__file__,)


def test_the_childs_answer_is_taken_and_it_sees_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = (
        "import json, os; assert 'CUDA_VISIBLE_DEVICES' not in os.environ; "
        "print(json.dumps({'gpus': [['NVIDIA H200', 'GPU-aa', 161061273600]], 'cuda': 13000}))"
    )
    assert ask_child(source, driver_files=HERE) == Machine((GPU,), 13000, "unknown", "a child process")


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise SystemExit('cuInit answers error 803')", "ended with: cuInit answers error 803"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with: exit status -9"),
        ("print('hello')", "answered 'hello"),
        ("import time; time.sleep(60)", "did not answer a child process within 0.5 s"),
    ],
)
def test_a_child_that_fails_hangs_or_babbles_is_a_reason(source: str, says: str) -> None:
    with pytest.raises(NoDriver, match=says):
        ask_child(source, seconds=0.5 if "sleep" in source else 20.0, driver_files=HERE)


@pytest.mark.invariant("B1")
def test_no_device_is_an_answer_of_the_driver() -> None:
    machine = ask_child(f"raise SystemExit({probing.NO_DEVICE!r})", driver_files=HERE)
    assert machine.gpus == () and "finds no device" in verdict(machine, "13.0", None, []).reason


@pytest.mark.invariant("B1")
def test_without_a_trace_of_a_driver_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(NoDriver, match="none of /no/such/file exists"):
        ask_child(driver_files=("/no/such/file",))


# -- the verdict -------------------------------------------------------------------------------------------


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("torch_cuda", "visible", "says"),
    [
        ("13.0", "", "CUDA_VISIBLE_DEVICES is empty, which hides every device; the machine has 2"),
        ("13.0", "7", "ends at '7', which names no device here; the machine has 2"),
        ("14.1", None, "the driver runs CUDA up to 13.0, the installed torch was built for CUDA 14.1"),
    ],
)
def test_what_makes_it_unusable_is_said(torch_cuda: str, visible: str | None, says: str) -> None:
    found = verdict(TWO, torch_cuda, visible, [])
    assert not found.ok and says in found.reason and found.detail["driver's CUDA"] == "13.0"


@pytest.mark.invariant("B1", control=True)
@pytest.mark.parametrize(
    ("torch_cuda", "visible", "reason"),
    [
        ("13.0", None, "2 devices: NVIDIA H200"),
        ("13.9", None, "2 devices: NVIDIA H200"),
        ("12.8", "GPU-bb", "1 device: NVIDIA L4 (CUDA_VISIBLE_DEVICES=GPU-bb; the machine has 2)"),
    ],
)
def test_a_usable_machine_shows_its_devices(torch_cuda: str, visible: str | None, reason: str) -> None:
    found = verdict(TWO, torch_cuda, visible, [])
    assert found.ok and found.reason == reason and "kernels" not in found.detail


def test_without_the_bindings_it_is_usable_and_says_what_is_missing() -> None:
    missing = probing.missing_packages(lambda name: None)
    found = verdict(TWO, "13.0", None, missing)
    assert found.ok and found.reason.endswith("no kernels and no graphs: cuda-core and cuda-bindings not installed")
    assert "halma[cuda]" in found.detail["kernels"] and probing.missing_packages(lambda name: name) == []


# -- torch, unimported -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ("13.0", None)),
        ("cuda = '12.8'\n", ("12.8", None)),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("", "(2.13.0+cpu) was built without CUDA")),
        (None, ("", "torch's version cannot be read")),
    ],
)
def test_the_cuda_version_of_torch_is_read_from_its_file(tmp_path: Path, text: str | None, expected: Any) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    version, problem = installed_torch(tmp_path)
    assert version == expected[0] and (problem is None) == (expected[1] is None)
    assert expected[1] is None or expected[1] in str(problem)


@pytest.mark.invariant("B1")
@pytest.mark.parametrize("trouble", [NoDriver("no NVIDIA driver"), OSError("odd"), None])
def test_the_probe_never_raises(monkeypatch: pytest.MonkeyPatch, trouble: Exception | None) -> None:
    def look() -> Machine:
        if trouble is not None:
            raise trouble
        return TWO

    monkeypatch.setattr(probing, "installed_torch", lambda: ("13.0", None))
    monkeypatch.setattr(probing, "look", look)
    found = probing.probe({"CUDA_VISIBLE_DEVICES": "1"})
    assert found.ok is (trouble is None) and (trouble is None or str(trouble) in found.reason)


CHILD = """
import sys, time
begin = time.perf_counter()
from halma.backends.cuda import probe
found = probe()
heavy = [name for name in ("torch", "numpy", "cuda.core", "cuda.bindings.driver") if name in sys.modules]
print(found.ok, heavy, time.perf_counter() - begin < 2.0, found.reason)
"""


@pytest.mark.invariant("B1")
def test_probing_in_a_fresh_process_imports_nothing_heavy_and_is_quick() -> None:
    begin = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    ok, *rest = run.stdout.split(maxsplit=3)
    assert rest[0] == "[]" and rest[1] == "True" and len(rest[2]) > 10, run.stdout
    assert ok in ("True", "False") and time.perf_counter() - begin < 60
