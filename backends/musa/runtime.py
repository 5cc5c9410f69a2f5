"""Functions of libmusart and libmusa that the backend calls, by ctypes: one table of names and signatures.

torch_musa 2.7.1 offers Python no IPC, no allocation outside its allocator and no modules of kernels
(MooreThreads/torch_musa torch_musa/csrc/core/musart.cpp), so these come from the libraries themselves. Every name is
CUDA's by the rule cudaX -> musaX, cuX -> muX, with CUDA's signature; the rule is checked by a test. Values of
enumerations are CUDA's too, by the same rule: an assumption, which is why what is asked with them is checked where it
can be, and unknown where it cannot.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any, Final

from halma.backends.musa.seam import toolchain

HANDLE_BYTES: Final = 128
"""Of an IPC handle, at most: vllm-musa declares 128, CUDA has 64. Structures of this size are passed in memory on
every ABI that matters, so a library whose handle is smaller reads the front of it."""


class IpcHandle(ctypes.Structure):
    """``musaIpcMemHandle_t``."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_OUT_POINTER = POINTER(c_void_p)
_OUT_INT = POINTER(c_int)
_UINT3 = (c_uint, c_uint, c_uint)

SIGNATURES: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "musart": {
        "musaRuntimeGetVersion": (_OUT_INT,),
        "musaDriverGetVersion": (_OUT_INT,),
        "musaGetLastError": (),
        "musaMalloc": (_OUT_POINTER, c_size_t),
        "musaFree": (c_void_p,),
        "musaMemset": (c_void_p, c_int, c_size_t),
        "musaIpcGetMemHandle": (POINTER(IpcHandle), c_void_p),
        "musaIpcOpenMemHandle": (_OUT_POINTER, IpcHandle, c_uint),
        "musaIpcCloseMemHandle": (c_void_p,),
        "musaHostRegister": (c_void_p, c_size_t, c_uint),
        "musaHostUnregister": (c_void_p,),
        "musaHostGetDevicePointer": (_OUT_POINTER, c_void_p, c_uint),
        "musaStreamCreateWithFlags": (_OUT_POINTER, c_uint),
        "musaStreamIsCapturing": (c_void_p, _OUT_INT),
        "musaDeviceGetAttribute": (_OUT_INT, c_int, c_int),
    },
    "musa": {
        "muInit": (c_uint,),
        "muModuleLoadData": (_OUT_POINTER, c_void_p),
        "muModuleGetFunction": (_OUT_POINTER, c_void_p, c_char_p),
        "muFuncGetAttribute": (_OUT_INT, c_int, c_void_p),
        "muFuncSetAttribute": (c_void_p, c_int, c_int),
        "muPointerGetAttribute": (c_void_p, c_int, c_void_p),
        "muLaunchKernel": (
            c_void_p, *_UINT3, *_UINT3, c_uint, c_void_p, c_void_p, c_void_p,
        ),
    },
}  # fmt: skip
"""Library -> function -> types of its arguments. Each returns an error code."""

TEXTS: Final[dict[str, tuple[str, str]]] = {
    # library -> (name of an error, its text): const char *(int) of the runtime, int(int, const char **) of the driver
    "musart": ("musaGetErrorName", "musaGetErrorString"),
    "musa": ("muGetErrorName", "muGetErrorString"),
}


class LibraryError(RuntimeError):
    """A call that failed. ``code`` is what it returned; ``call`` the function's name."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} answers error {code}: {text}")
        self.call = call
        self.code = code


class Missing(RuntimeError):
    """A library, or a function of it, that is not there."""


@cache
def library(name: str) -> Any:
    """The library; ``musart`` or ``musa``.

    Raises:
        Missing: it cannot be loaded.
    """
    try:
        return toolchain().load(name)
    except OSError as error:
        raise Missing(f"lib{name} cannot be loaded: {error}") from error


def why_missing(*names: str) -> str | None:
    """Why calls of these libraries (all by default) cannot be made, or None."""
    for name in names or tuple(SIGNATURES):
        try:
            library(name)
        except Missing as error:
            return str(error)
    return None


@cache
def function(name: str) -> Any:
    """A function of the table, ready to be called.

    Raises:
        Missing: the library or the function is not there.
    """
    home = next(home for home, functions in SIGNATURES.items() if name in functions)
    try:
        found = getattr(library(home), name)
    except AttributeError:
        raise Missing(f"lib{home} has no function {name}") from None
    found.argtypes = SIGNATURES[home][name]
    found.restype = c_int
    return found


def has(name: str) -> bool:
    """Whether a function of the table is there."""
    try:
        function(name)
    except Missing:
        return False
    return True


def call(name: str, *args: Any) -> None:
    """Call a function of the table.

    Raises:
        LibraryError: it failed.
        Missing: it is not there.
    """
    code = int(function(name)(*args))
    if code != 0:
        if name.startswith("musa") and has("musaGetLastError"):
            function("musaGetLastError")()  # the runtime keeps it, and torch would find it at its next check
        raise LibraryError(name, code, _text_of(name, code))


def value(name: str, *args: Any) -> int:
    """The number or address that a function writes to its first argument; ``args`` are the others.

    Raises:
        LibraryError, Missing: as :func:`call`.
    """
    kind = function(name).argtypes[0]._type_
    out = kind()
    call(name, ctypes.byref(out), *args)
    return out.value or 0


def value_after(name: str, *args: Any) -> int:
    """The number that a function writes to its last argument; ``args`` are the others.

    Raises:
        LibraryError, Missing: as :func:`call`.
    """
    out = function(name).argtypes[-1]._type_()
    call(name, *args, ctypes.byref(out))
    return out.value or 0


def _text_of(name: str, code: int) -> str:
    home = next(home for home, functions in SIGNATURES.items() if name in functions)
    words: list[str] = []
    for asked in TEXTS[home]:
        try:
            found = getattr(library(home), asked)
        except AttributeError:
            continue
        if home == "musart":
            found.argtypes, found.restype = (c_int,), c_char_p
            said = found(code)
        else:
            out = c_char_p()
            found.argtypes, found.restype = (c_int, POINTER(c_char_p)), c_int
            said = out.value if found(code, ctypes.byref(out)) == 0 else None
        if said:
            words.append(said.decode(errors="replace") if isinstance(said, bytes) else str(said))
    return ", ".join(words) or "no text"
