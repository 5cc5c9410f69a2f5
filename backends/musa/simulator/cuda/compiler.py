"""NVRTC in place of mcc: it compiles the dialect's CUDA spelling for the GPU that the simulator runs on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halma.backends.cuda import compiler
from halma.backends.cuda.kernels import arch_of
from halma.hal.backend import KernelSource


class NvrtcCompiler:
    """See :class:`halma.backends.musa.seam.Compiler`."""

    @property
    def version(self) -> str:
        """NVRTC's."""
        return "NVRTC " + ".".join(map(str, compiler.nvrtc_version()))

    def arch_of(self, capability: tuple[int, int]) -> str:
        """The real device's: the simulated one's capability means nothing to NVRTC."""
        return arch_of(torch.cuda.get_device_capability())

    def flags(self, defines: Mapping[str, str], arch: str) -> list[str]:
        """As the CUDA backend's."""
        return compiler.flags_of(defines, arch)

    def compile(self, source: KernelSource, arch: str) -> bytes:
        """A cubin.

        Raises:
            KernelError: it does not compile; with the compiler's log.
        """
        return compiler.compile_only(source, arch)
