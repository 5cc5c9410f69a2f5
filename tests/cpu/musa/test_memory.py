"""Memory that peers map: handles of either size by the platform's own calls, and virtual memory refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halma.backends.musa.memory import RuntimeMemory
from halma.backends.musa.runtime import LibraryError
from tests.cpu.musa.fakes import c_library, use

SOURCE = """
struct Handle {{ unsigned char bytes[{size}]; }};
static int freed = 0;
int times_freed() {{ return freed; }}
int musaMalloc(void** out, size_t size) {{ *out = (void*)0x1000; return 0; }}
int musaFree(void* at) {{ freed += 1; return 0; }}
int musaIpcGetMemHandle(Handle* out, void* at) {{
    for (int i = 0; i < {size}; ++i) out->bytes[i] = (unsigned char)(i + 3);
    return 0;
}}
int musaIpcOpenMemHandle(void** out, Handle given, unsigned flags) {{
    for (int i = 0; i < {size}; ++i) if (given.bytes[i] != (unsigned char)(i + 3)) return 1;
    *out = (void*)(0x5000 + (size_t)flags);
    return 0;
}}
int muPointerGetAttribute(void* out, int which, void* at) {{
    if (which != 10) return 1;
    *(bool*)out = {capable};
    return 0;
}}
"""


def memory(folder: Path, monkeypatch: pytest.MonkeyPatch, *, size: int = 64, capable: str = "true") -> Any:
    library = c_library(folder, SOURCE.format(size=size, capable=capable))
    use(monkeypatch, load=lambda name: library)
    return RuntimeMemory(0, torch.device("cpu")), library


@pytest.mark.parametrize("size", [64, 128])
def test_a_handle_of_either_size_goes_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    calls, _ = memory(tmp_path, monkeypatch, size=size)
    handle = calls.export(calls.allocate(1 << 21))
    assert len(handle) == calls.handle_bytes == 128
    assert handle[:size] == bytes(range(3, size + 3)) and not any(handle[size:])
    assert calls.open(handle) == 0x5001


def test_a_larger_handle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, _ = memory(tmp_path, monkeypatch, size=160)
    with pytest.raises(LibraryError, match="its handle has 160 bytes, and 128 are known of"):
        calls.export(0x1000)


@pytest.mark.invariant("A8")
def test_virtual_memory_is_given_back_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, library = memory(tmp_path, monkeypatch, capable="false")
    with pytest.raises(LibraryError, match="virtual memory"):
        calls.allocate(1 << 21)
    assert library.times_freed() == 1
    assert "virtual memory" in str(calls.why_missing()) and library.times_freed() == 2, "known before a plan is kept"


@pytest.mark.invariant("A8", control=True)
@pytest.mark.parametrize("capable", ["true", "(return 1, true)"])
def test_memory_that_is_fit_or_says_nothing_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capable: str
) -> None:
    body = SOURCE if capable == "true" else SOURCE.replace("*(bool*)out = {capable};", "return 1;")
    library = c_library(tmp_path, body.format(size=64, capable=capable))
    use(monkeypatch, load=lambda name: library)
    calls = RuntimeMemory(0, torch.device("cpu"))
    assert calls.allocate(1 << 21) == 0x1000 and library.times_freed() == 0 and calls.why_missing() is None


def test_without_the_runtime_nothing_is_exportable_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert "libmusart cannot be loaded" in str(RuntimeMemory(0, torch.device("cpu")).why_missing())
