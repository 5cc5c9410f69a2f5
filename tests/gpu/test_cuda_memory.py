"""Memory on CUDA: shared between processes, pinned and reached from the device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CollectiveError

CHILD = """
import sys, torch
from halma.hal.registry import default_registry
backend = default_registry().select("cuda")
shared = backend.memory.open(bytes.fromhex(sys.argv[1]))
seen = int(shared.tensor.sum())
shared.tensor.view(torch.int32).fill_(7)
backend.device.synchronize()
shared.close()
shared.close()
print(seen)
"""


def child(source: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.invariant("A8")
def test_another_process_maps_exported_memory_and_its_writes_are_seen(backend: Backend) -> None:
    assert backend.memory.not_exportable() is None
    shared, handle = backend.memory.exportable(1000)
    assert shared.tensor.shape == (1000,) and int(shared.tensor.sum()) == 0, "zero-filled"
    shared.tensor.fill_(1)
    backend.device.synchronize()
    run = child(CHILD, handle.hex())
    assert run.returncode == 0 and run.stdout.split() == ["1000"], run.stderr
    assert set(shared.tensor.view(torch.int32).tolist()) == {7}
    shared.close()


def test_a_handle_of_this_process_is_a_view(backend: Backend) -> None:
    shared, handle = backend.memory.exportable(4096)
    view = backend.memory.open(handle)
    assert view.address == shared.address == shared.tensor.data_ptr() and shared.address % 256 == 0
    view.tensor.fill_(3)
    assert int(shared.tensor.sum()) == 3 * 4096
    view.close()
    shared.close()
    shared.close()
    with pytest.raises(CollectiveError, match="after close"):
        _ = shared.tensor


def test_what_cannot_be_mapped_is_refused_with_the_reason(backend: Backend) -> None:
    with pytest.raises(CollectiveError, match="not a handle of the cuda backend"):
        backend.memory.open(b"x" * 20)
    shared, handle = backend.memory.exportable(64)
    shared.close()
    with pytest.raises(CollectiveError, match="this process closed that memory"):
        backend.memory.open(handle)
    run = child(
        "from halma.hal.registry import default_registry\n"
        "print(default_registry().select('cuda').memory.exportable(64)[1].hex())"
    )
    with pytest.raises(CollectiveError, match=r"memory of process \d+ cannot be mapped"):
        backend.memory.open(bytes.fromhex(run.stdout.strip()))


def test_too_much_is_a_memory_error_that_says_what_is_free(backend: Backend) -> None:
    with pytest.raises(MemoryError, match="bytes are free"):
        backend.memory.exportable(1 << 50)


def test_a_kernel_writes_pinned_memory_that_the_host_reads(backend: Backend) -> None:
    host = backend.memory.pinned((2, 3), torch.int64)
    host.zero_()
    there = backend.memory.on_device(host)
    assert there.is_cuda and there.data_ptr() == host.data_ptr() and there.shape == host.shape
    there.view(-1).index_copy_(0, torch.tensor([4], device=there.device), torch.tensor([9], device=there.device))
    event = backend.device.new_event("written")
    backend.device.current_stream().record(event)
    event.synchronize()
    assert host.tolist() == [[0, 0, 0], [0, 9, 0]]
    with pytest.raises(ValueError, match="pinned"):
        backend.memory.on_device(torch.zeros(3))


FORK = """
import os, sys
from halma.hal.registry import default_registry
assert default_registry().status("cuda").usable and "torch" not in sys.modules
pid = os.fork()
if pid == 0:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    os._exit(torch.cuda.device_count())
import torch
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.cuda.device_count() >= 1 and float(torch.ones(1, device="cuda")[0]) == 1.0
print("ok")
"""


@pytest.mark.invariant("B1")
def test_probe_then_fork_then_set_the_variable(backend: Backend) -> None:
    run = child(FORK)
    assert run.stdout.split() == ["ok"], run.stderr
