"""The sealed workspace: it does not grow, shrinks to prefixes, and stays where it is (W1, W2, W4)."""

# pyright: basic
from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.errors import WorkspaceError
from halma.hal.testing.conformance.capturing import Make, span
from halma.hal.workspace import ALIGNMENT, Workspace

F32 = torch.float32


# -- W1 -------------------------------------------------------------------------------------------------


def program(workspace: Workspace, rows: int) -> list[torch.Tensor]:
    workspace.start()
    taken = [workspace.take((rows, 8), F32)]
    with workspace.scope("attend"):
        taken.append(workspace.take((rows, 3), torch.int64))
    return taken


@pytest.mark.invariant("W1")
def test_growth_after_the_seal_names_the_op_the_bytes_and_the_plan(make: Make) -> None:
    workspace = make()
    program(workspace, 4)
    workspace.seal()
    with pytest.raises(WorkspaceError) as caught:
        program(workspace, 5)
    assert "'main'" in caught.value.what
    assert caught.value.asked == ("160 bytes for float32[5, 8]",)
    assert "128 bytes were planned" in caught.value.found[0]
    assert "512 bytes are sealed" in caught.value.found[1]


@pytest.mark.invariant("W1")
def test_growth_inside_an_op_names_its_scope(make: Make) -> None:
    workspace = make()
    program(workspace, 4)
    workspace.seal()
    workspace.start()
    workspace.take((4, 8), F32)
    with workspace.scope("attend"), pytest.raises(WorkspaceError, match="main/attend"):
        workspace.take((100,), torch.int64)


@pytest.mark.invariant("W1")
@pytest.mark.parametrize("what", ["take", "scope", "lane"])
def test_anything_new_after_the_seal_is_refused(make: Make, what: str) -> None:
    workspace = make()
    program(workspace, 4)
    workspace.seal()
    workspace.start()
    why = {"take": "ends before this take", "scope": "no such scope", "lane": "no such lane"}[what]
    with pytest.raises(WorkspaceError, match=rf"cannot grow[\s\S]*{why}"):
        if what == "take":
            workspace.take((1,), F32)
            workspace.take((1,), F32)
        elif what == "scope":
            workspace.enter("unheard")
        else:
            with workspace.lane("side"):
                pass


@pytest.mark.invariant("W1", control=True)
def test_the_planned_program_runs_after_the_seal(make: Make) -> None:
    workspace = make()
    program(workspace, 4)
    total = workspace.seal()
    again = program(workspace, 4)
    assert all(workspace.holds(tensor) for tensor in again)
    assert workspace.report().total == total == 512


@pytest.mark.invariant("W4")
def test_sealing_twice_or_inside_a_scope_is_refused(make: Make) -> None:
    workspace = make()
    with workspace.scope("open"), pytest.raises(WorkspaceError, match="'main/open' is open"):
        workspace.seal()
    workspace.seal()
    with pytest.raises(WorkspaceError, match="sealed already"):
        workspace.seal()


# -- W2 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W2")
def test_a_smaller_descriptor_gets_prefixes_of_the_largest(make: Make) -> None:
    workspace = make()
    program(workspace, 64)
    workspace.seal()
    large = program(workspace, 64)
    for rows in (1, 7, 63):
        small = program(workspace, rows)
        for mine, theirs in zip(small, large, strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
            assert span(mine)[1] <= span(theirs)[1]


@pytest.mark.invariant("W2", control=True)
def test_the_order_of_planning_does_not_matter(make: Make) -> None:
    totals: list[int] = []
    for order in ((1, 64, 7), (64, 7, 1), (7, 1, 64)):
        workspace = make()
        for rows in order:
            program(workspace, rows)
        totals.append(workspace.seal())
        base = program(workspace, 64)[0].data_ptr()
        assert [tensor.data_ptr() - base for tensor in program(workspace, 1)] == [0, 2048]
    assert len(set(totals)) == 1


DTYPES = (torch.uint8, torch.bfloat16, F32, torch.float64, torch.int64, torch.bool)
Node = tuple[list[tuple[int, int]], list["Node"]]  # type: ignore[misc]
NODES: st.SearchStrategy[Node] = st.recursive(
    st.tuples(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5)), max_size=4), st.just([])),
    lambda inner: st.tuples(
        st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5)), max_size=4), st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def walk(workspace: Workspace, node: Node, scale: float, taken: list[torch.Tensor], depth: str = "") -> None:
    """Take what the node says; check that nothing taken in a scope overlaps what its ancestors hold."""
    takes, children = node
    before = len(taken)
    for size, kind in takes:
        taken.append(workspace.take((int(size * scale),), DTYPES[kind]))
        assert taken[-1].data_ptr() % ALIGNMENT == 0 or taken[-1].numel() == 0
    spans = sorted(span(tensor) for tensor in taken if tensor.numel())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "live takes overlap"
    for index, child in enumerate(children):
        with workspace.scope(f"s{index}"):
            walk(workspace, child, scale, taken, f"{depth}/s{index}")
    del taken[before:]


def addresses(workspace: Workspace, node: Node, scale: float) -> list[int]:
    found: list[int] = []

    def visit(node: Node) -> None:
        for size, kind in node[0]:
            found.append(workspace.take((int(size * scale),), DTYPES[kind]).data_ptr())
        for index, child in enumerate(node[1]):
            with workspace.scope(f"s{index}"):
                visit(child)

    workspace.start()
    visit(node)
    return found


@pytest.mark.invariant("W2")
@settings(max_examples=60, deadline=None)
@given(node=NODES, scale=st.floats(0.0, 1.0), checked=st.booleans())
def test_any_program_is_aligned_disjoint_and_prefixed(make: Make, node: Node, scale: float, checked: bool) -> None:
    workspace = make(checked=checked)
    walk(workspace, node, 1.0, [])
    workspace.seal()
    workspace.start()
    walk(workspace, node, 1.0, [])
    workspace.start()
    walk(workspace, node, scale, [])
    largest, smaller = addresses(workspace, node, 1.0), addresses(workspace, node, scale)
    sizes: list[bool] = []

    def flags(node: Node) -> None:
        sizes.extend(int(size * scale) > 0 for size, _ in node[0])
        for child in node[1]:
            flags(child)

    flags(node)
    assert [a for a, some in zip(smaller, sizes, strict=True) if some] == [
        a for a, some in zip(largest, sizes, strict=True) if some
    ]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), ()])
def test_shapes_without_elements_and_scalars(make: Make, shape: tuple[int, ...]) -> None:
    workspace = make()
    assert workspace.take(shape, F32).shape == torch.Size(shape)
    workspace.seal()
    assert workspace.take(shape, F32).shape == torch.Size(shape)


def test_a_place_keeps_the_most_bytes_whatever_the_dtype(make: Make) -> None:
    workspace = make()
    for shape, dtype in (((3,), torch.float64), ((40,), torch.uint8), ((5,), F32)):
        workspace.start()
        workspace.take(shape, dtype)
    assert workspace.seal() == ALIGNMENT
    assert workspace.take((40,), torch.uint8).nbytes == 40


# -- W4 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W4")
def test_addresses_stay_for_the_life_of_the_workspace(make: Make) -> None:
    workspace = make()
    program(workspace, 16)
    workspace.seal()
    first = [t.data_ptr() for t in program(workspace, 16)]
    for rows in (3, 16, 1, 16):
        program(workspace, rows)
    workspace.reset()
    assert [t.data_ptr() for t in program(workspace, 16)] == first


@pytest.mark.invariant("W4", control=True)
def test_sealing_is_the_one_moment_when_addresses_move(make: Make) -> None:
    workspace = make()
    before = program(workspace, 16)
    workspace.seal()
    assert not any(workspace.holds(tensor) for tensor in before)
    assert all(workspace.holds(tensor) for tensor in program(workspace, 16))
