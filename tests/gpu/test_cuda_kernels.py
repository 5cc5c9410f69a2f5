"""Kernels on CUDA: compiled once, loaded at once, launched eagerly and into captures."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from halma.backends.torch_device.kernel_cache import KernelCache
from halma.hal.backend import Backend, KernelSource
from halma.hal.errors import KernelError
from halma.hal.graph.baked import baked_values
from halma.hal.testing.conformance.capturing import captured, empty

SOURCE = KernelSource(
    "axpy",
    """
#include "unit.h"
extern "C" __global__ void axpy(float* y, const float* x, float a, int n, unsigned long long shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i] + UNIT * OFFSET + (float)shift;
}
extern "C" __global__ void shared_sum(float* y) {
    extern __shared__ float part[];
    part[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) { float s = 0; for (int i = 0; i < blockDim.x; ++i) s += part[i]; *y = s; }
}
extern "C" __global__ void late(float* y) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    y[0] += 1.0f;
}
""",
    {"unit.h": "#define UNIT 1.0f\n"},
    {"OFFSET": "0.0f"},
)


@pytest.fixture
def kernels(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend with an empty cache of its own."""
    part: object = backend.kernels
    monkeypatch.setattr(part, "cache", KernelCache(tmp_path))
    monkeypatch.setattr(part, "_loaded", {})
    return backend


def test_a_source_is_compiled_once_and_runs(kernels: Backend) -> None:
    device, part = kernels.device, kernels.kernels
    x, y = torch.ones(100, device=device.torch_device), torch.zeros(100, device=device.torch_device)
    loaded = part.load(SOURCE, ["axpy", "shared_sum"])
    args = [y.data_ptr(), x.data_ptr(), ctypes.c_float(2.5), np.int32(100), 1]
    part.launch(loaded["axpy"], 1, 128, args, stream=device.current_stream())
    assert y.tolist() == [3.5] * 100
    part.launch(loaded["shared_sum"], 1, 64, [y.data_ptr()], stream=device.current_stream(), shared_bytes=256)
    assert float(y[0]) == 64.0
    cache: KernelCache = part.cache  # type: ignore[attr-defined]
    part._loaded.clear()  # type: ignore[attr-defined]
    part.load(SOURCE, ["axpy"])
    assert (cache.compiled, cache.hits) == (1, 1)


@pytest.mark.invariant("K6")
def test_what_does_not_compile_or_exist_is_an_error_with_the_compilers_words(kernels: Backend) -> None:
    with pytest.raises(KernelError, match=r"does not compile[\s\S]*sm_\d+[\s\S]*error"):
        kernels.kernels.load(KernelSource("bad", "nonsense"), ["bad"])
    with pytest.raises(KernelError, match="cannot be loaded"):
        kernels.kernels.load(SOURCE, ["no_such_entry"])
    loaded = kernels.kernels.load(SOURCE, ["axpy"])
    with pytest.raises(KernelError, match="cannot be launched[\\s\\S]*block 4096"):
        kernels.kernels.launch(loaded["axpy"], 1, 4096, [0, 0, ctypes.c_float(0), np.int32(0), 0],
                               stream=kernels.device.current_stream())  # fmt: skip


@pytest.mark.invariant("G11")
def test_a_launch_in_a_capture_is_a_node_whose_host_values_are_listed(kernels: Backend) -> None:
    device, part = kernels.device, kernels.kernels
    x, y = torch.ones(8, device=device.torch_device), torch.zeros(8, device=device.torch_device)
    kernel = part.load(SOURCE, ["axpy"])["axpy"]

    def capture(a: float) -> object:
        args = [y.data_ptr(), x.data_ptr(), ctypes.c_float(a), np.int32(8), 0]
        return captured(
            kernels, lambda _: part.launch(kernel, 1, 32, args, stream=device.current_stream()), empty(kernels)
        )

    graph, same, other = capture(2.0), capture(2.0), capture(3.0)
    assert graph.counts().kernels == 1 and y.tolist() == [0.0] * 8  # type: ignore[attr-defined]
    graph.replay()  # type: ignore[attr-defined]
    assert y.tolist() == [2.0] * 8
    assert baked_values(graph.nodes(), same.nodes()) == []  # type: ignore[attr-defined]
    found = baked_values(graph.nodes(), other.nodes())  # type: ignore[attr-defined]
    assert [(one.name, one.first, one.second) for one in found] == [("axpy", 2.0, 3.0)]


def test_a_dependent_launch_is_right_eagerly_and_in_a_graph(kernels: Backend) -> None:
    if not kernels.capabilities.dependent_launch:
        pytest.skip("capability dependent_launch is off")
    device, part, y = kernels.device, kernels.kernels, torch.zeros(1, device=kernels.device.torch_device)
    kernel = part.load(SOURCE, ["late"])["late"]

    def twice(_: object) -> None:
        for _ in range(50):
            part.launch(kernel, 1, 32, [y.data_ptr()], stream=device.current_stream(), dependent=True)

    twice(None)
    assert float(y[0]) == 50.0
    graph = captured(kernels, twice, empty(kernels))
    graph.replay()
    assert float(y[0]) == 100.0 and graph.counts().kernels == 50


def test_arguments_that_are_too_few_or_too_many_are_refused(kernels: Backend) -> None:
    device, part, y = kernels.device, kernels.kernels, torch.zeros(1, device=kernels.device.torch_device)
    kernel = part.load(SOURCE, ["late"])["late"]
    for args in ([], [y.data_ptr(), 0]):
        with pytest.raises(KernelError, match=f"'late' has 1 parameters[\\s\\S]*{len(args)} arguments"):
            part.launch(kernel, 1, 32, args, stream=device.current_stream())
    part.launch(kernel, 1, 32, [y.data_ptr()], stream=device.current_stream())
    assert float(y[0]) == 1.0


def test_a_configuration_is_kept_for_each_stream(kernels: Backend) -> None:
    device, part, y = kernels.device, kernels.kernels, torch.zeros(1, device=kernels.device.torch_device)
    kernel = part.load(SOURCE, ["late"])["late"]
    streams = [device.current_stream(), device.new_stream("one"), device.new_stream("two")]
    for stream in streams * 2:
        part.launch(kernel, 1, 32, [y.data_ptr()], stream=stream)
        stream.synchronize()
    assert float(y[0]) == 6.0
