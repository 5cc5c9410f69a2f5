"""Workspace memory comes and goes: recycled and poisoned scopes (W3), lanes for side streams (W6)."""

# pyright: basic
from __future__ import annotations

import pytest
import torch

from halma.hal.errors import WorkspaceError
from halma.hal.testing.conformance.capturing import Make, span

F32 = torch.float32


def poison_everywhere(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) == 0xFF).all())


# -- W3 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W3")
@pytest.mark.parametrize("sealed", [False, True])
def test_a_scope_is_recycled_and_poisoned_at_its_exit(make: Make, sealed: bool) -> None:
    workspace = make(checked=True)

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
def test_memory_of_an_open_scope_is_left_alone(make: Make) -> None:
    workspace = make(checked=True)
    with workspace.scope("a"):
        mine = workspace.take((8,), F32).fill_(2)
        with workspace.scope("inner"):
            workspace.take((64,), F32).fill_(5)
        assert mine.tolist() == [2] * 8


@pytest.mark.invariant("W3", control=True)
def test_unchecked_mode_does_not_pay_for_poison(make: Make) -> None:
    workspace = make()
    with workspace.scope("a"):
        mine = workspace.take((8,), F32).fill_(2)
    assert mine.tolist() == [2] * 8


@pytest.mark.invariant("W3")
def test_what_is_handed_out_in_checked_mode_is_poison(make: Make) -> None:
    workspace = make(checked=True)
    for _ in range(2):
        workspace.start()
        assert torch.isnan(workspace.take((8,), F32)).all()
        with workspace.scope("a"):
            assert (workspace.take((8,), torch.int64) == -1).all()
        if not workspace.sealed:
            workspace.seal()


@pytest.mark.invariant("W3")
def test_an_exception_closes_and_poisons_every_scope_it_leaves(make: Make) -> None:
    workspace = make(checked=True)
    with pytest.raises(RuntimeError), workspace.scope("a"):
        outer = workspace.take((4,), F32).fill_(1)
        workspace.enter("b")
        inner = workspace.take((4,), F32).fill_(1)
        raise RuntimeError
    assert workspace.path() == "main"
    assert poison_everywhere(outer) and poison_everywhere(inner)


def test_reset_closes_and_poisons_what_was_left_open(make: Make) -> None:
    workspace = make(checked=True)
    workspace.enter("a")
    left = workspace.take((4,), F32).fill_(1)
    with pytest.raises(WorkspaceError, match="cannot start inside"):
        workspace.start()
    workspace.reset()
    workspace.start()
    assert poison_everywhere(left)


def test_leaving_a_scope_that_is_not_open_is_refused_and_changes_nothing(make: Make) -> None:
    workspace = make()
    node = workspace.enter("a")
    workspace.leave(node)
    with pytest.raises(WorkspaceError, match="is not open"):
        workspace.leave(node)
    assert workspace.path() == "main"


# -- W6 -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("W6")
def test_a_lane_has_memory_of_its_own_and_is_busy_until_its_join(make: Make) -> None:
    workspace = make(checked=True)

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
def test_a_joined_lane_can_be_forked_again_at_the_same_address(make: Make) -> None:
    workspace = make()
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
def test_two_lanes_do_not_share_memory(make: Make) -> None:
    workspace = make()

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
def test_a_lane_that_raises_gives_the_outer_scope_back(make: Make) -> None:
    workspace = make()
    with workspace.scope("outer"):
        with pytest.raises(RuntimeError), workspace.lane("side"):
            workspace.enter("deep")
            raise RuntimeError
        assert workspace.path() == "main/outer"


@pytest.mark.invariant("W6")
def test_sealing_while_a_lane_is_in_use_is_refused(make: Make) -> None:
    workspace = make()
    with workspace.lane("side"):
        pass
    with pytest.raises(WorkspaceError, match="lanes not joined: side"):
        workspace.seal()
    workspace.release_lane("side")
    workspace.seal()
