"""The simulator over torch.cuda, as far as it can be seen without a GPU: names, pools, ceiling, traps, libraries."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from halma.backends.musa import runtime
from halma.backends.musa.simulator.cuda import libraries
from halma.backends.musa.simulator.cuda.libraries import CudaHandle, MappedLibrary, cuda_name
from halma.hal.backend import Probe
from tests.simulated.children import environment, findings


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return findings("tests.simulated.cuda_program")


def test_streams_and_events_have_the_pinned_names_alone(found: dict[str, Any]) -> None:
    assert found["raw"] == [True, True]
    assert all(text.startswith("AttributeError") for text in found["hidden"])
    assert found["priority"] == -1
    assert found["current"]
    assert all(text.startswith("TypeError") for text in found["foreign"])
    assert len(found["fields"]) == 7
    assert found["capability"] == [3, 1]
    assert found["memory"] == [[3, 4], 7, 5]


def test_torch_cudas_own_are_trapped(found: dict[str, Any]) -> None:
    assert all("on a MUSA machine there is no such thing" in text for text in found["trapped"])
    assert "torch.cuda.CUDAGraph" in found["trapped graph"]
    assert found["for torch"] == "", "torch itself makes them too"


def test_the_pool_goes_when_it_is_released_and_the_graph_is_reset(found: dict[str, Any]) -> None:
    held, after_reset, released, released_early, reset = found["pool uses"]
    assert (held, after_reset, released) == (1, 1, 0)
    assert (released_early, reset) == (1, 0)


def test_captures_have_the_pinned_rules(found: dict[str, Any]) -> None:
    assert "the default stream cannot be captured" in found["default"]
    assert "illegal memory access" in found["after the last"]
    assert found["one less"] == ""
    assert found["reinstantiated"] == 1


def test_the_toolchain_is_nvidias_under_musas_names(found: dict[str, Any]) -> None:
    device_type, dialect, library, simulated = found["toolchain"]
    assert (device_type, dialect, library) == ("cuda", "cuda", "nccl")
    assert "simulated" in simulated


@pytest.mark.parametrize("name", [name for names in runtime.SIGNATURES.values() for name in names])
def test_every_name_of_the_backend_has_one_of_cudas(name: str) -> None:
    assert cuda_name(name).startswith(("cuda", "cu"))
    assert "mu" not in cuda_name(name).lower().replace("musa", "mu!")[:4]


@pytest.mark.parametrize("name", ["cudaMalloc", "malloc", "musamalloc", "must"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(AttributeError):
        cuda_name(name)


class _Runtime:
    """libcudart, as far as handles go: real C functions, so the structures travel as they do."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(CudaHandle), ctypes.c_void_p)
        opening = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), CudaHandle, ctypes.c_uint)
        self._functions = {"cudaIpcGetMemHandle": get(self._get), "cudaIpcOpenMemHandle": opening(self._open)}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def _get(self, handle: Any, address: Any) -> int:
        ctypes.memmove(handle, bytes(range(64)), 64)
        return 0

    def _open(self, out: Any, handle: Any, flags: int) -> int:
        self.opened.append(bytes(handle.reserved))
        out[0] = 0x5000 + flags
        return 0


def test_handles_are_padded_to_musas_size_and_back() -> None:
    real = _Runtime()
    library = MappedLibrary(real, libraries._RUNTIME)
    get, opening = library.musaIpcGetMemHandle, library.musaIpcOpenMemHandle
    get.argtypes = runtime.SIGNATURES["musart"]["musaIpcGetMemHandle"]
    opening.argtypes = runtime.SIGNATURES["musart"]["musaIpcOpenMemHandle"]
    room = (ctypes.c_ubyte * 256)(*[0xFF] * 256)
    assert get(ctypes.cast(room, ctypes.POINTER(runtime.IpcHandle)), 0x1000) == 0
    assert bytes(room) == bytes(range(64)) + bytes(64) + b"\xff" * 128
    out, given = ctypes.c_void_p(), runtime.IpcHandle.from_buffer_copy(bytes(room)[: runtime.HANDLE_BYTES])
    assert opening(ctypes.byref(out), given, 1) == 0
    assert out.value == 0x5001
    assert real.opened == [bytes(range(64))]
    given.reserved[100] = 1
    assert opening(ctypes.byref(out), given, 1) == 1, "a handle that was not padded with zeros is none of ours"


def test_a_library_has_no_stub_and_no_other_name() -> None:
    library = MappedLibrary(_Runtime(), {})
    assert library.musaIpcGetMemHandle is library.musaIpcGetMemHandle
    for name in ("musaMallocAsync", "musaThreadExchangeStreamCaptureMode", "musaNoSuchThing", "cudaMalloc"):
        with pytest.raises(AttributeError):
            getattr(library, name)


def test_the_simulator_over_cuda_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from halma.backends.musa import simulator

    monkeypatch.setattr("halma.backends.cuda.probe", lambda: Probe(False, "no driver"))
    there = simulator.probe("cuda")
    assert not there.ok
    assert "no driver" in there.reason
    assert "HALMA_MUSA_SIM" in environment("cuda")


def test_a_torch_without_the_helper_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from halma.backends.musa import simulator

    assert simulator.probe("cpu").ok
    monkeypatch.setattr(simulator, "HELPER", "_a_helper_of_tomorrow")
    there = simulator.probe("cpu")
    assert not there.ok
    assert "_a_helper_of_tomorrow" in there.reason
