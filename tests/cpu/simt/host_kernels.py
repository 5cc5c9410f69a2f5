"""Kernels of the dialect run on the host, for their arithmetic and their bookkeeping: simulated, in every sense."""

# pyright: basic
from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch

from halma.backends.simt.sources import Target
from halma.hal.backend import KernelSource
from halma.hal.capabilities import Capabilities
from tests.cpu.simt.fake_device import NotedStream

COMPILER = shutil.which("g++")
PRELUDE = Path(__file__).with_name("host_prelude.h")
CLOCK_KHZ = 1_000_000
TARGET = Target("musa", 32, False, 0, CLOCK_KHZ)


class HostKernels:
    """See :class:`halma.hal.backend.KernelPart`. A launch returns when it is done; or it is kept until :meth:`run`,
    which has streams run side by side, for kernels of ranks that wait for one another."""

    dialect = TARGET.dialect
    clock_khz = TARGET.clock_khz
    shared_bytes = 256 << 10

    def __init__(self, *, together: bool = False) -> None:
        self._loaded: dict[str, Any] = {}
        self._kept: dict[int, list[Any]] | None = {} if together else None
        self.launched: list[str] = []

    def load(self, source: KernelSource, entries: Sequence[str]) -> Mapping[str, Any]:
        key = repr((source.text, sorted(source.headers.items()), sorted(source.defines.items())))
        library = self._loaded.get(key)
        if library is None:
            library = self._loaded[key] = self._compiled(source, entries)
        return {entry: (entry, getattr(library, f"host_{entry}")) for entry in entries}

    def _compiled(self, source: KernelSource, entries: Sequence[str]) -> Any:
        folder = Path(tempfile.mkdtemp(prefix="halma-host-kernels-"))
        try:
            for name, text in {**source.headers, "host.h": PRELUDE.read_text()}.items():
                (folder / name).write_text(text)
            calls = [_entry(entry) for entry in entries]
            text = source.text.replace("extern __shared__", "__shared__").replace("memory[];", "memory[256 << 10];")
            (folder / "unit.cpp").write_text('#include "host.h"\n' + text + "\n".join(calls))
            clock = {"HALMA_CLOCK_KHZ": f"{CLOCK_KHZ}ull"}  # its clock64() counts nanoseconds
            flags = [f"-D{name}={value}" for name, value in {**clock, **source.defines}.items()]
            line = [
                COMPILER,
                "-x",
                "c++",
                "-std=c++17",
                "-O1",
                "-ffp-contract=off",
                "-fPIC",
                "-shared",
                "-pthread",
                "-w",
            ]
            done = subprocess.run(
                [*line, *flags, "-o", "unit.so", "unit.cpp"], cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            return ctypes.CDLL(str(folder / "unit.so"))
        finally:
            shutil.rmtree(folder)

    def launch(self, kernel: Any, grid: int, block: int, args: Sequence[Any], *, stream: Any, **more: Any) -> None:
        words = (ctypes.c_uint64 * len(args))(*args)
        self.launched.append(kernel[0])
        together = ctypes.c_bool(self._kept is not None)
        work = partial(kernel[1], ctypes.c_uint(grid), ctypes.c_uint(block), words, together)
        if self._kept is None:
            work()
        else:
            self._kept.setdefault(id(stream), []).append(work)

    def run(self) -> None:
        """What was kept: every stream in its order."""
        kept, self._kept = self._kept or {}, {}
        threads = [Thread(target=lambda one=one: [work() for work in one]) for one in kept.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _entry(entry: str) -> str:
    """C that takes a grid, a block and the words of a kernel's parameters."""
    return (
        f"static void body_{entry}(const u64* a) {{ spread({entry}, a); }}\n"
        f'extern "C" void host_{entry}(unsigned grid, unsigned block, const u64* a, bool together)'
        f" {{ run_grid(body_{entry}, grid, block, a, together); }}\n"
    )


def host_backend(
    warp: int = 32, atomicity: int = 0, *, together: bool = False, resident_threads: int = 132 * 2048
) -> Any:
    """What drivers use of a backend.

    Args:
        together: launches wait for ``device.synchronize``, and then ranks run side by side.
    """
    pinned = {"warp_width": warp, "dependent_launch": False, "remote_store_atomicity": atomicity}
    kernels = HostKernels(together=together)
    return SimpleNamespace(
        name="musa",
        capabilities=Capabilities(**pinned, resident_threads=resident_threads),
        kernels=kernels,
        memory=SimpleNamespace(pinned=lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype)),
        device=SimpleNamespace(
            new_stream=lambda name: NotedStream(), torch_device=torch.device("cpu"), synchronize=kernels.run
        ),
    )
