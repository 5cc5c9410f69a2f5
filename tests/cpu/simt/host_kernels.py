"""Kernels of the dialect run on the host, for their arithmetic and their bookkeeping: simulated, in every sense."""

# pyright: basic
from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from halma.backends.simt.sources import Target
from halma.hal.backend import KernelSource
from halma.hal.capabilities import Capabilities
from tests.cpu.simt.fake_device import NotedStream

COMPILER = shutil.which("g++")
PRELUDE = Path(__file__).with_name("host_prelude.h")
TARGET = Target("musa", 32, False, 0, 1_000_000)


class HostKernels:
    """See :class:`halma.hal.backend.KernelPart`; a launch returns when it is done."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
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
            for name, text in {**source.headers, "host.h": PRELUDE.read_text(), "half.h": ""}.items():
                (folder / name).write_text(text)
            # Arguments come as an array of 8-byte words, and every parameter of a kernel is one.
            calls = [_entry(source.text, entry) for entry in entries]
            (folder / "unit.cpp").write_text('#include "host.h"\n' + source.text + "\n".join(calls))
            flags = [f"-D{name}={value}" for name, value in source.defines.items()]
            line = [COMPILER, "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", '-DHALMA_MUSA_HALF="half.h"']
            done = subprocess.run(
                [*line, *flags, "-o", "unit.so", "unit.cpp"], cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            return ctypes.CDLL(str(folder / "unit.so"))
        finally:
            shutil.rmtree(folder)

    def launch(self, kernel: Any, grid: int, block: int, args: Sequence[Any], *, stream: Any, dependent: bool) -> None:
        words = (ctypes.c_uint64 * len(args))(*args)
        self.launched.append(kernel[0])
        kernel[1](ctypes.c_uint(grid), ctypes.c_uint(block), words)


def _entry(text: str, entry: str) -> str:
    """C that takes a grid, a block and the words of a kernel's parameters."""
    found = re.search(rf"KERNEL {entry}\(([^)]*)\)", text)
    if found is None:  # made by a macro: all of a family have the same parameters
        stem = next(one for one in re.findall(r"KERNEL (\w+?)##", text) if entry.startswith(one))
        found = re.search(rf"KERNEL {stem}##\w+\(([^)]*)\)", text)
    assert found is not None, entry
    words = ", ".join(f"a[{place}]" for place in range(len(found[1].split(","))))
    return (
        f"static void body_{entry}(const u64* a) {{ {entry}({words}); }}\n"
        f'extern "C" void host_{entry}(unsigned grid, unsigned block, const u64* a)'
        f" {{ run_grid(body_{entry}, grid, block, a); }}\n"
    )


def host_backend() -> Any:
    """What drivers use of a backend."""
    pinned = {"warp_width": 32, "dependent_launch": False, "remote_store_atomicity": 0, "resident_threads": 132 * 2048}
    return SimpleNamespace(
        name="musa",
        capabilities=Capabilities(**pinned),
        kernels=HostKernels(),
        memory=SimpleNamespace(pinned=lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype)),
        device=SimpleNamespace(new_stream=lambda name: NotedStream(), torch_device=torch.device("cpu")),
    )
