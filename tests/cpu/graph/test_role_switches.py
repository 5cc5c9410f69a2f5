"""G4 by role: a role that is off does exactly the work of a backend that cannot capture; in child processes."""

from __future__ import annotations

import functools
import json
import os

import pytest

from halma.hal.settings import GRAPH_ROLES
from halma.hal.testing.forks import script

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from halma.backends.cpu.backend import CpuBackend
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.session import CaptureSession
from halma.hal.testing.conformance.roles import STEPS, Toy
from halma.hal.workspace import Workspace

backend = CpuBackend(graph_capture=sys.argv[1] == "capable")
toy = Toy(backend, 4)
session = CaptureSession(backend, Workspace(), "persistent")
ladder = [Descriptor(role, 4) for role in STEPS]
found = {}
with torch.no_grad():
    session.capture_all(ladder, toy.program_of(session))
    for descriptor in ladder:
        steps = []
        for seed in range(3):
            toy.fill(seed)
            with backend.graphs.counting() as counts:
                session.replay(descriptor)
            work = counts()
            steps.append([work.kernels, work.copies, work.allocations, toy.y.tolist()])
        graph = session.find(descriptor)
        found[descriptor.role] = {"steps": steps, "captured": graph is not None}
print(json.dumps(found))
"""


@functools.cache
def steps_of(kind: str, variable: str = "HALMA_GRAPH", value: str = "1") -> dict:
    done = script(SCRIPT, kind, environment={**os.environ, variable: value}).end(120)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.invariant("G4")
@pytest.mark.parametrize("role", GRAPH_ROLES)
def test_a_role_that_is_off_does_the_work_of_a_backend_that_cannot(role: str) -> None:
    off, cannot = steps_of("capable", f"HALMA_GRAPH_{role.upper()}", "0"), steps_of("incapable")
    assert off[role] == cannot[role] and off[role]["steps"][0][0] > 0 and not off[role]["captured"]
    assert all(found["captured"] for other, found in off.items() if other != role)


@pytest.mark.invariant("G4")
def test_all_off_does_the_work_of_a_backend_that_cannot() -> None:
    assert steps_of("capable", "HALMA_GRAPH", "0") == steps_of("incapable")


@pytest.mark.invariant("G4", control=True)
def test_on_every_role_is_replayed_with_the_same_results() -> None:
    on, cannot = steps_of("capable"), steps_of("incapable")
    for role in GRAPH_ROLES:
        assert on[role]["captured"] and on[role]["steps"] != []
        assert [step[3] for step in on[role]["steps"]] == [step[3] for step in cannot[role]["steps"]]
