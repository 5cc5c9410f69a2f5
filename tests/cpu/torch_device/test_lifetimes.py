"""What the device families share: memory of this very process, and graphs that nobody holds any more."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.backends.torch_device import pools
from halma.backends.torch_device.memory import TorchMemory
from halma.hal.errors import CollectiveError
from halma.hal.shared_file import SharedFile


class Calls:
    """A driver's side over host memory."""

    magic, handle_bytes = b"test", 4

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def why_missing(self) -> None:
        return None

    def allocate(self, nbytes: int) -> int:
        room = ctypes.create_string_buffer(nbytes)
        self.kept[ctypes.addressof(room)] = room
        return ctypes.addressof(room)

    def clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def export(self, address: int) -> bytes:
        return b"1234"

    def free(self, address: int) -> None:
        del self.kept[address]

    def tensor_at(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def memory() -> tuple[TorchMemory, Calls]:
    calls = Calls()
    family: Any = SimpleNamespace(
        name="test",
        torch_device=lambda index: torch.device("cpu"),
        ensure_context=lambda index: None,
        module=SimpleNamespace(synchronize=lambda index: None),
    )
    return TorchMemory(family, 0, calls), calls  # type: ignore[arg-type]


def test_a_view_that_closes_leaves_its_owner_open(memory: tuple[TorchMemory, Calls]) -> None:
    part, calls = memory
    owner, handle = part.exportable(8)
    view = part.open(handle)
    view.tensor.fill_(7)
    view.close()
    again = part.open(handle)
    assert again.tensor.tolist() == [7] * 8 == owner.tensor.tolist()
    assert len(calls.kept) == 1


def test_memory_that_its_owner_closed_cannot_be_opened(memory: tuple[TorchMemory, Calls]) -> None:
    part, calls = memory
    owner, handle = part.exportable(8)
    owner.close()
    owner.close()
    assert not calls.kept
    with pytest.raises(CollectiveError, match="cannot be mapped"):
        part.open(handle)


class Emptied(list[Any]):
    """Another thread took the last one after we looked."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 1


def test_two_threads_may_clear_the_graveyard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_graveyard", Emptied())
    pools.clear_graveyard()


class Opens:
    """As it goes, another thread begins a capture."""

    def __init__(self, captures: list[str]) -> None:
        self.captures = captures

    def __del__(self) -> None:
        self.captures.append("another thread's")


def test_nothing_goes_once_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[str] = []
    kept = [object(), Opens(captures)]
    monkeypatch.setattr(pools, "open_captures", captures)
    monkeypatch.setattr(pools, "_graveyard", kept)
    pools.clear_graveyard()
    assert len(kept) == 1, "the first in, which went last, waits for that capture's end"
    captures.clear()
    pools.clear_graveyard()
    assert not kept


class LockingCalls(Calls):
    """A driver that refuses to lock a range twice, as drivers do; each lock waits a while for another beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: set[int] = set()
        self.done: list[str] = []
        self.meet = threading.Barrier(2)

    def _beside(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meet.wait(0.2)

    def lock(self, host: int, nbytes: int) -> None:
        self._beside()
        if host in self.locked:
            raise RuntimeError("already locked")
        self.locked.add(host)
        self.done.append("lock")

    def unlock(self, host: int) -> None:
        self.locked.remove(host)
        self.done.append("unlock")

    def on_device(self, host: int) -> int:
        return host


@pytest.mark.parametrize("threads", [2, pytest.param(1, id="control")])
def test_two_threads_that_map_one_file_lock_it_once(memory: tuple[TorchMemory, Calls], threads: int) -> None:
    calls = LockingCalls()
    part = TorchMemory(memory[0]._family, 0, calls)  # type: ignore[arg-type]
    with contextlib.closing(SharedFile.make(4096)) as file, ThreadPoolExecutor(threads) as pool:
        held = [started.result() for started in [pool.submit(part.mapped, file) for _ in range(2)]]
        assert calls.done == ["lock"]
        held[0].close()
        assert calls.done == ["lock"]
        held[1].close()
        assert calls.done == ["lock", "unlock"]


def test_a_range_that_cannot_be_locked_is_asked_for_again(memory: tuple[TorchMemory, Calls]) -> None:
    calls = LockingCalls()
    part = TorchMemory(memory[0]._family, 0, calls)  # type: ignore[arg-type]
    calls.meet.abort()
    with contextlib.closing(SharedFile.make(4096)) as file:
        host = ctypes.addressof(ctypes.c_char.from_buffer(file.mapping))
        calls.locked.add(host)  # by somebody else in the process
        with pytest.raises(CollectiveError, match="already locked"):
            part.mapped(file)
        calls.locked.remove(host)
        part.mapped(file).close()
        assert calls.done == ["lock", "unlock"]
