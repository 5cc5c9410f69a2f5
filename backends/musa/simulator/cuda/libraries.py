"""libmusart and libmusa over libcudart and libcuda: musaX -> cudaX, muX -> cuX, with CUDA's own signatures."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from halma.backends.musa.runtime import HANDLE_BYTES
from halma.backends.musa.simulator.functions import Function

CUDA_HANDLE_BYTES: Final = 64
STUBS: Final = frozenset(
    {
        "musaThreadExchangeStreamCaptureMode", "musaStreamGetCaptureInfo", "musaMallocAsync", "musaFreeAsync",
        "musaDeviceGetDefaultMemPool", "musaMemPoolGetAttribute", "musaMemPoolSetAttribute", "musaMemPoolTrimTo",
        "musaGraphDebugDotPrint",
    }
)  # fmt: skip
"""torch_musa 2.7.1 throws for these (torch_musa/csrc/aten/ops/musa/unimplemented_functions.cpp), so nobody counts on
them: here they are not there."""


class CudaHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = [("reserved", ctypes.c_ubyte * CUDA_HANDLE_BYTES)]


def cuda_name(name: str) -> str:
    """``cudaMalloc`` of ``musaMalloc``, ``cuInit`` of ``muInit``.

    Raises:
        AttributeError: it is neither.
    """
    for mine, theirs in (("musa", "cuda"), ("mu", "cu")):
        rest = name.removeprefix(mine)
        if rest != name and rest[:1].isupper():
            return theirs + rest
    raise AttributeError(f"{name} is no name of a MUSA library")


class MappedLibrary:
    """A library of CUDA's under MUSA's names.

    Args:
        real: a ``ctypes.CDLL``, or what has its functions.
        special: functions that differ in more than their name; each is given the real library.
    """

    def __init__(self, real: Any, special: Mapping[str, Callable[..., Any]]) -> None:
        self._real = real
        self._special = special
        self._made: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._find(name)
        return found

    def _find(self, name: str) -> Any:
        theirs = cuda_name(name)
        if name in STUBS:
            raise AttributeError(f"{name} is a stub that throws in torch_musa 2.7.1")
        body = self._special.get(name)
        if body is not None:
            return Function(lambda *args: body(self._real, *args))
        try:
            return self._real[theirs]  # an object of its own: argtypes that are set on it are nobody else's
        except AttributeError:
            raise AttributeError(f"{name}: {theirs} is not there") from None


def _ipc_get(real: Any, handle: Any, address: int | None) -> int:
    given = CudaHandle()
    function = real["cudaIpcGetMemHandle"]
    function.argtypes, function.restype = (ctypes.POINTER(CudaHandle), ctypes.c_void_p), ctypes.c_int
    code = int(function(ctypes.byref(given), address))
    if code == 0:
        padded = bytes(given.reserved).ljust(HANDLE_BYTES, b"\0")
        ctypes.memmove(ctypes.addressof(handle), padded, HANDLE_BYTES)
    return code


def _ipc_open(real: Any, out: Any, handle: Any, flags: int) -> int:
    raw = bytes(handle.reserved)
    if any(raw[CUDA_HANDLE_BYTES:]):
        return 1  # invalid value: not what _ipc_get made
    given = CudaHandle((ctypes.c_ubyte * CUDA_HANDLE_BYTES).from_buffer_copy(raw[:CUDA_HANDLE_BYTES]))
    function = real["cudaIpcOpenMemHandle"]
    function.argtypes = (ctypes.POINTER(ctypes.c_void_p), CudaHandle, ctypes.c_uint)
    function.restype = ctypes.c_int
    return int(function(ctypes.byref(out), given, flags))


def _get_function(real: Any, out: Any, module: Any, name: bytes) -> int:
    """Also loads the code: CUDA would do so at the first launch, which may have to wait for kernels that spin."""
    getting, loading = real["cuModuleGetFunction"], real["cuFuncLoad"]
    getting.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p)
    loading.argtypes = (ctypes.c_void_p,)
    return int(getting(ctypes.byref(out), module, name)) or int(loading(out))


_DRIVER: Final[dict[str, Callable[..., Any]]] = {"muModuleGetFunction": _get_function}
_RUNTIME: Final[dict[str, Callable[..., Any]]] = {
    "musaIpcGetMemHandle": _ipc_get,
    "musaIpcOpenMemHandle": _ipc_open,
}


def load(name: str) -> MappedLibrary:
    """``musart`` or ``musa``.

    Raises:
        OSError: any other, or CUDA's cannot be loaded.
    """
    if name == "musart":
        return MappedLibrary(ctypes.CDLL(_runtime_file()), _RUNTIME)
    if name == "musa":
        return MappedLibrary(ctypes.CDLL("libcuda.so.1"), _DRIVER)
    raise OSError(f"lib{name}.so: the simulator has no such library")


def _runtime_file() -> str:
    """The libcudart that torch has loaded: another one would have state of its own.

    Raises:
        OSError: torch has loaded none.
    """
    mapped = re.findall(r"(/\S*libcudart[^\s/]*\.so\S*)", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if mapped:
        return mapped[0]
    import torch

    major = str(torch.version.cuda).partition(".")[0]
    try:
        ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise OSError(f"this torch has no shared libcudart, which the simulator maps to: {error}") from None
    return f"libcudart.so.{major}"
