"""How routes are recorded: opaque ones as a node, and what was decided and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from halma.hal.decisions import decisions
from halma.hal.dispatch import Ops, OpTable, RouteSpec
from halma.hal.graph.current import set_current_recorder
from halma.hal.workspace import Workspace
from tests.cpu.hal.scaling import Record, result, route, table_with

# -- opaque routes --------------------------------------------------------------------------------------


class FakeRecorder:
    def __init__(self) -> None:
        self.nodes: list[tuple[str, Callable[[], None], list[torch.Tensor], list[torch.Tensor]]] = []
        self.parameters: list[tuple[str, Any]] = []

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.parameters += parameters
        self.nodes.append((name, launch, list(reads), list(writes)))


@pytest.fixture
def recorder() -> Any:
    recorder = FakeRecorder()
    set_current_recorder(recorder)
    yield recorder
    set_current_recorder(None)


def opaque(x: torch.Tensor, factor: float = 2.0, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    def launch() -> None:
        torch.add(x, 10.0, out=out)

    return launch


def test_an_opaque_route_runs_at_once_without_a_recorder() -> None:
    assert result(table_with(RouteSpec("scale", "opaque", lambda: opaque, opaque=True))) == 11.0


def test_an_opaque_route_is_recorded_as_one_node_and_not_run(recorder: FakeRecorder) -> None:
    ops = Ops(Workspace(checked=True), ops=table_with(RouteSpec("scale", "opaque", lambda: opaque, opaque=True)))
    x = torch.ones(2)
    y = ops.scale(x)
    assert torch.isnan(y).all(), "nothing runs while recording"
    [(name, launch, reads, writes)] = recorder.nodes
    assert name == "scale:opaque"
    assert [t is x for t in reads] == [True]
    assert [t is y for t in writes] == [True]
    launch()
    assert y.tolist() == [11, 11]
    x.fill_(5)
    launch()
    assert y.tolist() == [15, 15], "a launch runs again on the same addresses"


@pytest.mark.invariant("G11")
def test_an_opaque_node_names_the_host_values_it_was_made_with(recorder: FakeRecorder) -> None:
    ops = Ops(Workspace(), ops=table_with(RouteSpec("scale", "opaque", lambda: opaque, opaque=True)))
    ops.scale(torch.ones(2), 3.0)
    ops.scale(torch.ones(2), factor=4.0)
    assert recorder.parameters == [("factor", 3.0), ("factor", 4.0)]


def test_an_opaque_op_in_place_declares_its_arguments_tensors_as_written(recorder: FakeRecorder) -> None:
    table = OpTable()

    @table.define("store", out=None)
    def store(x: torch.Tensor, target: Record, *, ws: Workspace) -> None:
        target.data.copy_(x)

    def launcher(x: torch.Tensor, target: Record, *, ws: Workspace) -> Callable[[], None]:
        return lambda: store.reference(x, target, ws=ws)

    table.add_route(RouteSpec("store", "opaque", lambda: launcher, opaque=True))
    x, target = torch.ones(2), Record(torch.zeros(2))
    Ops(Workspace(), ops=table).store(x, target)
    [(_, launch, reads, writes)] = recorder.nodes
    assert {t.data_ptr() for t in reads} == {x.data_ptr(), target.data.data_ptr()}
    assert target.data.data_ptr() in {t.data_ptr() for t in writes}
    launch()
    assert target.data.tolist() == [1, 1]


def test_a_transparent_route_is_left_to_the_stream(recorder: FakeRecorder) -> None:
    assert result(table_with(route("plain", 10))) == 11.0
    assert not recorder.nodes


# -- decisions ------------------------------------------------------------------------------------------


def test_every_plan_is_recorded_with_all_candidates_and_reasons() -> None:
    decisions.clear()
    table = table_with(
        route("tile", needs=(lambda call: "M=3 is below 8 (its tile)",), priority=3), route("fast", priority=2)
    )
    ops = Ops(Workspace(), ops=table)
    ops.scale(torch.ones(3))
    ops.scale(torch.ones(3))
    [(decision, count)] = decisions.all("op")
    assert (decision.subject, decision.chosen, count) == ("scale", "fast", 1)
    assert [(c.name, c.chosen, c.reason) for c in decision.candidates] == [
        ("tile", False, "M=3 is below 8 (its tile)"),
        ("fast", True, "rule: priority 2"),
        ("reference", False, "applies"),
    ]
    assert decision.reason == "rule: priority 2"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"routes": {"scale": "fast"}}, "argument"),
        ({"environment": {"scale": "fast"}}, "HALMA_ROUTE"),
        ({"measured": lambda call: "fast"}, "measured table"),
        ({}, "rule: priority 0"),
    ],
)
def test_a_decision_says_which_rule_decided(options: dict[str, Any], reason: str) -> None:
    ops = Ops(Workspace(), ops=table_with(route("fast")), **options)
    assert ops.explain("scale", torch.ones(3)).reason == reason


def test_explain_runs_and_records_nothing() -> None:
    decisions.clear()
    table = table_with(RouteSpec("scale", "trap", lambda: pytest.fail("was built"), opaque=True))
    assert Ops(Workspace(), ops=table).explain("scale", torch.ones(3)).chosen == "trap"
    assert not decisions.all()
