"""Several ranks on a build without the vendor's library of collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.cli.team import world_of
from halma.hal.errors import RequestError


def test_ranks_without_a_library_are_refused_with_the_reason() -> None:
    backend: Any = SimpleNamespace(
        name="npu",
        capabilities=SimpleNamespace(collective_backend=None),
        collectives=SimpleNamespace(torch_backend="xccl", unsupported=lambda: "built without xccl"),
        device=SimpleNamespace(torch_device=torch.device("meta")),
    )
    with pytest.raises(RequestError, match="several ranks cannot meet") as caught:
        world_of(backend)
    assert "built without xccl" in str(caught.value)
