"""Kernels by mcc and MTRTC, over stand-ins: what is compiled, kept, loaded and launched, and what is said without."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halma.backends.musa import needs
from halma.backends.musa.compiler import Mcc, find_compiler, find_mcc
from halma.backends.musa.kernels import MusaKernels
from halma.backends.musa.mtrtc import Mtrtc
from halma.backends.musa.seam import NoCompiler
from halma.backends.torch_device.device import ThreadState
from halma.hal.backend import KernelSource
from halma.hal.errors import CapabilityError, KernelError
from tests.cpu.musa.fakes import c_library, use

SOURCE = KernelSource("unit", '#include "dialect.h"\nKERNEL go() {}', {"dialect.h": "#define KERNEL"}, {"N": "4"})

MCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "mcc version 4.3.6"; exit 0; fi
echo "$@" >> {log}
for last; do :; done
if grep -q wrong "$last"; then echo "unit.mu:2: error: no such word" >&2; exit 1; fi
while [ "$1" != -o ]; do shift; done
[ -f dialect.h ] && echo image > "$2"
"""


def mcc(folder: Path) -> Path:
    """A compiler that writes an image, and its command lines to ``log``."""
    path = folder / "mcc"
    path.write_text(MCC.format(log=folder / "log"))
    path.chmod(0o755)
    return path


def test_mcc_gets_the_source_its_headers_and_every_flag(tmp_path: Path) -> None:
    compiler = Mcc(str(mcc(tmp_path)))
    assert compiler.version == "mcc mcc version 4.3.6" and compiler.arch_of((2, 2)) == "mp_22"
    assert compiler.compile(SOURCE, "mp_31") == b"image\n"
    line = (tmp_path / "log").read_text()
    assert "-x musa --offload-arch=mp_31 --cuda-device-only -mtgpu" in line and "-DN=4" in line
    assert "fast-math" not in line, "NaN is a value of the kernels"


def test_what_mcc_refuses_is_an_error_with_its_log(tmp_path: Path) -> None:
    wrong = KernelSource("unit", "wrong", SOURCE.headers)
    with pytest.raises(KernelError) as caught:
        Mcc(str(mcc(tmp_path))).compile(wrong, "mp_31")
    assert caught.value.found == ("unit.mu:2: error: no such word",) and "mcc version 4.3.6" in str(caught.value)


def test_where_mcc_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "home" / "bin").mkdir(parents=True)
    at_home, elsewhere = mcc(tmp_path / "home" / "bin"), mcc(tmp_path)
    assert find_mcc({"MUSA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path)}) == str(at_home)
    assert find_mcc({"PATH": str(tmp_path)}) == str(elsewhere)
    assert find_mcc({"PYTORCH_MCC": str(elsewhere), "MUSA_HOME": str(tmp_path / "home")}) == str(elsewhere)
    assert find_mcc({"PYTORCH_MCC": str(tmp_path / "none"), "MUSA_HOME": str(tmp_path / "home")}) is None


LIBMTRTC = """
#include <cstdlib>
int mtrtcVersion(int* a, int* b) { *a = 4; *b = 3; return 0; }
int mtrtcCreateProgram(void** p, const char* text, const char* name, int n, const char** texts, const char** names) {
    *p = strdup(n == 1 && !strcmp(names[0], "dialect.h") && !strcmp(texts[0], "#define KERNEL") ? text : "wrong");
    return 0;
}
int mtrtcCompileProgram(void* p, int n, const char** flags) {
    return strstr((char*)p, "wrong") || strcmp(flags[0], "--offload-arch=mp_31") ? 6 : 0;
}
int mtrtcGetProgramLogSize(void*, size_t* n) { *n = 8; return 0; }
int mtrtcGetProgramLog(void*, char* out) { memcpy(out, "bad word", 8); return 0; }
int mtrtcGetFatBinSize(void*, size_t* n) { *n = 6; return 0; }
int mtrtcGetFatBin(void*, char* out) { memcpy(out, "fat\\0in", 6); return 0; }
int mtrtcDestroyProgram(void** p) { free(*p); return 0; }
"""


def test_mtrtc_takes_mccs_place_where_there_is_no_mcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = c_library(tmp_path, LIBMTRTC)
    use(monkeypatch, load=lambda name: library)
    for name in ("PYTORCH_MCC", "MUSA_HOME", "MUSA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    found = find_compiler()
    assert isinstance(found, Mtrtc) and found.version == "MTRTC 4.3"
    assert found.compile(SOURCE, "mp_31") == b"fat\0in"
    with pytest.raises(KernelError, match="bad word"):
        found.compile(SOURCE, "mp_22")


def test_an_mtrtc_of_another_kind_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PYTORCH_MCC", "nothing")
    use(monkeypatch, load=lambda name: SimpleNamespace())
    with pytest.raises(NoCompiler, match="mcc was not found .* and libmtrtc has no function mtrtcVersion"):
        find_compiler()


def test_an_mtrtc_that_does_not_know_its_version_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = c_library(tmp_path, LIBMTRTC.replace("*a = 4; *b = 3; return 0;", "return 5;"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PYTORCH_MCC", "nothing")
    use(monkeypatch, load=lambda name: library)
    with pytest.raises(NoCompiler, match="mtrtcVersion answers error 5"):
        find_compiler()


LIBMUSA = """
static long words[8]; static int shape[4]; static void* last_stream; static int loads = 0, most = 0;
long word(int at) { return words[at]; } int dim(int at) { return shape[at]; } int times_loaded() { return loads; }
void* on_stream() { return last_stream; } int most_shared() { return most; }
int musaDeviceGetAttribute(int* out, int which, int device) {
    *out = which == 13 ? 1750000 : which == 97 ? 192 * 1024 : 0; return *out ? 0 : 1;
}
int muModuleLoadData(void** out, const void* image) { loads++; *out = (void*)11; return memcmp(image, "image", 5); }
int muModuleGetFunction(void** out, void* module, const char* name) {
    *out = (void*)22; return module != (void*)11 || strcmp(name, "go") ? 500 : 0;
}
int muFuncGetAttribute(int* out, int which, void* f) { *out = 1024; return which != 1; }
int muFuncSetAttribute(void* f, int which, int value) { most = value; return which != 8; }
int muLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** args, void** extra) {
    if (bx > 1024) return 1;
    if (bx == 900) return 900;
    shape[0] = gx; shape[1] = bx; shape[2] = shared; shape[3] = gy * gz * by * bz; last_stream = stream;
    words[0] = *(long*)args[0]; words[1] = *(int*)args[1]; words[2] = (long)(100 * *(float*)args[2]);
    words[3] = *(unsigned char*)args[3];
    return f != (void*)22 || extra;
}
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the kernel part of an S5000, its library)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library, compiler = c_library(tmp_path, LIBMUSA), Mcc(str(mcc(tmp_path)))
    library.word.restype, library.on_stream.restype = ctypes.c_long, ctypes.c_void_p
    use(monkeypatch, load=lambda name: library, compiler=lambda: compiler)
    return MusaKernels(device(), ThreadState()), library, tmp_path


def device() -> Any:
    return SimpleNamespace(
        index=0,
        capability=(3, 1),
        family=SimpleNamespace(ensure_context=lambda index: None),
        own_stream=lambda stream: stream,
    )


def test_a_source_is_compiled_once_for_the_devices_architecture_and_loaded_once(loaded: Any) -> None:
    kernels, library, folder = loaded
    assert kernels.unsupported() is None and kernels.clock_khz == 1_750_000 and kernels.shared_bytes == 192 << 10
    for _ in range(2):
        assert kernels.load(SOURCE, ["go"])["go"].function == 22
    assert library.times_loaded() == 1 and kernels.cache.compiled == 1
    assert library.most_shared() == (192 << 10) - 1024, "a launch may take what the kernel leaves"
    again = MusaKernels(device(), ThreadState())
    again.load(SOURCE, ["go"])
    assert again.cache.hits == 1 and (folder / "log").read_text().count("mp_31") == 1
    (path,) = (folder / "cache" / "halma" / "musa").iterdir()
    assert path.suffix == ".image"


def test_a_launch_passes_every_argument_in_its_own_size(loaded: Any) -> None:
    kernels, library, _ = loaded
    kernel = kernels.load(SOURCE, ["go"])["go"]
    args = [0x1234567890, ctypes.c_int(-3), np.float32(0.25), np.uint8(200)]
    kernels.launch(kernel, 7, 128, args, stream=SimpleNamespace(handle=0xABC), shared_bytes=512)
    assert [library.word(at) for at in range(4)] == [0x1234567890, -3, 25, 200]
    assert [library.dim(at) for at in range(4)] == [7, 128, 512, 1] and library.on_stream() == 0xABC


@pytest.mark.parametrize(
    ("block", "says"), [(2000, "kernel 'go' cannot be launched"), (900, "not permitted while a stream is captured")]
)
def test_a_launch_that_fails_says_what_was_asked(loaded: Any, block: int, says: str) -> None:
    kernels, _, _ = loaded
    kernel = kernels.load(SOURCE, ["go"])["go"]
    args = [1, ctypes.c_int(1), np.float32(1), np.uint8(1)]
    with pytest.raises(Exception, match=says):
        kernels.launch(kernel, 1, block, args, stream=SimpleNamespace(handle=0))


def test_an_entry_that_is_not_there_is_an_error(loaded: Any) -> None:
    kernels, _, _ = loaded
    with pytest.raises(KernelError, match="cannot be loaded"):
        kernels.load(SOURCE, ["gone"])


@pytest.mark.parametrize("libraries", [True, False])
def test_without_a_compiler_or_libraries_kernels_are_refused_and_routes_say_why(
    monkeypatch: pytest.MonkeyPatch, libraries: bool
) -> None:
    use(monkeypatch, **({"load": lambda name: SimpleNamespace()} if libraries else {}))
    kernels = MusaKernels(device(), ThreadState())
    why = "mcc was not found" if libraries else "libmusart cannot be loaded"
    assert why in str(kernels.unsupported()) and kernels.shared_bytes == 48 << 10
    with pytest.raises(CapabilityError, match=why):
        kernels.load(SOURCE, ["go"])
    assert why in str(needs.no_dialect())
    from halma.backends import musa

    routes: list[Any] = []
    musa.halma_register_routes(routes.append)
    dialect = [route for route in routes if route.name.startswith("simt")]
    assert dialect and all(why in str(route.needs[0](None)) for route in dialect)
    assert all(route.backends == ("musa",) for route in routes) and len(routes) > len(dialect)


def test_the_cached_image_of_another_compiler_is_not_used(loaded: Any) -> None:
    kernels, _, _ = loaded
    kernels.load(SOURCE, ["go"])
    other = MusaKernels(device(), ThreadState())
    assert not isinstance(other._found, str)
    other._found.version = "mcc 5.2"  # pyright: ignore[reportAttributeAccessIssue]
    other.load(SOURCE, ["go"])
    assert (other.cache.hits, other.cache.compiled) == (0, 1)
