"""MTRTC, the runtime compiler: NVRTC's functions under the prefix mtrtc, with a fat binary as the result.

Its images are loaded as mcc's are. Older libraries call the result GetMUSA; those are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, Final

from halma.backends.musa.flags import arch_of, does_not_compile, macros
from halma.backends.musa.seam import NoCompiler, toolchain
from halma.hal.backend import KernelSource

_STRINGS = POINTER(c_char_p)
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "mtrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "mtrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, _STRINGS, _STRINGS),
    "mtrtcCompileProgram": (c_void_p, c_int, _STRINGS),
    "mtrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "mtrtcGetProgramLog": (c_void_p, c_char_p),
    "mtrtcGetFatBinSize": (c_void_p, POINTER(c_size_t)),
    "mtrtcGetFatBin": (c_void_p, c_char_p),
    "mtrtcDestroyProgram": (POINTER(c_void_p),),
}


class Mtrtc:
    """See :class:`halma.backends.musa.seam.Compiler`.

    Raises:
        NoCompiler: the library, or a function of it, is not there.
    """

    def __init__(self) -> None:
        try:
            library = toolchain().load("mtrtc")
        except OSError as error:
            raise NoCompiler(f"libmtrtc cannot be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, arguments in SIGNATURES.items():
            try:
                found = getattr(library, name)
            except AttributeError:
                raise NoCompiler(f"libmtrtc has no function {name}") from None
            found.argtypes, found.restype = arguments, c_int
            self._functions[name] = found
        major, minor = c_int(), c_int()
        code = self._functions["mtrtcVersion"](byref(major), byref(minor))
        if code:
            raise NoCompiler(f"mtrtcVersion answers error {code}")  # images are kept by it
        self.version = f"MTRTC {major.value}.{minor.value}"

    def arch_of(self, capability: tuple[int, int]) -> str:
        """``mp_31`` for (3, 1)."""
        return arch_of(capability)

    def flags(self, defines: Mapping[str, str], arch: str) -> list[str]:
        """All of them."""
        return [f"--offload-arch={arch}", "-std=c++17", "-ffp-contract=off", *macros(defines)]

    def compile(self, source: KernelSource, arch: str) -> bytes:
        """The image.

        Raises:
            KernelError: it does not compile; with the compiler's log.
        """
        program = c_void_p()
        names, texts = _strings(list(source.headers)), _strings(list(source.headers.values()))
        self._call(
            source, arch, None, "mtrtcCreateProgram", byref(program), source.text.encode(),
            f"{source.name}.mu".encode(), len(source.headers), texts, names,
        )  # fmt: skip
        try:
            flags = self.flags(source.defines, arch)
            self._call(source, arch, program, "mtrtcCompileProgram", program, len(flags), _strings(flags))
            return self._text(source, arch, program, "mtrtcGetFatBin")
        finally:
            self._functions["mtrtcDestroyProgram"](byref(program))

    def _text(self, source: KernelSource, arch: str, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(source, arch, None, f"{what}Size", program, byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(source, arch, None, what, program, room)
        return room.raw

    def _call(self, source: KernelSource, arch: str, logged: c_void_p | None, name: str, *args: Any) -> None:
        code = int(self._functions[name](*args))
        if code == 0:
            return
        log = "" if logged is None else self._text(source, arch, logged, "mtrtcGetProgramLog").decode(errors="replace")
        raise does_not_compile(source, self.version, arch, log.strip("\0 \n") or f"{name} answers error {code}")


def _strings(texts: Sequence[str]) -> Any:
    return (c_char_p * len(texts))(*[text.encode() for text in texts])
