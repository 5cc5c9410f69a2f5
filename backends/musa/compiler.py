"""Compiles sources of the portable dialect for MUSA: ``mcc`` in a child process, or MTRTC where there is no mcc.

Neither has been run by this project. mcc's flags are torch_musa's own (MooreThreads/torch_musa
torch_musa/utils/musa_extension.py: ``-x musa --offload-arch=mp_31``) with ``-mtgpu --cuda-device-only``, by which a
public port of tinygrad makes images that ``muModuleLoadData`` takes on an S4000.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from halma.backends.musa.flags import arch_of, does_not_compile, macros
from halma.backends.musa.mtrtc import Mtrtc
from halma.backends.musa.seam import Compiler, NoCompiler
from halma.hal.backend import KernelSource

OPTIONS: Final = ("-mtgpu", "-std=c++17", "-O3", "-ffp-contract=off")
"""Of every compilation. No -ffast-math: the kernels mean NaN where they say NaN."""
SECONDS: Final = 600.0
"""A compiler that takes longer has hung."""
HOMES: Final = ("MUSA_HOME", "MUSA_PATH")
USUAL: Final = "/usr/local/musa"


class Mcc:
    """See :class:`halma.backends.musa.seam.Compiler`.

    Args:
        path: of the program.

    Raises:
        NoCompiler: it does not tell its version.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoCompiler(f"{path} does not tell its version: {error}") from error
        self.version = f"mcc {said.stdout.strip()}"

    def arch_of(self, capability: tuple[int, int]) -> str:
        """``mp_31`` for (3, 1)."""
        return arch_of(capability)

    def flags(self, defines: Mapping[str, str], arch: str) -> list[str]:
        """All but the files."""
        return ["-x", "musa", f"--offload-arch={arch}", "--cuda-device-only", *OPTIONS, *macros(defines)]

    def compile(self, source: KernelSource, arch: str) -> bytes:
        """The image.

        Raises:
            KernelError: it does not compile, or the compiler hangs; with its log.
        """
        with tempfile.TemporaryDirectory(prefix="halma-mcc-") as name:
            folder = Path(name)
            for header, text in source.headers.items():
                (folder / header).write_text(text, encoding="utf-8")
            (folder / "unit.mu").write_text(source.text, encoding="utf-8")
            image = folder / "unit.image"
            line = [self.path, *self.flags(source.defines, arch), "-I", name, "-o", str(image), str(folder / "unit.mu")]
            try:
                done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=name)
            except subprocess.TimeoutExpired:
                raise does_not_compile(source, self.version, arch, f"no answer within {SECONDS:g} s") from None
            if done.returncode or not image.is_file():
                raise does_not_compile(source, self.version, arch, done.stderr or f"exit status {done.returncode}")
            return image.read_bytes()


def find_mcc(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where mcc is: PYTORCH_MCC, which torch_musa's own builds obey, MUSA_HOME or MUSA_PATH, PATH, the usual place."""
    named = environment.get("PYTORCH_MCC")
    if named:
        return shutil.which(named)
    homes = [environment[name] for name in HOMES if environment.get(name)]
    for home in homes:
        if os.access(os.path.join(home, "bin", "mcc"), os.X_OK):
            return os.path.join(home, "bin", "mcc")
    found = shutil.which("mcc", path=environment.get("PATH"))
    usual = os.path.join(USUAL, "bin", "mcc")
    return found or (usual if os.access(usual, os.X_OK) else None)


def find_compiler() -> Compiler:
    """mcc, or MTRTC.

    Raises:
        NoCompiler: there is neither.
    """
    path = find_mcc()
    if path is not None:
        return Mcc(path)
    try:
        return Mtrtc()
    except NoCompiler as error:
        raise NoCompiler(f"{NO_MCC}, and {error}") from error


NO_MCC: Final = f"mcc was not found (PYTORCH_MCC, {', '.join(HOMES)}, PATH, {USUAL})"
