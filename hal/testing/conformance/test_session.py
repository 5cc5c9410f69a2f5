"""Sessions on the named backend: keys, orders, memory, scratch and persistent, budgets, executables."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.errors import CaptureError
from halma.hal.graph.breakable import Outcome
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.executables import ExecutablePool
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.graph.session import CaptureSession
from halma.hal.settings import GraphSwitch
from halma.hal.testing.conformance.roles import STEPS, Toy, session_on
from halma.hal.workspace import Workspace

ORDERS = ("descending", "ascending", "shuffled(7)")
LADDER = decode_ladder(8, query_lens=(1, 3))
BASE = Descriptor("decode", 4, 2, 256, "greedy")


@pytest.fixture
def able(halma_backend: Backend) -> Iterator[Backend]:
    """The backend, where it captures."""
    reason = halma_backend.graphs.unsupported()
    if reason is not None:
        pytest.skip(reason)
    with torch.no_grad():
        yield halma_backend


@pytest.fixture
def toy(able: Backend) -> Toy:
    """Room for every descriptor of these tests."""
    return Toy(able, 24)


def expected(toy: Toy, backend: Backend, descriptor: Descriptor) -> torch.Tensor:
    """What the program gives when it runs by itself."""
    with session_on(backend) as session:
        toy.program(session, descriptor)()
        return toy.y[: descriptor.num_tokens].clone()


@pytest.mark.parametrize("role", STEPS)
def test_every_role_is_a_descriptor_and_a_program(able: Backend, toy: Toy, role: str) -> None:
    made = decode_ladder(6, query_lens=(1, 3), role=role)
    with session_on(able) as session:
        session.capture_all(made, toy.program_of(session))
        for seed, descriptor in enumerate((*made, *made, *made)):
            toy.fill(seed)
            wanted = expected(toy, able, descriptor)
            toy.fill(seed)
            assert torch.equal(session.replay(descriptor), wanted)
        assert session.replays == 3 * len(made) and not session.eager_steps


@pytest.mark.invariant("G15")
@pytest.mark.parametrize(
    "change",
    [{"role": "verify"}, {"num_requests": 2}, {"query_len": 1}, {"context_capacity": 512}, {"variant": "sample"}],
    ids=lambda change: next(iter(change)),
)
def test_a_key_that_differs_in_one_field_finds_no_graph(able: Backend, toy: Toy, change: dict[str, Any]) -> None:
    other = replace(BASE, **change)
    with session_on(able) as session:
        session.capture_all([BASE], toy.program_of(session))
        assert session.find(other) is None
        assert list(session.eager_steps) == [f"no graph: {other} was not captured"]
        with pytest.raises(CaptureError, match="is not part of the session"):
            session.replay(other)


@pytest.mark.invariant("G15", control=True)
def test_an_equal_key_finds_its_graph(able: Backend, toy: Toy) -> None:
    with session_on(able) as session:
        session.capture_all([BASE], toy.program_of(session))
        assert session.find(Descriptor("decode", 4, 2, 256, "greedy")) is not None and not session.eager_steps


def in_order(backend: Backend, toy: Toy, order: str) -> tuple[int, list[torch.Tensor], list[int | None]]:
    """Bytes, results and addresses of outputs in the workspace, of the ladder captured in ``order``."""

    def program(session: CaptureSession, descriptor: Descriptor):
        workspace, x = session.workspace, toy.x[: descriptor.num_tokens]

        def step() -> torch.Tensor:
            out = workspace.take(x.shape, x.dtype)
            with workspace.scope("inner"):
                h = workspace.take(x.shape, x.dtype)
                torch.mul(x, 3.0, out=h)
                torch.add(h, 1.0, out=out)
            return out

        return step

    with session_on(backend) as session:
        session.capture_all(LADDER, lambda d: program(session, d), order)
        toy.fill(5)
        found = [session.replay(descriptor) for descriptor in LADDER]
        results = [session.replay(descriptor).clone() for descriptor in LADDER]
        return session.report().total_bytes, results, [session.workspace.offset_of(one) for one in found]


@pytest.mark.invariant("G17")
@pytest.mark.invariant("G18")
@pytest.mark.parametrize("order", ORDERS[1:])
def test_no_order_changes_results_memory_or_addresses(able: Backend, toy: Toy, order: str) -> None:
    size, results, offsets = in_order(able, toy, order)
    reference = in_order(able, toy, ORDERS[0])
    assert abs(size - reference[0]) <= 0.01 * reference[0] and size > 0
    assert all(torch.equal(a, b) for a, b in zip(results, reference[1], strict=True))
    assert offsets == reference[2] and None not in offsets


@pytest.mark.invariant("G17", control=True)
@pytest.mark.invariant("G18", control=True)
def test_the_largest_first_is_captured_as_it_always_was(able: Backend, toy: Toy) -> None:
    size, results, _ = in_order(able, toy, "descending")
    assert size > 0 and all(torch.equal(one, toy.x[: len(one)] * 3 + 1) for one in results)


@pytest.mark.invariant("G18")
@pytest.mark.parametrize("order", ORDERS)
def test_captures_asked_for_one_by_one_wait_until_all_are_planned(able: Backend, toy: Toy, order: str) -> None:
    from halma.hal.graph.orders import ordered

    workspace = Workspace(able.device.torch_device)
    with CaptureSession(able, workspace, "persistent") as session:
        for descriptor in ordered(LADDER, order):
            assert session.capture(descriptor, toy.program(session, descriptor)) is None
        assert not workspace.sealed and session.find(LADDER[0]) is None
    assert workspace.sealed and len(session) == len(LADDER)
    for descriptor in LADDER:
        wanted = expected(toy, able, descriptor)
        assert torch.equal(session.replay(descriptor), wanted)
    session.close()


# -- scratch and persistent --------------------------------------------------------------------------------


def live_bytes(backend: Backend) -> int:
    """Bytes of every storage on the backend's device that some tensor keeps alive."""
    gc.collect()
    kind = backend.device.torch_device.type
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == kind:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def cycle(backend: Backend, toy: Toy, kind: str) -> int:
    """Capture, replay and close; the bytes that the session held."""
    with session_on(backend, kind) as session:
        session.capture_all(LADDER, toy.program_of(session))
        for descriptor in LADDER:
            session.replay(descriptor)
        held = session.report().total_bytes
    assert session.report().total_bytes == held and session.report().captured == len(LADDER)
    return held


@pytest.mark.invariant("G19")
def test_scratch_persistent_scratch_leaves_memory_where_it_was(able: Backend, toy: Toy) -> None:
    cycle(able, toy, "scratch")
    before = live_bytes(able)
    seen: list[int] = []
    for _ in range(4):
        held = [cycle(able, toy, kind) for kind in ("scratch", "persistent", "scratch")]
        assert len(set(held)) == 1
        seen.append(live_bytes(able))
    assert seen == [before] * 4


@pytest.mark.invariant("G19", control=True)
def test_an_open_session_is_seen_to_hold_its_memory(able: Backend, toy: Toy) -> None:
    before = live_bytes(able)
    with session_on(able, "scratch") as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert live_bytes(able) >= before + session.report().workspace_bytes > before
    del session
    assert live_bytes(able) == before


@pytest.mark.invariant("G19")
def test_a_scratch_session_neither_seals_nor_plans_the_workspace_it_was_given(able: Backend, toy: Toy) -> None:
    workspace = Workspace(able.device.torch_device)
    before = workspace.report()
    with CaptureSession(able, workspace, "scratch") as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert session.workspace is not workspace and session.workspace.sealed
    assert workspace.report() == before and not workspace.sealed
    assert session.find(LADDER[0]) is None and list(session.eager_steps) == ["the session is closed"]
    with pytest.raises(CaptureError, match="the session is closed"):
        session.capture(BASE, lambda: None)


def test_a_kind_is_said_and_not_guessed(able: Backend) -> None:
    with pytest.raises(CaptureError, match="no kind of session called 'profile'"):
        CaptureSession(able, Workspace(), "profile")


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_descriptor_is_captured_once(able: Backend, toy: Toy) -> None:
    with session_on(able) as session:
        session.capture_all([BASE], toy.program_of(session))
        with pytest.raises(CaptureError, match="captured already"):
            session.capture(BASE, toy.program(session, BASE))
        with pytest.raises(CaptureError, match="captured already"):
            session.capture_all([BASE], toy.program_of(session))
        with pytest.raises(CaptureError, match="in the ladder twice"):
            session.capture_all([LADDER[0], LADDER[0]], toy.program_of(session))
        with pytest.raises(CaptureError, match="is wider than"):
            session.capture_all(LADDER, toy.program_of(session), limit=4)
        assert len(session) == 1


@pytest.mark.parametrize("switch", [GraphSwitch(), GraphSwitch(on=False)], ids=["on", "off"])
def test_a_session_does_not_capture_inside_a_capture_whatever_the_switch(
    able: Backend, toy: Toy, switch: GraphSwitch
) -> None:
    from halma.hal.graph.breakable import BreakableGraph

    with session_on(able, switch=switch) as session:
        session.workspace.seal()
        with GraphCaptureScope(BreakableGraph(able), session.workspace, enabled=False):
            with pytest.raises(CaptureError, match="a capture is open"):
                session.capture(BASE, toy.program(session, BASE))


@pytest.mark.invariant("G20")
@pytest.mark.parametrize("limits", [{"budget": 1}, {"reserve": 1 << 62}], ids=["budget", "reserve"])
def test_what_does_not_fit_stays_eager_with_its_reason(able: Backend, toy: Toy, limits: dict[str, Any]) -> None:
    calls = 0

    def program_of(session: CaptureSession, descriptor: Descriptor):
        inner = toy.program(session, descriptor)

        def program() -> torch.Tensor:
            nonlocal calls
            calls += 1
            return inner()

        return program

    with session_on(able, **limits) as session:
        session.capture_all(LADDER, lambda d: program_of(session, d))
        planned = calls
        assert len(session) == 0 and {row.outcome for row in session.report().rows} == {Outcome.EMPTY}
        name = next(iter(limits))
        assert all(name in row.why_not for row in session.report().rows)
        # The negative cache: asking again costs nothing, and nothing is tried.
        for descriptor in LADDER:
            assert session.capture(descriptor, program_of(session, descriptor)) is None
        assert calls == planned
        wanted = expected(toy, able, LADDER[-1])
        toy.fill(0)
        assert torch.equal(session.replay(LADDER[-1]), wanted) and calls == planned + 1
        session.forget()
        assert not session.report().rows


@pytest.mark.invariant("G20", control=True)
def test_what_fits_is_captured(able: Backend, toy: Toy) -> None:
    with session_on(able, budget=1 << 40, reserve=1) as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert len(session) == len(LADDER) and not any(row.why_not for row in session.report().rows)


@pytest.mark.parametrize("limits", [{"budget": 0}, {"budget": -1}, {"reserve": -1}])
def test_limits_that_mean_nothing_are_refused(able: Backend, limits: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="holds nothing|cannot be negative"):
        CaptureSession(able, Workspace(), "persistent", **limits)


@pytest.mark.invariant("G21")
def test_executables_beyond_the_limit_are_recycled_and_come_back(able: Backend, toy: Toy) -> None:
    if able.capabilities.graph_reinstantiate is not True:
        pytest.skip("capability graph_reinstantiate is " + str(able.capabilities.graph_reinstantiate))
    pool = ExecutablePool(limit=2, again=True)
    with session_on(able, executables=pool) as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert len(session) == len(LADDER) > 2 == len(pool)
        for seed, descriptor in enumerate((*LADDER, *reversed(LADDER))):
            toy.fill(seed)
            wanted = expected(toy, able, descriptor)
            toy.fill(seed)
            assert torch.equal(session.replay(descriptor), wanted) and len(pool) == 2
        assert pool.recycled >= len(LADDER)
    assert len(pool) == 0


@pytest.mark.invariant("G21")
def test_executables_that_cannot_come_back_are_not_made(able: Backend, toy: Toy) -> None:
    pool = ExecutablePool(limit=2, again=False)
    with session_on(able, executables=pool) as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert len(session) == 2 == len(pool)
        assert all("2 live executables" in row.why_not for row in session.report().rows[2:])


@pytest.mark.invariant("G21", control=True)
def test_without_a_limit_executables_are_only_counted(able: Backend, toy: Toy) -> None:
    pool = ExecutablePool(limit=None, again=False)
    with session_on(able, executables=pool) as session:
        session.capture_all(LADDER, toy.program_of(session))
        assert len(pool) == len(LADDER) == len(session) and pool.recycled == 0
    assert len(pool) == 0


# -- failure, strict, switches -----------------------------------------------------------------------------


def test_a_failed_descriptor_raises_once_and_is_not_tried_again(able: Backend, toy: Toy) -> None:
    with session_on(able) as session:
        session.capture_all([BASE], toy.program_of(session))
        calls: list[int] = []

        def broken() -> None:
            calls.append(1)
            raise ValueError("no such layer")

        bad = replace(BASE, variant="bad")
        with pytest.raises(ValueError, match="no such layer"):
            session.capture(bad, broken)
        assert session.capture(bad, broken) is None and len(calls) == 1
        row = session.report().rows[-1]
        assert row.outcome is Outcome.FAILED and "ValueError: no such layer" in row.why_not
        good = replace(BASE, num_requests=2)
        assert session.capture(good, toy.program(session, good)) is not None


def test_a_strict_session_refuses_the_eager_step(able: Backend, toy: Toy) -> None:
    with session_on(able, strict=True) as session:
        session.capture_all([BASE], toy.program_of(session))
        assert session.find(BASE) is not None
        with pytest.raises(CaptureError, match="HALMA_STRICT"):
            session.find(LADDER[0])
    with session_on(able, strict=True, switch=GraphSwitch(on=False)) as session:
        assert session.find(BASE) is None


@pytest.mark.invariant("G4")
@pytest.mark.parametrize("role", STEPS)
def test_a_role_that_is_off_is_neither_captured_nor_run_beforehand(able: Backend, toy: Toy, role: str) -> None:
    made = [Descriptor(one, 2) for one in STEPS]
    with session_on(able, switch=GraphSwitch(roles_off=frozenset({role}))) as session:
        session.capture_all(made, toy.program_of(session))
        report = {row.descriptor.role: row for row in session.report().rows}
        assert report[role].why_not == f"capture of {role} is switched off" and report[role].outcome is Outcome.INERT
        assert all(row.outcome is Outcome.CAPTURED for other, row in report.items() if other != role)
        toy.fill(3)
        wanted = expected(toy, able, Descriptor(role, 2))
        toy.fill(3)
        assert torch.equal(session.replay(Descriptor(role, 2)), wanted)
        assert session.eager_steps == {f"capture of {role} is switched off": 1}
