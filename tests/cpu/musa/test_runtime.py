"""Functions of libmusart and libmusa: names by the rule, errors with their text, what is missing said."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halma.backends.musa import runtime
from halma.backends.musa.mtrtc import SIGNATURES as MTRTC
from halma.backends.musa.runtime import LibraryError, Missing
from tests.cpu.musa.fakes import c_library, use

CUDA = re.findall(
    r"\w+",
    """
    cudaRuntimeGetVersion cudaDriverGetVersion cudaGetLastError cudaMalloc cudaFree cudaMemset cudaIpcGetMemHandle
    cudaIpcOpenMemHandle cudaIpcCloseMemHandle cudaHostRegister cudaHostUnregister cudaHostGetDevicePointer
    cudaStreamCreateWithFlags cudaStreamIsCapturing cudaDeviceGetAttribute cudaGetErrorName cudaGetErrorString
    cuInit cuModuleLoadData cuModuleGetFunction cuFuncGetAttribute cuFuncSetAttribute cuPointerGetAttribute
    cuLaunchKernel cuGetErrorName cuGetErrorString nvrtcVersion nvrtcCreateProgram nvrtcCompileProgram
    nvrtcGetProgramLogSize nvrtcGetProgramLog nvrtcDestroyProgram
""",
)
"""Functions of CUDA's runtime API, driver API and NVRTC, from NVIDIA's reference."""
FAT_BINARY = {"mtrtcGetFatBinSize", "mtrtcGetFatBin"}
"""MTRTC's result has a name of its own."""
RULE = {"musart": ("musa", "cuda"), "musa": ("mu", "cu"), "mtrtc": ("mtrtc", "nvrtc")}


def by_rule(name: str, home: str) -> str:
    ours, theirs = RULE[home]
    assert re.match(rf"{ours}[A-Z]", name), f"{name} is not a name of lib{home}"
    return theirs + name.removeprefix(ours)


def test_every_name_is_cudas_by_the_rule() -> None:
    used = [(name, home) for home, functions in runtime.SIGNATURES.items() for name in functions]
    used += [(name, home) for home, names in runtime.TEXTS.items() for name in names]
    used += [(name, "mtrtc") for name in MTRTC if name not in FAT_BINARY]
    assert len(used) > 30
    assert [name for name, home in used if by_rule(name, home) not in CUDA] == []


def test_the_rule_finds_a_name_that_is_not_there() -> None:
    assert by_rule("musaIpcGetHandle", "musart") not in CUDA and by_rule("muLaunch", "musa") not in CUDA
    with pytest.raises(AssertionError):
        by_rule("cudaMalloc", "musart")


SOURCE = """
int musaMalloc(void** out, size_t size) { if (size > 1000) return 2; *out = (void*)0x7f0000001234; return 0; }
int musaStreamIsCapturing(void* stream, int* out) { *out = stream == (void*)5; return 0; }
const char* musaGetErrorName(int code) { return "musaErrorMemoryAllocation"; }
const char* musaGetErrorString(int code) { return "out of memory"; }
static int asked = 0;
int musaGetLastError() { return asked++; }
int times_asked() { return asked; }
"""


def test_a_failed_call_says_which_why_and_takes_the_error_off_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = c_library(tmp_path, SOURCE)
    use(monkeypatch, load=lambda name: library)
    assert runtime.value("musaMalloc", 64) == 0x7F0000001234 and library.times_asked() == 0
    with pytest.raises(LibraryError, match=r"musaMalloc answers error 2: musaErrorMemoryAllocation, out of memory"):
        runtime.value("musaMalloc", 2000)
    assert library.times_asked() == 1
    assert runtime.value_after("musaStreamIsCapturing", 5) == 1 and runtime.value_after("musaStreamIsCapturing", 6) == 0


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert "libmusart cannot be loaded" in str(runtime.why_missing()) and not runtime.has("musaMalloc")
    empty: Any = SimpleNamespace()
    use(monkeypatch, load=lambda name: empty)
    assert runtime.why_missing() is None
    with pytest.raises(Missing, match="libmusa has no function muLaunchKernel"):
        runtime.call("muLaunchKernel")
