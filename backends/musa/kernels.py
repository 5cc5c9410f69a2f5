"""The kernel part: mcc or MTRTC compiles, libmusa loads and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from halma.backends.musa import runtime
from halma.backends.musa.device import MusaDevice, attribute
from halma.backends.musa.seam import Compiler, NoCompiler, toolchain
from halma.backends.torch_device.device import ThreadState
from halma.backends.torch_device.faults import translated
from halma.backends.torch_device.kernel_cache import KernelCache, cache_directory, key_of
from halma.backends.torch_device.launching import Parameters, note_launch
from halma.hal.backend import KernelSource, Stream
from halma.hal.errors import CapabilityError, KernelError

_STATIC_SHARED: Final = 1  # MU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MOST_SHARED: Final = 8  # MU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT: Final = 9  # MU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_SHARED_WITHOUT_ASKING: Final = 48 << 10
"""What a block may have where the runtime tells of no limit."""


@dataclass(frozen=True, eq=False)
class MusaKernel:
    """A loaded entry point. ``function`` is libmusa's handle; ``module`` is never unloaded."""

    name: str
    function: int
    module: int


class MusaKernels:
    """See :class:`halma.hal.backend.KernelPart`.

    Args:
        device: whose streams launches go to.
        state: what is current on each thread: a launch in a capture is noted.
    """

    def __init__(self, device: MusaDevice, state: ThreadState) -> None:
        self._device = device
        self._state = state
        self.dialect = toolchain().dialect
        index = device.index
        self.clock_khz: int | None = attribute("clock_khz", index) if self.dialect == "musa" else None
        """As the runtime says; None where the dialect's clock counts nanoseconds, or nobody says."""
        most = attribute("shared_bytes_optin", index) or attribute("shared_bytes", index)
        self.shared_bytes: int = most or _SHARED_WITHOUT_ASKING
        """Shared memory that a block can have; a kernel's own and a launch's together."""
        self.cache = KernelCache(cache_directory("musa"), ".image")
        self._modules: dict[str, int] = {}
        self._parameters = Parameters()

    @cached_property
    def _found(self) -> Compiler | str:
        missing = runtime.why_missing("musart", "musa")
        if missing is not None:
            return missing
        try:
            return toolchain().compiler()
        except NoCompiler as error:
            return str(error)

    def unsupported(self) -> str | None:
        """What is missing."""
        return self._found if isinstance(self._found, str) else None

    def load(self, source: KernelSource, entries: Sequence[str]) -> Mapping[str, MusaKernel]:
        """Compile, or take from the cache on disk, and load.

        Raises:
            KernelError: it does not compile, has no such entry, or cannot be loaded.
            CapabilityError: there are no kernels here.
        """
        compiler = self._found
        if isinstance(compiler, str):
            raise CapabilityError("the musa backend has no kernels here", asked=source.name, found=compiler)
        self._device.family.ensure_context(self._device.index)
        arch = compiler.arch_of(self._device.capability)
        key = key_of(source, compiler.flags(source.defines, arch), (compiler.version,))
        try:
            module = self._modules.get(key)
            if module is None:
                image = self.cache.get(source, key, lambda: compiler.compile(source, arch))
                module = self._modules[key] = runtime.value("muModuleLoadData", image)
            return {entry: self._entry(module, entry, source.carveout.get(entry)) for entry in entries}
        except runtime.LibraryError as error:
            raise KernelError(
                f"kernels of {source.name!r} cannot be loaded",
                asked=f"{', '.join(entries)} for {arch}",
                found=str(error),
                do='declare entries extern "C" __global__, and see that the driver runs images of this compiler',
            ) from error

    def _entry(self, module: int, entry: str, carveout: int | None) -> MusaKernel:
        function = runtime.value("muModuleGetFunction", module, entry.encode())
        fixed = runtime.value("muFuncGetAttribute", _STATIC_SHARED, function)
        if self.shared_bytes > _SHARED_WITHOUT_ASKING:
            runtime.call("muFuncSetAttribute", function, _MOST_SHARED, self.shared_bytes - fixed)
        if carveout is not None and self.dialect != "musa":  # a wish, and one that MUSA's documents do not know
            runtime.call("muFuncSetAttribute", function, _CARVEOUT, carveout)
        return MusaKernel(entry, function, module)

    def launch(
        self,
        kernel: MusaKernel,
        grid: int,
        block: int,
        args: Sequence[Any],
        *,
        stream: Stream,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Queue a launch; in a capture it becomes a node. ``dependent`` is ignored: MUSA has no such launch.

        Raises:
            CaptureError: the driver refuses it in a capture.
            KernelError: the launch is not possible.
        """
        device = self._device
        handle = device.own_stream(stream).handle
        device.family.ensure_context(device.index)
        packed = self._parameters.packed(args)
        try:
            runtime.call(
                "muLaunchKernel", kernel.function, grid, 1, 1, block, 1, 1, shared_bytes, handle, packed, None
            )  # fmt: skip
        except runtime.LibraryError as error:
            shown = translated(error, f"a launch of {kernel.name!r}")
            if shown is not error:
                raise shown from error
            raise KernelError(
                f"kernel {kernel.name!r} cannot be launched",
                asked=f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory, {len(args)} arguments",
                found=str(error),
            ) from error
        if self._state.segment is not None:
            note_launch(kernel.name, grid, block, args)
