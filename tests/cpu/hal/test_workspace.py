"""A workspace beside another one, and the end of one."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import WorkspaceError
from halma.hal.workspace import Workspace


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
    with pytest.raises(WorkspaceError, match="was given back"):
        workspace.take((1,), torch.float32)
