"""The experts' kernels for many rows compile for Hopper (K4), and their products stay asynchronous; elsewhere they are
an error, not a slower kernel (K2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halma.backends.simt.many_sources import ENTRIES, SIZES, Size, many_source
from halma.backends.simt.sources import Target
from tests.compile.nvrtc import compiled

pytestmark = pytest.mark.torchfree
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra halma[cuda]: cuda-bindings and NVRTC")

HOPPER = Target("cuda", 32, True, 16)
SHARED, OWN = 232_448, 4096
"""Bytes of shared memory that a block can have, and what the kernels' own tables take of them."""


@pytest.mark.invariant("K4")
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=[pytest.mark.nightly] if s.most > 64 else [], id=str(s.most)) for s in SIZES]
)
def test_they_compile_and_no_product_waits_for_the_one_before(size: Size) -> None:
    found = compiled(nvrtc, many_source(size, HOPPER), "sm_90a", ("--ptxas-options=-v",))
    assert found.ok, found.log
    assert found.entries() >= set(ENTRIES)
    assert "wgmma" not in found.log, found.log  # ptxas names the instruction where it puts a wait behind each
    assert found.log.count(" 0 bytes spill stores") == len(ENTRIES), found.log
    assert size.shared_bytes + OWN <= SHARED


@pytest.mark.invariant("K4", control=True)
def test_another_size_than_a_launch_is_given_does_not_compile() -> None:
    source = many_source(SIZES[0], HOPPER)
    found = compiled(nvrtc, replace(source, defines={**source.defines, "HALMA_STAGE_BYTES": "1024u"}), "sm_90a")
    assert not found.ok and "static assertion failed" in found.log


@pytest.mark.invariant("K2")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_other_architectures_have_no_products_of_warp_groups(arch: str) -> None:
    found = compiled(nvrtc, many_source(SIZES[0], HOPPER), arch)
    assert not found.ok and "sm_90a alone" in found.log
