"""NVRTC without a GPU: compiles a source of the dialect to a cubin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halma.hal.backend import KernelSource


@dataclass(frozen=True)
class Compiled:
    """What came of it: the machine code where it compiled, and what the compiler said."""

    ok: bool
    code: bytes
    log: str

    def entries(self) -> frozenset[str]:
        """Kernels in the machine code, by the sections it keeps them in."""
        return frozenset(name.decode() for name in re.findall(rb"\.text\.([a-z0-9_]+)\x00", self.code))


def compiled(nvrtc: Any, source: KernelSource, arch: str, options: Sequence[str] = ()) -> Compiled:
    """``source`` for ``arch`` with NVRTC, its headers from memory."""
    flags = [f"-arch={arch}", "-std=c++17", *(f"-D{name}={value}" for name, value in source.defines.items()), *options]
    texts = [text.encode() for text in source.headers.values()]
    names = [name.encode() for name in source.headers]
    _, program = nvrtc.nvrtcCreateProgram(source.text.encode(), b"unit.cu", len(names), texts, names)
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        if int(code) != 0:
            return Compiled(False, b"", log.decode(errors="replace").strip("\0 \n"))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        machine = b" " * size
        nvrtc.nvrtcGetCUBIN(program, machine)
        return Compiled(True, machine, log.decode(errors="replace").strip("\0 \n"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
