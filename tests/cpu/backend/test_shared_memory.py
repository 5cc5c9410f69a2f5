"""Memory that several processes map."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from halma.backends.cpu.memory import CpuMemory
from halma.backends.cpu.memory_limits import memory_info
from halma.hal.errors import CollectiveError

CHILD = """
import sys, torch
from halma.backends.cpu.memory import CpuMemory
memory = CpuMemory().open(bytes.fromhex(sys.argv[1]))
assert memory.tensor.tolist()[:4] == [1, 2, 3, 0]
memory.tensor[3] = 9
memory.close()
"""
OWNER = """
import sys, time
from halma.backends.cpu.memory import CpuMemory
memory, handle = CpuMemory().exportable(4096)
print(handle.hex(), flush=True)
sys.stdin.read()
"""


def test_another_process_sees_the_same_bytes() -> None:
    own, handle = CpuMemory().exportable(5000)
    assert own.tensor.shape == (5000,) and not own.tensor.any() and own.address == own.tensor.data_ptr()
    own.tensor[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    done = subprocess.run([sys.executable, "-c", CHILD, handle.hex()], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "") and own.tensor[3] == 9
    own.close()


def test_a_handle_of_this_process_gives_a_view() -> None:
    own, handle = CpuMemory().exportable(64)
    view = CpuMemory().open(handle)
    assert view.address == own.address
    view.tensor[0] = 5
    view.close()
    assert own.tensor[0] == 5
    own.close()
    own.close()
    with pytest.raises(CollectiveError, match="closed"):
        own.tensor.sum()
    with pytest.raises(CollectiveError, match="this process closed it"):
        CpuMemory().open(handle)


def test_a_tensor_that_outlives_its_memory_does_not_crash() -> None:
    own, _ = CpuMemory().exportable(64)
    left = own.tensor[:4]
    own.close()
    del own
    gc.collect()
    left.fill_(3)
    assert left.tolist() == [3, 3, 3, 3]


def test_nothing_is_left_when_the_owner_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        handle = bytes.fromhex(owner.stdout.readline().strip())
        mapped = CpuMemory().open(handle)
        owner.kill()
        owner.wait()
        mapped.tensor[0] = 7  # what is mapped lives on, as long as somebody maps it
        mapped.close()
        with pytest.raises(CollectiveError, match="cannot be opened"):
            CpuMemory().open(handle)
    assert not [name for name in os.listdir("/dev/shm") if "halma" in name]


@pytest.mark.parametrize("handle", [b"", b"\xff\xfe", b"{}", b'{"pid": "x", "fd": 1, "bytes": 2}', b"[1]"])
def test_another_backends_handle_is_refused(handle: bytes) -> None:
    with pytest.raises(CollectiveError, match="does not fit the cpu backend"):
        CpuMemory().open(handle)


def test_a_number_that_means_another_file_now_is_refused() -> None:
    own, handle = CpuMemory().exportable(64)
    with open(os.devnull, "rb") as other:
        wrong = handle.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 1')
        assert wrong != handle and other.readable()
        with pytest.raises(CollectiveError, match="cannot be opened"):
            CpuMemory().open(wrong)
    own.close()


def test_what_does_not_fit_is_said_when_it_is_asked_for() -> None:
    with pytest.raises(MemoryError, match="are free"):
        CpuMemory().exportable(memory_info().total * 2)
    with pytest.raises(MemoryError, match="bytes of shared memory"):
        CpuMemory().exportable(1 << 62)
    assert CpuMemory().not_exportable() is None
