"""The kernels of rows.cu compile for every declared architecture (K4), without inline assembly."""

from __future__ import annotations

import re

import pytest

from halma.backends.simt.row_sources import ENTRIES, rows_source
from halma.backends.simt.sources import Target, text_of
from tests.compile.nvrtc import compiled

pytestmark = pytest.mark.torchfree
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra halma[cuda]: cuda-bindings and NVRTC")


@pytest.mark.invariant("K4")
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.nightly) for arch in ("sm_80", "sm_100"))]
)
def test_they_compile(arch: str) -> None:
    found = compiled(nvrtc, rows_source(Target("cuda", 32, arch != "sm_80", 16)), arch)
    assert found.ok, found.log
    assert found.entries() >= set(ENTRIES)


@pytest.mark.invariant("K1")
def test_they_assume_no_warp_and_no_vendor() -> None:
    text = re.sub(r"//[^\n]*", "", text_of("rows.cu"))
    assert re.findall(r"\basm\b|HALMA_WARP|HALMA_CUDA|HALMA_MUSA|__\w*sync|shuffle|warp_", text) == []
