"""The experts' kernels compile for every declared architecture (K4), with the memory that launches are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halma.backends.simt.expert_sources import BITS, ROW_ENTRIES, product_entries, products_source, rows_source
from halma.backends.simt.sources import Target
from halma.hal.backend import KernelSource
from tests.compile.nvrtc import compiled

pytestmark = pytest.mark.torchfree
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra halma[cuda]: cuda-bindings and NVRTC")

SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_90a": 232_448, "sm_100": 232_448}
"""Bytes of shared memory that a block can have there."""


PAIRS = {("sm_80", 4), ("sm_90", 4), ("sm_90", 8), ("sm_100", 4), ("sm_100", 16)}


def target(arch: str) -> Target:
    return Target("cuda", 32, arch != "sm_80", 16)


def entries_of(source: KernelSource, arch: str) -> frozenset[str]:
    found = compiled(nvrtc, source, arch)
    assert found.ok, found.log
    return found.entries()


@pytest.mark.invariant("K4")
@pytest.mark.parametrize(
    "arch,bits",
    [
        # A pull request compiles every format and every generation; the other pairs are the nightly row's.
        pytest.param(a, bits, marks=[] if (a, bits) in PAIRS else [pytest.mark.nightly])
        for a in SHARED
        for bits in sorted(BITS.values())
    ],
)
def test_the_products_compile(arch: str, bits: int) -> None:
    source = products_source(bits, SHARED[arch], target(arch))
    assert entries_of(source, arch) >= set(product_entries(bits))


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_small_kernels_compile(arch: str) -> None:
    assert entries_of(rows_source(target(arch)), arch) >= set(ROW_ENTRIES)


@pytest.mark.invariant("K4", control=True)
@pytest.mark.parametrize("name", ["HALMA_THIN_BYTES", "HALMA_WIDE_BYTES", "HALMA_SUM_BYTES"])
def test_another_size_than_a_launch_is_given_does_not_compile(name: str) -> None:
    source = products_source(8, SHARED["sm_90"], target("sm_90"))
    found = compiled(nvrtc, replace(source, defines={**source.defines, name: "128u"}), "sm_90")
    assert not found.ok and "static assertion failed" in found.log
