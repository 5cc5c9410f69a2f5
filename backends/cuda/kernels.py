"""The kernel part: NVRTC compiles, cuda.core loads, cuda.bindings launches.

A launch is one driver call on a configuration that is kept: of its 5.4 us on an H200's host 3.7 are the driver's
(benchmarks.launch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halma.backends.cuda import compiler, driver
from halma.backends.torch_device.device import ThreadState, TorchDevice
from halma.backends.torch_device.faults import translated
from halma.backends.torch_device.kernel_cache import KernelCache, cache_directory, key_of
from halma.backends.torch_device.launching import Parameters, note_launch
from halma.hal.backend import KernelSource, Stream
from halma.hal.errors import CapabilityError, KernelError

DEPENDENT_FROM = (9, 0)
"""Compute capability from which a kernel may start before the one before it has ended."""

MOST_CONFIGURATIONS = 4096
"""That are kept: shapes of launches times streams. Handles of ended streams stay among them until they are too many."""


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A loaded entry point.

    Attributes:
        function: the driver's CUfunction.
        code: cuda.core's, which unloads it when it goes.
        parameters: how many it has, or None where the driver does not say (before CUDA 12.4).
    """

    name: str
    function: Any
    code: Any
    parameters: int | None


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for: the device's own, with its specific instructions from Hopper on."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class CudaKernels:
    """See :class:`halma.hal.backend.KernelPart`.

    Args:
        device: whose streams launches go to.
        state: what is current on each thread: a launch in a capture is noted.
        reason: why there are no kernels, or None.
    """

    dialect = "cuda"
    clock_khz = None

    def __init__(self, device: TorchDevice, state: ThreadState, reason: str | None) -> None:
        self._own_stream = device.own_stream
        self._state = state
        self._index = index = device.index
        self._reason = reason
        self._capability = torch.cuda.get_device_capability(index)
        self.shared_bytes: int = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
        """Shared memory that a block can have; a kernel's own and a launch's together."""
        self.cache = KernelCache(cache_directory("cuda"))
        self._loaded: dict[str, Any] = {}
        self._configurations: dict[tuple[int, int, int, int, bool], Any] = {}
        self._parameters = Parameters()

    def unsupported(self) -> str | None:
        """What is missing."""
        return self._reason

    def load(self, source: KernelSource, entries: Sequence[str]) -> Mapping[str, CudaKernel]:
        """Compile, or take from the cache on disk, and load: the code is on the device when this returns (C18).

        Raises:
            KernelError: it does not compile, has no such entry, or cannot be loaded.
            CapabilityError: there are no kernels here.
        """
        if self._reason is not None:
            raise CapabilityError("the cuda backend has no kernels here", asked=source.name, found=self._reason)
        driver.ensure_context(self._index)
        from cuda.core import Device, ObjectCode  # pyright: ignore[reportMissingImports]

        Device(self._index).set_current()
        arch = arch_of(self._capability)
        key = key_of(source, compiler.flags_of(source.defines, arch), compiler.nvrtc_version())
        code = self._loaded.get(key)
        try:
            if code is None:
                cubin = self.cache.get(source, key, lambda: compiler.compile_only(source, arch))
                code = self._loaded[key] = ObjectCode.from_cubin(cubin, name=source.name)
            return {entry: self._entry(code, entry, source.carveout.get(entry)) for entry in entries}
        except KernelError:
            raise
        except Exception as error:  # cuda.core has a family of errors of its own
            raise KernelError(
                f"kernels of {source.name!r} cannot be loaded",
                asked=f"{', '.join(entries)} for {arch}",
                found=f"{type(error).__name__}: {error}",
                do='declare entries extern "C" __global__, and see that the driver runs this CUDA version',
            ) from error

    def _entry(self, code: Any, entry: str, carveout: int | None) -> CudaKernel:
        handle = driver.bindings().CUkernel(int(code.get_kernel(entry).handle))
        # Loading is lazy otherwise: the first launch would load, and that may wait for kernels that spin.
        function = driver.call("cuKernelGetFunction", handle)
        driver.call("cuFuncLoad", function)
        attributes = driver.bindings().CUfunction_attribute
        fixed = driver.call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", function, most, self.shared_bytes - fixed)
        if carveout is not None:
            preferred = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.call("cuFuncSetAttribute", function, preferred, carveout)
        return CudaKernel(entry, function, code, _parameters_of(handle))

    def launch(
        self,
        kernel: CudaKernel,
        grid: int,
        block: int,
        args: Sequence[Any],
        *,
        stream: Stream,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Queue a launch; in a capture it becomes a node.

        ``dependent`` is ignored where the device cannot start kernels early: the kernel's own wait then returns at
        once.

        Raises:
            CaptureError: the driver refuses it in a capture.
            KernelError: the launch is not possible.
        """
        handle = self._own_stream(stream).handle
        shape = (handle, grid, block, shared_bytes, dependent)
        configuration = self._configurations.get(shape) or self._configuration(*shape)
        driver.ensure_context(self._index)
        if kernel.parameters is not None and len(args) != kernel.parameters:
            raise KernelError(
                f"kernel {kernel.name!r} has {kernel.parameters} parameters", found=f"{len(args)} arguments"
            )
        packed = self._parameters.packed(args)
        try:
            driver.launch(configuration, kernel.function, packed)
        except (driver.DriverError, TypeError, OverflowError) as error:
            shown = translated(error, f"a launch of {kernel.name!r}")
            if shown is not error:
                raise shown from error
            raise KernelError(
                f"kernel {kernel.name!r} cannot be launched",
                asked=f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory, {len(args)} arguments",
                found=f"{type(error).__name__}: {error}",
            ) from error
        if self._state.segment is not None:
            note_launch(kernel.name, grid, block, args)

    def _configuration(self, handle: int, grid: int, block: int, shared_bytes: int, dependent: bool) -> Any:
        bindings = driver.bindings()
        made = bindings.CUlaunchConfig()
        try:
            made.gridDimX, made.gridDimY, made.gridDimZ = grid, 1, 1
            made.blockDimX, made.blockDimY, made.blockDimZ = block, 1, 1
            made.sharedMemBytes = shared_bytes
        except (TypeError, OverflowError) as error:
            raise KernelError(
                "no shape of a launch", found=f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
            ) from error
        made.hStream = bindings.CUstream(handle)
        if dependent and self._capability >= DEPENDENT_FROM:
            early = bindings.CUlaunchAttribute()
            early.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            made.attrs, made.numAttrs = [early], 1
        if len(self._configurations) >= MOST_CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[(handle, grid, block, shared_bytes, dependent)] = made
        return made


def _parameters_of(kernel: Any) -> int | None:
    ask = getattr(driver.bindings(), "cuKernelGetParamInfo", None)
    if ask is None:
        return None
    count = 0
    while True:
        code = ask(kernel, count)[0]
        if code != 0:
            return count if code == driver.bindings().CUresult.CUDA_ERROR_INVALID_VALUE else None
        count += 1
