"""Compiles sources of the portable dialect with NVRTC: no GPU, driver or context needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from halma.hal.backend import KernelSource
from halma.hal.errors import KernelError

OPTIONS = ("-std=c++17", "-default-device", "--fmad=true", "-lineinfo")
"""Of every compilation; -default-device lets a host header's functions be used on the device."""


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]

    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler: cubins of another one are not the same."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


@cache
def include_directories() -> tuple[str, ...]:
    """Where CUDA's own headers are: beside the compiler's wheel, then ``CUDA_HOME`` or ``CUDA_PATH``."""
    found: list[str] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        found += [str(path) for path in map(find_nvidia_header_directory, ("cudart", "cccl")) if path]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        if root and os.path.isdir(os.path.join(root, "include")):
            found.append(os.path.join(root, "include"))
    return tuple(dict.fromkeys(found))


def compile_only(source: KernelSource, arch: str, options: Sequence[str] = ()) -> bytes:
    """The cubin of ``source`` for ``arch`` (``sm_90a``).

    Raises:
        KernelError: it does not compile; with the compiler's log.
    """
    nvrtc = _nvrtc()
    flags = flags_of(source.defines, arch, options)
    headers = [(name.encode(), text.encode()) for name, text in source.headers.items()]
    code, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(),
        f"{source.name}.cu".encode(),
        len(headers),
        [text for _, text in headers],
        [name for name, _ in headers],
    )
    _check(nvrtc, code, source, arch, "")
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        _check(nvrtc, code, source, arch, _log(nvrtc, program))
        code, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, code, source, arch, "")
        cubin = b" " * size
        (code,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(nvrtc, code, source, arch, "")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def flags_of(defines: Mapping[str, str], arch: str, options: Sequence[str] = ()) -> list[str]:
    """The compiler's flags, without those that only say where CUDA's headers are."""
    macros = [f"-D{name}={value}" if value else f"-D{name}" for name, value in sorted(defines.items())]
    paths = [f"-I{path}" for path in include_directories()]
    return [f"-arch={arch}", *OPTIONS, *options, *macros, *paths]


def _log(nvrtc: Any, program: Any) -> str:
    code, size = nvrtc.nvrtcGetProgramLogSize(program)
    if int(code) != 0 or size <= 1:
        return ""
    text = b" " * size
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.decode(errors="replace").strip("\0 \n")


def _check(nvrtc: Any, code: Any, source: KernelSource, arch: str, log: str) -> None:
    if int(code) == 0:
        return
    _, text = nvrtc.nvrtcGetErrorString(code)
    raise KernelError(
        f"kernel source {source.name!r} does not compile",
        asked=f"NVRTC {'.'.join(map(str, nvrtc_version()))} for {arch}",
        found=log.splitlines() or [text.decode() if isinstance(text, bytes) else str(text)],
        do="mend the source; nothing is retried in another way",
    )
