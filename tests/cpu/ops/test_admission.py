"""Every op's reference and every route of ours pass the suite that a stranger's route must pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from halma.hal.capabilities import Capabilities
from halma.hal.dispatch import table
from halma.hal.testing.admission import admit
from halma.hal.testing.examples import ops_with_examples
from halma.ops import examples as _examples  # noqa: F401  (offers the examples)
from halma.ops.routes import register_routes

register_routes(table.add_route)


@dataclass
class _Device:
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class _Cpu:
    name: str = "cpu"
    device: _Device = field(default_factory=_Device)
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(row_invariant=True))


CPU: Any = _Cpu()
OURS = sorted(name for name, spec in table.ops.items() if spec.reference.__module__.startswith("halma.ops."))
ROUTES = [(name, route) for name in OURS for route in ("reference", *(r.name for r in table.get(name).routes))]


@pytest.mark.parametrize(("name", "route"), ROUTES, ids=[f"{name}-{route}" for name, route in ROUTES])
def test_a_route_of_ours_is_admitted(name: str, route: str) -> None:
    report = admit(name, route, CPU)
    assert report.admitted, report.reason


def test_every_op_of_ours_has_examples_and_the_other_way_round() -> None:
    assert OURS == ops_with_examples()
