"""Without cuda-core and cuda-bindings torch's kernels still run, eagerly, and everything else says why not."""

from __future__ import annotations

import pytest
import torch

from halma.backends.cuda import driver
from halma.backends.cuda.backend import CudaBackend
from halma.hal.backend import Backend, KernelSource
from halma.hal.capabilities import UNKNOWN
from halma.hal.errors import CapabilityError, CollectiveError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.testing.conformance.capturing import empty

WHY = "not installed: cuda-bindings"


@pytest.fixture
def bare(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """A backend made where the bindings are missing."""
    monkeypatch.setattr(driver, "why_missing", lambda: WHY)
    return CudaBackend()


def test_steps_run_eagerly_and_the_scope_says_why(bare: CudaBackend) -> None:
    x, graph = torch.ones(4, device=bare.device.torch_device), BreakableGraph(bare)
    with GraphCaptureScope(graph, empty(bare)) as scope:
        graph.set_outputs(x + 1.0)
    assert graph.outcome is Outcome.INERT and graph.outputs().tolist() == [2.0] * 4 and scope.why_inert == WHY


@pytest.mark.invariant("B8")
def test_what_needs_them_is_off_or_unknown_and_refused_with_the_reason(bare: CudaBackend) -> None:
    found = bare.capabilities
    assert (found.graph_capture, found.ipc, found.dependent_launch) == (False, False, False)
    assert found.remote_store_atomicity is UNKNOWN and found.fp8_e4m3fn is True
    assert bare.kernels.unsupported() == WHY and WHY in str(bare.memory.not_exportable())
    with pytest.raises(CapabilityError, match=WHY):
        bare.kernels.load(KernelSource("k", ""), ["k"])
    with pytest.raises(CollectiveError, match=WHY):
        bare.memory.exportable(64)
