"""A torch_musa and a libmusart of a few lines, to look at what the backend asks of them; no device, no simulator."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halma.backends.musa import device, needs, runtime, seam
from halma.backends.musa.seam import NoCompiler, Toolchain

CACHED: tuple[Any, ...] = (
    seam.toolchain, seam.torch_musa, runtime.library, runtime.function, device.family, needs.no_dialect,
    needs.no_triton,
)  # fmt: skip


class Allocator:
    """What torch_musa's allocator knows of pools: id -> captures that use it."""

    def __init__(self) -> None:
        self.uses: dict[tuple[int, int], int] = {}
        self.recording: set[tuple[int, int]] = set()
        self.made = 0

    def handle(self) -> tuple[int, int]:
        """``graph_pool_handle()``."""
        self.made += 1
        return (0, self.made)

    def release(self, index: int, pool: tuple[int, int]) -> None:
        """``_musa_releasePool``: an assertion of torch_musa's fails on a pool that nobody uses."""
        assert self.uses[pool] > 0
        self.uses[pool] -= 1

    def stop(self, index: int, pool: tuple[int, int]) -> None:
        """``_musa_endAllocateCurrentStreamToPool``."""
        self.recording.remove(pool)

    def snapshot(self) -> list[dict[str, Any]]:
        """``memory_snapshot()``: 1 MiB a use."""
        return [{"total_size": uses << 20, "segment_pool_id": pool} for pool, uses in self.uses.items()]


def fake_torch_musa() -> Any:
    """The module: graphs as in 2.7.1, whose ``reset()`` keeps the pool."""
    allocator = Allocator()
    calls: list[str] = []

    class MUSAGraph:
        fails = False

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            assert pool not in allocator.recording, "already recording"
            allocator.uses[pool] = allocator.uses.get(pool, 0) + 1
            allocator.recording.add(pool)
            self.pool = pool
            calls.append(f"begin {capture_error_mode}")

        def capture_end(self) -> None:
            if MUSAGraph.fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            allocator.recording.remove(self.pool)

        def replay(self) -> None:
            calls.append("replay")

        def reset(self) -> None:
            calls.append("reset")

    return SimpleNamespace(
        MUSAGraph=MUSAGraph,
        allocator=allocator,
        calls=calls,
        graph_pool_handle=allocator.handle,
        memory_snapshot=allocator.snapshot,
        set_device=lambda index: calls.append(f"device {index}"),
        _MUSAC=SimpleNamespace(
            _musa_releasePool=allocator.release, _musa_endAllocateCurrentStreamToPool=allocator.stop
        ),
    )


def missing(name: str) -> Any:
    """A loader where nothing can be loaded."""
    raise OSError(f"lib{name}.so: cannot open shared object file")


def no_compiler() -> Any:
    """A toolchain without a compiler."""
    raise NoCompiler("mcc was not found")


def use(
    monkeypatch: pytest.MonkeyPatch,
    *,
    load: Callable[[str], Any] = missing,
    compiler: Callable[[], Any] = no_compiler,
    module: Any = None,
    **more: Any,
) -> None:
    """Let the backend find these in the place of Moore Threads' software until the test is over."""
    tools = Toolchain("musa", load, compiler, lambda *_: pytest.fail("no tensors here"), **more)
    monkeypatch.delenv("HALMA_MUSA_SIM", raising=False)
    monkeypatch.setattr(seam, "vendors_own", lambda: tools)
    monkeypatch.setitem(__import__("sys").modules, "torch_musa", module or fake_torch_musa())
    forget()


def forget() -> None:
    """Nothing found so far counts."""
    for one in CACHED:
        one.cache_clear()
    device._ready.device = None


COMPILER = shutil.which("g++")


def c_library(folder: Path, source: str) -> Any:
    """A library compiled from C, as ctypes loads it: the calls are the platform's own."""
    import ctypes

    if COMPILER is None:
        pytest.skip("needs g++")
    (folder / "lib.cpp").write_text(f'extern "C" {{\n{source}\n}}\n')
    line = [COMPILER, "-O1", "-fPIC", "-shared", "-w", "-include", "cstring", "-o", "lib.so", "lib.cpp"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "lib.so"))
