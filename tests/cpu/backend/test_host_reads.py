"""Host reads are refused with the line that did them; each has a control arm that does it right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from halma.hal.errors import CaptureError, HostReadError
from halma.hal.graph.breakable import BreakableGraph, Outcome
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.workspace import Workspace
from tests.cpu.backend.captured import capture, planned

X = torch.arange(12.0).view(3, 4)
INDEX = torch.tensor([0, 2])
ONE = torch.tensor(1)
MASK = X > 3


def set_by_mask() -> None:
    X[MASK] = 0.0


def set_data() -> None:
    X.clone().data = X


Case = tuple[str, Callable[[], Any], str]
READS: list[Case] = [
    ("item", lambda: X.sum().item(), "item"),
    ("tolist", lambda: X.tolist(), "tolist"),
    ("numpy", lambda: X.numpy(), "numpy"),
    ("asarray", lambda: numpy.asarray(X), "asarray"),
    ("cpu", lambda: X.cpu(), r"cpu\(\)"),
    ("to cpu", lambda: X.to("cpu"), r"to\('cpu'\)"),
    ("to device cpu", lambda: X.to(device="cpu"), r"to\('cpu'\)"),
    ("data_ptr", lambda: X.data_ptr(), "data_ptr"),
    ("bool", lambda: bool(X.any()), "bool"),
    ("if", lambda: 1 if X[0, 0] > 0 else 2, "bool"),
    ("int", lambda: int(ONE), "int"),
    ("float", lambda: float(ONE), "float"),
    ("complex", lambda: complex(ONE), "complex"),
    ("range", lambda: range(ONE), "index or size"),
    ("indexed by a scalar", lambda: X[ONE], "__getitem__"),
    ("slice", lambda: X[:, ONE:], "__getitem__"),
    ("contains", lambda: 2.0 in X, "in tensor"),
    ("repr", lambda: repr(X), "printing"),
    ("format", lambda: f"{X[0, 0]:.2f}", "formatting"),
    ("is_nonzero", lambda: torch.is_nonzero(ONE), "is_nonzero"),
    ("equal", lambda: torch.equal(X, X), "equal"),
    ("allclose", lambda: torch.allclose(X, X), "allclose"),
    ("alpha", lambda: torch.add(X, X, alpha=ONE), "in add"),
    ("nonzero", lambda: X.nonzero(), "nonzero"),
    ("where", lambda: torch.where(MASK), "nonzero"),
    ("unique", lambda: X.unique(), "unique"),
    ("masked_select", lambda: X.masked_select(MASK), "masked_select"),
    ("bincount", lambda: torch.bincount(INDEX), "bincount"),
    ("mask", lambda: X[MASK], "mask"),
    ("mask assigned", set_by_mask, "mask"),
    ("mask put", lambda: X.index_put((MASK,), ONE.to(torch.float32)), "mask"),
    ("repeat_interleave", lambda: X.repeat_interleave(INDEX.new_ones(3), 0), "repeat_interleave"),
    ("one_hot", lambda: torch.nn.functional.one_hot(INDEX), "local_scalar|one_hot|aminmax|item"),
    ("tensor_split", lambda: torch.tensor_split(X, INDEX), "tensor_split"),
    ("resize_", lambda: X.clone().resize_(2, 2), "resize_"),
    ("set_", lambda: X.clone().set_(X), "set_"),
    ("data", set_data, "tensor.data"),
    ("deepcopy", lambda: copy.deepcopy(X), "deepcopy"),
    ("dlpack", lambda: X.__dlpack__(), "DLPack"),
    ("tensor", lambda: X + torch.tensor(5.0), r"torch\.tensor\(\) bakes a value"),
    ("as_tensor", lambda: torch.as_tensor([1.0, 2.0]), r"torch\.as_tensor\(\) bakes a value"),
    ("new_tensor", lambda: X.new_tensor([1.0]), r"torch\.new_tensor\(\) bakes a value"),
    ("from_numpy", lambda: X + torch.from_numpy(numpy.ones(4)), "constant of host values"),
    ("list index", lambda: X[[0, 1]], "constant of host values"),
]


@pytest.mark.invariant("G10")
@pytest.mark.parametrize(("name", "program", "says"), READS, ids=[case[0] for case in READS])
def test_a_host_read_is_refused_with_its_line(backend, name, program, says):
    before = X.clone()
    with pytest.raises(HostReadError, match=says) as caught:
        backend.graphs.dry_run(program, Workspace())
    code = program.__code__
    lines = {line for _, _, line in code.co_lines() if line is not None} | {code.co_firstlineno}
    assert any(f"test_host_reads.py:{line}" in str(caught.value) for line in lines), str(caught.value)
    assert torch.equal(X, before)


ALLOWED: list[tuple[str, Callable[[], Any]]] = [
    ("shapes", lambda: X + X.shape[0] * X.dim() + len(X) + X.numel()),
    ("same device", lambda: X.to(INDEX.device) * 2),
    ("dtype", lambda: X.to(torch.float64)),
    ("scalars", lambda: torch.add(X, X, alpha=2) * 3.5),
    ("indexed by a tensor", lambda: X[INDEX] + X[1]),
    ("where", lambda: torch.where(MASK, X, 0.0)),
    ("masked_fill", lambda: X.masked_fill(MASK, 7.0)),
    ("filled", lambda: X + torch.full((4,), 2.0) + torch.zeros_like(X) + torch.ones(4)),
    ("arange", lambda: X + torch.arange(4)),
    ("as_tensor of a tensor", lambda: torch.as_tensor(X) + 1),
    ("one_hot of known size", lambda: torch.nn.functional.one_hot(INDEX, 5)),
    ("repeat of known size", lambda: X.repeat_interleave(INDEX.new_ones(3), 0, output_size=3)),
    ("slices", lambda: X[:, 1:3] * X[..., :2]),
    ("iteration", lambda: sum(row.sum() for row in X)),
    ("nonzero of known size", lambda: torch.nonzero_static(X, size=4)),
]


@pytest.mark.invariant("G10", control=True)
@pytest.mark.parametrize(("name", "program"), ALLOWED, ids=[case[0] for case in ALLOWED])
def test_what_needs_no_host_is_captured(backend, name, program):
    graph = capture(backend, program)
    assert torch.equal(graph.replay(), program())


@pytest.mark.invariant("G10", control=True)
def test_the_same_reads_are_fine_once_the_capture_is_closed(backend):
    graph = capture(backend, lambda: X.sum())
    assert graph.replay().item() == X.sum().item() and X.tolist() and X.numpy() is not None and X.cpu() is X


@pytest.mark.invariant("G3")
def test_a_host_read_that_the_program_swallows_still_fails_the_capture(backend):
    def program() -> torch.Tensor:
        try:
            X.tolist()
        except HostReadError:
            pass
        return X + 1

    with pytest.raises(HostReadError, match="tolist"):
        backend.graphs.dry_run(program, Workspace())
    workspace = planned(backend, lambda: X + 1)
    graph = BreakableGraph(backend)
    with pytest.raises(HostReadError, match="tolist"), GraphCaptureScope(graph, workspace):
        graph.set_outputs(program())
    assert graph.outcome is Outcome.FAILED
    # And without the scope: the driver itself refuses at the end.
    stream = backend.device.current_stream()
    workspace.start()
    backend.graphs.begin(stream, workspace)
    program()
    with pytest.raises(HostReadError, match="tolist"):
        backend.graphs.end(stream)


@pytest.mark.invariant("G3", control=True)
def test_after_a_failed_capture_the_same_container_captures(backend):
    workspace = planned(backend, lambda: X + 1)
    graph = BreakableGraph(backend)
    with pytest.raises(ZeroDivisionError), GraphCaptureScope(graph, workspace):
        graph.set_outputs(1 // 0)
    workspace.start()
    with GraphCaptureScope(graph, workspace):
        graph.set_outputs(X + 1)
    assert torch.equal(graph.replay(), X + 1)


def test_modes_left_on_by_a_failing_program_are_taken_off(backend):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def program() -> None:
        Dispatch().__enter__()
        TorchFunctionMode().__enter__()
        backend.device.new_stream("side").__enter__()
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        backend.graphs.dry_run(program, Workspace())
    assert backend.device.current_stream().name == "main"  # the folder's fixture looks at the modes


def test_a_tensor_of_another_device_is_refused(backend):
    elsewhere = torch.empty(3, device="meta")
    with pytest.raises(CaptureError, match="tensor on meta"):
        backend.graphs.dry_run(lambda: elsewhere + 1, Workspace())


@pytest.mark.invariant("G2")
def test_recordings_do_not_nest(backend):
    workspace = planned(backend, lambda: X + 1)
    stream = backend.device.current_stream()

    def program() -> None:
        with pytest.raises(CaptureError, match="do not nest"):
            backend.graphs.begin(stream, workspace)

    backend.graphs.dry_run(program, Workspace())
    backend.graphs.begin(stream, workspace)
    try:
        with pytest.raises(CaptureError, match="do not nest"):
            backend.graphs.dry_run(lambda: None, Workspace())
        with pytest.raises(CaptureError, match="do not nest"):
            backend.graphs.begin(stream, workspace)
        assert backend.graphs.is_capturing()
    finally:
        backend.graphs.abandon(stream)
    backend.graphs.abandon(stream)  # nothing to abandon: nothing happens
    assert not backend.graphs.is_capturing()
    with pytest.raises(CaptureError, match="no capture"):
        backend.graphs.end(stream)
