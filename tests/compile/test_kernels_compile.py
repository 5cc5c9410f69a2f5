"""Every kernel source compiles for every declared architecture, without a device (K4); what a vendor lacks does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halma.backends.simt.sources import UNITS, Target, source
from halma.hal.collectives.contract import WORLD_SIZES
from halma.hal.errors import KernelError
from tests.compile.nvrtc import compiled

pytestmark = pytest.mark.torchfree
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra halma[cuda]: cuda-bindings and NVRTC")

ARCHITECTURES = ("sm_80", "sm_90", "sm_90a", "sm_100")
WITH_DEPENDENT_LAUNCH = ("sm_90", "sm_90a", "sm_100")
MORE = [("sm_90a", 2), *(("sm_90", size) for size in WORLD_SIZES[1:])]
LONG = ("streams", "combine_2", "dispatch_kept")
"""Long, or of headers that another unit has compiled: a pull request compiles them for one generation."""
NUMBER = "combine_4"
"""Differs from ``combine_2`` in a number."""
EVERY = [
    pytest.param(unit, arch, size, id=f"{unit}-{arch}-{size}", marks=[pytest.mark.nightly] if late else [])
    for unit in UNITS
    for arch, size in (*((arch, 2) for arch in ARCHITECTURES if arch != "sm_90a"), *MORE)
    for late in ((arch, size) in MORE or unit == NUMBER or (unit in LONG and arch != "sm_90"),)
]
"""All architectures at two ranks, all world sizes on one: the code of a size does not depend on the architecture. What
a pull request compiles is every source for every generation; the rest is the nightly row's."""


def cuda(arch: str, *, atomicity: int = 16) -> Target:
    return Target("cuda", 32, arch in WITH_DEPENDENT_LAUNCH, atomicity)


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("unit,arch,size", EVERY)
def test_a_unit_compiles(unit: str, arch: str, size: int) -> None:
    found = compiled(nvrtc, source(unit, size, cuda(arch)), arch)
    assert found.ok, found.log
    assert found.entries() >= set(UNITS[unit].entries)


@pytest.mark.invariant("K4", control=True)
def test_a_source_that_is_wrong_does_not_compile() -> None:
    unit = source("norm_alone", 2, cuda("sm_90"))
    broken = replace(unit, text=unit.text.replace("grid_wait();", "grid_weight();"))
    found = compiled(nvrtc, broken, "sm_90")
    assert not found.ok and "grid_weight" in found.log


@pytest.mark.invariant("C19")
def test_below_8_byte_stores_headers_go_behind_a_fence() -> None:
    for unit in ("reduce", "staged"):
        assert source(unit, 2, cuda("sm_90", atomicity=0)).defines["HALMA_HEADER_FENCED"] == "1"
        found = compiled(nvrtc, source(unit, 2, cuda("sm_90", atomicity=0)), "sm_90")
        assert found.ok, found.log
    assert source("reduce", 2, cuda("sm_90")).defines["HALMA_HEADER_FENCED"] == "0"


@pytest.mark.invariant("K2")
def test_dependent_launch_on_a_device_without_it_is_an_error() -> None:
    found = compiled(nvrtc, source("norm_alone", 2, Target("cuda", 32, True, 16)), "sm_80")
    assert not found.ok and "dependent launch needs sm_90" in found.log


def test_other_world_sizes_are_refused() -> None:
    with pytest.raises(KernelError, match="3 ranks"):
        source("reduce", 3, cuda("sm_90"))
