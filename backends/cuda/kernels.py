"""The kernel part: NVRTC compiles, cuda.core loads and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halma.backends.cuda import compiler, driver
from halma.backends.torch_device.device import ThreadState, TorchDevice
from halma.backends.torch_device.faults import translated
from halma.backends.torch_device.kernel_cache import KernelCache, cache_directory, key_of
from halma.backends.torch_device.launching import note_launch
from halma.hal.backend import KernelSource, Stream
from halma.hal.errors import CapabilityError, KernelError

DEPENDENT_FROM = (9, 0)
"""Compute capability from which a kernel may start before the one before it has ended."""

_LEGACY_DEFAULT = 1
"""CU_STREAM_LEGACY: the default stream under a handle that is not null."""


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A loaded entry point. ``kernel`` is cuda.core's."""

    name: str
    kernel: Any


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
        self._configs: dict[tuple[int, int, int, bool], Any] = {}
        self._streams: dict[int, Any] = {}
        self._launch: Any = None

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
        kernel = code.get_kernel(entry)
        # Loading is lazy otherwise: the first launch would load, and that may wait for kernels that spin.
        function = driver.call("cuKernelGetFunction", driver.bindings().CUkernel(int(kernel.handle)))
        driver.call("cuFuncLoad", function)
        attributes = driver.bindings().CUfunction_attribute
        fixed = driver.call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", function, most, self.shared_bytes - fixed)
        if carveout is not None:
            preferred = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.call("cuFuncSetAttribute", function, preferred, carveout)
        return CudaKernel(entry, kernel)

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
        config = self._configs.get((grid, block, shared_bytes, dependent))
        if config is None:
            config = self._config(grid, block, shared_bytes, dependent)
        handle = self._own_stream(stream).handle
        queue = self._streams.get(handle)
        if queue is None:
            queue = self._queue(handle)
        driver.ensure_context(self._index)
        try:
            self._launch(queue, config, kernel.kernel, *args)
        except Exception as error:
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

    def _config(self, grid: int, block: int, shared_bytes: int, dependent: bool) -> Any:
        from cuda.core import LaunchConfig, launch  # pyright: ignore[reportMissingImports]

        self._launch = launch
        early = dependent and self._capability >= DEPENDENT_FROM
        config = LaunchConfig(
            grid=grid,
            block=block,
            shmem_size=shared_bytes,
            **({"programmatic_stream_serialization": True} if early else {}),
        )
        self._configs[(grid, block, shared_bytes, dependent)] = config
        return config

    def _queue(self, handle: int) -> Any:
        from cuda.core import Device  # pyright: ignore[reportMissingImports]

        class _Stream:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, handle or _LEGACY_DEFAULT

        device = Device(self._index)
        device.set_current()
        queue = self._streams[handle] = device.create_stream(_Stream())
        return queue
