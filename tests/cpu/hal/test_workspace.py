"""The sealed workspace: growth, prefixes, recycling, lanes (W1, W2, W3, W6)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.errors import WorkspaceError
from halma.hal.workspace import ALIGNMENT, Workspace

F32 = torch.float32


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def poison_everywhere(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) == 0xFF).all())


# -- W1 -------------------------------------------------------------------------------------------------


def program(workspace: Workspace, rows: int) -> list[torch.Tensor]:
    workspace.start()
    taken = [workspace.take((rows, 8), F32)]
    with workspace.scope("attend"):
        taken.append(workspace.take((rows, 3), torch.int64))
    return taken


@pytest.mark.invariant("W1")
def test_growth_after_the_seal_names_the_op_the_bytes_and_the_plan() -> None:
    workspace = Workspace()
    program(workspace, 4)
    workspace.seal()
    with pytest.raises(WorkspaceError) as caught:
        program(workspace, 5)
    assert "'main'" in caught.value.what
    assert caught.value.asked == ("160 bytes for float32[5, 8]",)
    assert "128 bytes were planned" in caught.value.found[0]
    assert "512 bytes are sealed" in caught.value.found[1]


@pytest.mark.invariant("W1")
def test_growth_inside_an_op_names_its_scope() -> None:
    workspace = Workspace()
    program(workspace, 4)
    workspace.seal()
    workspace.start()
    workspace.take((4, 8), F32)
    with workspace.scope("attend"), pytest.raises(WorkspaceError, match="main/attend"):
        workspace.take((100,), torch.int64)


@pytest.mark.invariant("W1")
@pytest.mark.parametrize("what", ["take", "scope", "lane"])
def test_anything_new_after_the_seal_is_refused(what: str) -> None:
    workspace = Workspace()
    program(workspace, 4)
    workspace.seal()
    workspace.start()
    with pytest.raises(WorkspaceError, match="cannot grow"):
        if what == "take":
            workspace.take((1,), F32)
            workspace.take((1,), F32)
        elif what == "scope":
            workspace.enter("unheard")
        else:
            with workspace.lane("side"):
                pass


@pytest.mark.invariant("W1", control=True)
def test_the_planned_program_runs_after_the_seal() -> None:
    workspace = Workspace()
    program(workspace, 4)
    total = workspace.seal()
    again = program(workspace, 4)
    assert all(workspace.holds(tensor) for tensor in again)
    assert workspace.report().total == total == 512


def test_sealing_twice_or_inside_a_scope_is_refused() -> None:
    workspace = Workspace()
    with workspace.scope("open"), pytest.raises(WorkspaceError, match="'main/open' is open"):
        workspace.seal()
    workspace.seal()
    with pytest.raises(WorkspaceError, match="sealed already"):
        workspace.seal()


# -- W2 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W2")
def test_a_smaller_descriptor_gets_prefixes_of_the_largest() -> None:
    workspace = Workspace()
    program(workspace, 64)
    workspace.seal()
    large = program(workspace, 64)
    for rows in (1, 7, 63):
        small = program(workspace, rows)
        for mine, theirs in zip(small, large, strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
            assert span(mine)[1] <= span(theirs)[1]


@pytest.mark.invariant("W2", control=True)
def test_the_order_of_planning_does_not_matter() -> None:
    totals: list[int] = []
    for order in ((1, 64, 7), (64, 7, 1), (7, 1, 64)):
        workspace = Workspace()
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
def test_any_program_is_aligned_disjoint_and_prefixed(node: Node, scale: float, checked: bool) -> None:
    workspace = Workspace(checked=checked)
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
def test_shapes_without_elements_and_scalars(shape: tuple[int, ...]) -> None:
    workspace = Workspace()
    assert workspace.take(shape, F32).shape == torch.Size(shape)
    workspace.seal()
    assert workspace.take(shape, F32).shape == torch.Size(shape)


def test_a_place_keeps_the_most_bytes_whatever_the_dtype() -> None:
    workspace = Workspace()
    for shape, dtype in (((3,), torch.float64), ((40,), torch.uint8), ((5,), F32)):
        workspace.start()
        workspace.take(shape, dtype)
    assert workspace.seal() == ALIGNMENT
    assert workspace.take((40,), torch.uint8).nbytes == 40


# -- W3 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W3")
@pytest.mark.parametrize("sealed", [False, True])
def test_a_scope_is_recycled_and_poisoned_at_its_exit(sealed: bool) -> None:
    workspace = Workspace(checked=True)

    def once() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        workspace.start()
        outer = workspace.take((8,), F32).fill_(1)
        with workspace.scope("a"):
            first = workspace.take((8,), F32).fill_(2)
        with workspace.scope("b"):
            second = workspace.take((8,), F32).fill_(3)
        return outer, first, second

    once()
    if sealed:
        workspace.seal()
    outer, first, second = once()
    assert poison_everywhere(first) and poison_everywhere(second)
    assert outer.tolist() == [1] * 8
    if sealed:
        assert first.data_ptr() == second.data_ptr(), "scopes that are never open together share memory"


@pytest.mark.invariant("W3", control=True)
def test_memory_of_an_open_scope_is_left_alone() -> None:
    workspace = Workspace(checked=True)
    with workspace.scope("a"):
        mine = workspace.take((8,), F32).fill_(2)
        with workspace.scope("inner"):
            workspace.take((64,), F32).fill_(5)
        assert mine.tolist() == [2] * 8


@pytest.mark.invariant("W3", control=True)
def test_unchecked_mode_does_not_pay_for_poison() -> None:
    workspace = Workspace()
    with workspace.scope("a"):
        mine = workspace.take((8,), F32).fill_(2)
    assert mine.tolist() == [2] * 8


@pytest.mark.invariant("W3")
def test_what_is_handed_out_in_checked_mode_is_poison() -> None:
    workspace = Workspace(checked=True)
    for _ in range(2):
        workspace.start()
        assert torch.isnan(workspace.take((8,), F32)).all()
        with workspace.scope("a"):
            assert (workspace.take((8,), torch.int64) == -1).all()
        if not workspace.sealed:
            workspace.seal()


@pytest.mark.invariant("W3")
def test_an_exception_closes_and_poisons_every_scope_it_leaves() -> None:
    workspace = Workspace(checked=True)
    with pytest.raises(RuntimeError), workspace.scope("a"):
        outer = workspace.take((4,), F32).fill_(1)
        workspace.enter("b")
        inner = workspace.take((4,), F32).fill_(1)
        raise RuntimeError
    assert workspace.path() == "main"
    assert poison_everywhere(outer) and poison_everywhere(inner)


def test_reset_closes_and_poisons_what_was_left_open() -> None:
    workspace = Workspace(checked=True)
    workspace.enter("a")
    left = workspace.take((4,), F32).fill_(1)
    with pytest.raises(WorkspaceError, match="cannot start inside"):
        workspace.start()
    workspace.reset()
    workspace.start()
    assert poison_everywhere(left)


def test_leaving_a_scope_that_is_not_open_is_refused_and_changes_nothing() -> None:
    workspace = Workspace()
    node = workspace.enter("a")
    workspace.leave(node)
    with pytest.raises(WorkspaceError, match="is not open"):
        workspace.leave(node)
    assert workspace.path() == "main"


# -- W4 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W4")
def test_addresses_stay_for_the_life_of_the_workspace() -> None:
    workspace = Workspace()
    program(workspace, 16)
    workspace.seal()
    first = [t.data_ptr() for t in program(workspace, 16)]
    for rows in (3, 16, 1, 16):
        program(workspace, rows)
    workspace.reset()
    assert [t.data_ptr() for t in program(workspace, 16)] == first


@pytest.mark.invariant("W4", control=True)
def test_sealing_is_the_one_moment_when_addresses_move() -> None:
    workspace = Workspace()
    before = program(workspace, 16)
    workspace.seal()
    assert not any(workspace.holds(tensor) for tensor in before)
    assert all(workspace.holds(tensor) for tensor in program(workspace, 16))


# -- W6 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W6")
def test_a_lane_has_memory_of_its_own_and_is_busy_until_its_join() -> None:
    workspace = Workspace(checked=True)

    def fork() -> torch.Tensor:
        with workspace.lane("side"):
            return workspace.take((8,), F32).fill_(4)

    fork()
    workspace.release_lane("side")
    with workspace.scope("main work"):
        workspace.take((8,), F32)
    workspace.seal()
    side = fork()
    with workspace.scope("main work"):
        ours = workspace.take((8,), F32).fill_(1)
        assert ours.data_ptr() != side.data_ptr()
    assert side.tolist() == [4] * 8, "closing a scope of the main lane leaves the side lane alone"
    with pytest.raises(WorkspaceError, match="still in use"):
        fork()
    workspace.release_lane("side")
    assert poison_everywhere(side)


@pytest.mark.invariant("W6", control=True)
def test_a_joined_lane_can_be_forked_again_at_the_same_address() -> None:
    workspace = Workspace()
    seen: set[int] = set()
    for index in range(4):
        if index == 1:
            workspace.seal()
        with workspace.lane("side"):
            assert workspace.path() == "side"
            address = workspace.take((8,), F32).data_ptr()
        workspace.release_lane("side")
        if index:
            seen.add(address)
    assert len(seen) == 1
    assert set(workspace.report().lanes) == {"main", "side"}


@pytest.mark.invariant("W6")
def test_two_lanes_do_not_share_memory() -> None:
    workspace = Workspace()

    def both() -> list[torch.Tensor]:
        taken: list[torch.Tensor] = []
        for name in ("one", "two"):
            with workspace.lane(name):
                taken.append(workspace.take((100,), F32))
        workspace.release_lane("one")
        workspace.release_lane("two")
        return taken

    both()
    workspace.seal()
    (_, end), (begin, _) = sorted(map(span, both()))
    assert end <= begin


@pytest.mark.invariant("W6")
def test_a_lane_that_raises_gives_the_outer_scope_back() -> None:
    workspace = Workspace()
    with workspace.scope("outer"):
        with pytest.raises(RuntimeError), workspace.lane("side"):
            workspace.enter("deep")
            raise RuntimeError
        assert workspace.path() == "main/outer"


@pytest.mark.invariant("W6")
def test_sealing_while_a_lane_is_in_use_is_refused() -> None:
    workspace = Workspace()
    with workspace.lane("side"):
        pass
    with pytest.raises(WorkspaceError, match="lanes not joined: side"):
        workspace.seal()
    workspace.release_lane("side")
    workspace.seal()


def test_a_sibling_has_its_own_plan_and_memory():
    first = Workspace(checked=True)
    first.take((64,), torch.float32)
    second = first.sibling()
    assert second.checked and second.device == first.device and second.report().total == 0
    second.take((8,), torch.float32)
    second.seal()
    assert not first.sealed and first.report().total == 256


@pytest.mark.parametrize("seal", [True, False])
def test_a_discarded_workspace_holds_nothing_and_gives_nothing(seal):
    workspace = Workspace()
    with workspace.scope("a"):
        kept = workspace.take((64,), torch.float32)
    if seal:
        workspace.seal()
    kept.zero_()
    workspace.discard()
    assert workspace.report().total == 0 and workspace.sealed and float(kept.sum()) == 0
    with pytest.raises(WorkspaceError, match="cannot grow"):
        workspace.take((1,), torch.float32)
