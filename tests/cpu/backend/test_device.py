"""The CPU as a device: registration without torch, memory limits, capabilities."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halma.backends.cpu import halma_register_backends, probe
from halma.backends.cpu.backend import CpuBackend
from halma.backends.cpu.memory_limits import memory_info
from halma.hal.backend import API_VERSION, Backend, BackendSpec, KernelSource, MemoryInfo
from halma.hal.errors import CapabilityError, CaptureError
from halma.hal.workspace import Workspace

GIB = 1 << 30


def registered() -> BackendSpec:
    specs: list[BackendSpec] = []
    halma_register_backends(specs.append)
    (spec,) = specs
    return spec


def test_the_registered_spec_makes_the_backend():
    spec = registered()
    assert (spec.name, spec.api_version, spec.accelerator, spec.simulated, spec.evidence) == (
        "cpu", API_VERSION, False, False, "cpu",
    )  # fmt: skip
    backend = spec.factory()
    assert isinstance(backend, CpuBackend) and isinstance(backend, Backend)
    assert spec.probe().ok and probe().detail["machine"]


@pytest.mark.invariant("B1")
def test_registering_and_probing_import_no_torch():
    code = (
        "import sys, halma.backends.cpu as cpu; cpu.halma_register_backends(lambda s: s.probe());"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.invariant("B8")
def test_capabilities_are_what_this_machine_does():
    backend = CpuBackend()
    capabilities = backend.capabilities
    assert capabilities.graph_capture is True and capabilities.row_invariant is True
    minus_zero = torch.tensor([0x80], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    assert capabilities.fp8_e4m3fn is True and str(minus_zero.item()) == "-0.0"
    assert capabilities.need("collective_backend", for_="this test") == backend.collectives.torch_backend == "gloo"
    assert backend.collectives.unsupported() is None


def test_kernels_are_refused_with_the_reason():
    kernels = CpuBackend().kernels
    assert kernels.unsupported()
    with pytest.raises(CapabilityError, match="compiles no kernels"):
        kernels.load(KernelSource("add", "source"), ("add",))
    with pytest.raises(CapabilityError, match="compiles no kernels"):
        kernels.launch(None, 1, 1, (), stream=CpuBackend().device.current_stream())


def test_properties_streams_and_memory(backend):
    properties = backend.device.properties()
    assert properties["name"] and int(properties["cores"]) >= 1 and properties["torch"] == torch.__version__
    assert backend.device.torch_device == torch.device("cpu")
    assert backend.memory.empty((2, 3), torch.int16).shape == (2, 3)
    assert backend.memory.pinned((4,), torch.int64).dtype is torch.int64
    main, side = backend.device.current_stream(), backend.device.new_stream("side")
    with side:
        assert backend.device.current_stream() is side
    assert backend.device.current_stream() is main and main.name == "main"
    event = backend.device.new_event()
    side.record(event)
    main.wait(event)
    assert event.query()
    event.synchronize()
    main.synchronize()
    backend.device.synchronize()
    info = backend.device.memory_info()
    assert 0 < info.free <= info.total


def test_streams_of_another_backend_are_refused(backend):
    workspace = Workspace()
    workspace.seal()
    with pytest.raises(CaptureError, match="not a stream of the cpu backend"):
        backend.graphs.begin(object(), workspace)
    with pytest.raises(CaptureError, match="not an event of the cpu backend"):
        backend.device.current_stream().wait(object())


def write(root: Path, **files: str) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_limits_is_the_machines(tmp_path):
    assert memory_info(write(tmp_path)) == MemoryInfo(free=4 * GIB, total=8 * GIB)
    unlimited = write(tmp_path / "b", **{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert memory_info(unlimited) == MemoryInfo(free=4 * GIB, total=8 * GIB)


def test_a_v2_group_limits_and_its_page_cache_is_free(tmp_path):
    root = write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": str(2 * GIB),
            "sys/fs/cgroup/job/memory.current": str(GIB + GIB // 2),
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
        },
    )
    assert memory_info(root) == MemoryInfo(free=3 * GIB // 4, total=2 * GIB)


def test_the_group_of_a_container_may_lie_at_the_mount(tmp_path):
    root = write(
        tmp_path,
        **{
            "proc/self/cgroup": "12:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
        },
    )
    assert memory_info(root) == MemoryInfo(free=0, total=GIB), "never below zero"
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_info(root) == MemoryInfo(free=4 * GIB, total=8 * GIB), "v1 writes an unset limit like this"
