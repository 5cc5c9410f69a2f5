"""Ops, routes, the order of precedence, and what is recorded of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halma.hal.device_value import DeviceValue
from halma.hal.dispatch import Call, Ops, OpTable, RouteSpec, like
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace
from tests.cpu.hal.scaling import Record, adding, result, route, table_with


def test_an_op_without_routes_runs_its_reference() -> None:
    assert result(table_with()) == 2.0


def test_the_larger_priority_is_tried_first() -> None:
    table = table_with(route("low", 10, priority=1), route("high", 20, priority=2))
    assert result(table) == 21.0


def test_precedence_is_argument_then_environment_then_measured_then_rule() -> None:
    table = table_with(*(route(name, i * 10.0, priority=i) for i, name in enumerate(("a", "b", "c", "d"), 1)))
    everything: dict[str, Any] = {
        "routes": {"scale": "a"},
        "environment": {"scale": "b"},
        "measured": lambda call: "c",
    }
    assert result(table, **everything) == 11.0
    del everything["routes"]
    assert result(table, **everything) == 21.0
    del everything["environment"]
    assert result(table, **everything) == 31.0
    del everything["measured"]
    assert result(table, **everything) == 41.0


@pytest.mark.parametrize("source", ["routes", "environment"])
def test_the_reference_can_be_asked_for(source: str) -> None:
    assert result(table_with(route("fast", priority=5)), **{source: {"scale": "reference"}}) == 2.0


@pytest.mark.parametrize(("source", "said"), [("routes", "argument"), ("environment", "HALMA_ROUTE")])
def test_a_refused_explicit_route_is_an_error_with_the_reason(source: str, said: str) -> None:
    table = table_with(route("tile", needs=(lambda call: f"M={call['x'].shape[0]} is below 8 (its tile)",)))
    with pytest.raises(DispatchError) as caught:
        result(table, **{source: {"scale": "tile"}})
    assert "M=3 is below 8" in str(caught.value)
    assert said in caught.value.what
    assert "scale(x=float32[3], factor=2.0)" in caught.value.asked[0]


def test_an_unknown_explicit_route_lists_those_there_are() -> None:
    with pytest.raises(DispatchError, match="routes: fast, reference"):
        result(table_with(route("fast")), routes={"scale": "fsat"})


def test_an_override_for_an_unknown_op_is_refused_at_once() -> None:
    with pytest.raises(DispatchError, match="no op is called 'scael'"):
        Ops(Workspace(), ops=table_with(), routes={"scael": "reference"})


def test_a_measured_route_that_does_not_apply_leaves_the_choice_to_the_rule() -> None:
    table = table_with(route("no", 10, needs=(lambda call: "never",)), route("yes", 20))
    assert result(table, measured=lambda call: "no") == 21.0


def test_a_route_for_another_backend_does_not_apply() -> None:
    table = table_with(route("fast", backends=("other",), priority=9))
    assert result(table, backend="cpu") == 2.0
    assert result(table, backend="other") == 11.0


@pytest.mark.parametrize("first", [0, 1])
def test_two_backends_may_use_one_name_and_each_gets_its_own(first: int) -> None:
    pair = [route("fast", 10, backends=("one",)), route("fast", 20, backends=("two",))]
    table = table_with(pair[first], pair[1 - first])
    assert result(table, backend="one", routes={"scale": "fast"}) == 11.0
    assert result(table, backend="two", routes={"scale": "fast"}) == 21.0


@pytest.mark.parametrize(
    ("mine", "theirs"), [((), ()), (("one",), ()), ((), ("one",)), (("one", "two"), ("two", "three"))]
)
def test_two_routes_of_one_name_are_refused_naming_both_origins(mine: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    with pytest.raises(DispatchError) as caught:
        table_with(route("fast", 1, backends=mine, origin="acme"), route("fast", 2, backends=theirs, origin="zenith"))
    assert "acme" in str(caught.value) and "zenith" in str(caught.value)


@pytest.mark.invariant("B7")
def test_registering_twice_changes_nothing() -> None:
    def register(table: OpTable) -> None:
        table.add_route(RouteSpec("scale", "fast", lambda: adding(10)(), needs=(lambda call: None,)))

    table = table_with()
    register(table)
    register(table)
    assert len(table.get("scale").routes) == 1


@pytest.mark.invariant("B7", control=True)
def test_registering_two_names_keeps_both() -> None:
    assert len(table_with(route("one"), route("two")).get("scale").routes) == 2


def test_a_route_may_come_before_its_op() -> None:
    table = OpTable()
    table.add_route(route("early", 10))
    assert [r.name for r in table.unclaimed()] == ["early"]

    @table.define("scale", out=lambda x: like(x))
    def scale(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.mul(x, 2.0, out=out)

    assert result(table) == 11.0
    assert not table.unclaimed()


def test_no_route_may_be_called_reference() -> None:
    with pytest.raises(DispatchError, match="may not be called 'reference'"):
        table_with(route("reference"))


def test_two_ops_of_one_name_are_refused() -> None:
    with pytest.raises(DispatchError, match="two ops are called 'bump'"):
        table_with().define("bump", out=None)(lambda x, *, ws: None)


def test_a_reference_without_out_is_refused() -> None:
    with pytest.raises(DispatchError, match="must take 'out'"):
        OpTable().define("broken", out=lambda x: like(x))(lambda x, *, ws: None)


# -- strangers' routes ----------------------------------------------------------------------------------


def test_a_strangers_route_is_not_chosen_by_default_until_it_is_admitted() -> None:
    stranger = route("theirs", 10, origin="acme", priority=9)
    table = table_with(stranger)
    decision = Ops(Workspace(), ops=table).explain("scale", torch.ones(3))
    assert decision.chosen == "reference"
    assert "acme" in decision.candidates[0].reason and "admission" in decision.candidates[0].reason
    assert result(table, measured=lambda call: "theirs") == 2.0
    table.admit(stranger)
    assert result(table) == 11.0


def test_a_strangers_route_may_be_asked_for_by_name() -> None:
    assert result(table_with(route("theirs", 10, origin="acme")), routes={"scale": "theirs"}) == 11.0


def test_an_admission_of_ones_own_decides() -> None:
    table = table_with(route("theirs", 10, origin="acme"))
    assert result(table, admission=lambda r: None) == 11.0
    assert result(table, admission=lambda r: "failed poison") == 2.0


# -- plans and outputs ----------------------------------------------------------------------------------


def counted_table() -> tuple[OpTable, list[Call]]:
    asked: list[Call] = []

    def need(call: Call) -> str | None:
        asked.append(call)
        return None

    return table_with(route("fast", needs=(need,))), asked


def test_a_plan_is_made_once_per_shape_dtype_and_value() -> None:
    table, asked = counted_table()
    ops = Ops(Workspace(), ops=table)
    for _ in range(3):
        ops.scale(torch.ones(3))
        ops.scale(torch.zeros(3))
    assert len(asked) == 1
    ops.scale(torch.ones(4))
    ops.scale(torch.ones(3, dtype=torch.float64))
    ops.scale(torch.ones(3), 3.0)
    ops.scale(torch.ones(3), factor=3.0)
    assert len(asked) == 5


def test_a_requirement_sees_defaults() -> None:
    table, asked = counted_table()
    Ops(Workspace(), ops=table).scale(torch.ones(3))
    assert asked[0]["factor"] == 2.0


def test_records_are_keyed_by_their_plan_key_and_not_by_identity() -> None:
    table, asked = counted_table()

    @table.define("weigh", out=lambda x, w: like(x))
    def weigh(x: torch.Tensor, w: Record, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.mul(x, w.data, out=out)

    seen: list[str] = []
    table.add_route(RouteSpec("weigh", "other", lambda: weigh.reference, needs=(lambda c: seen.append(c.op),)))
    ops = Ops(Workspace(), ops=table)
    x = torch.ones(2)
    assert float(ops.weigh(x, Record(torch.tensor(2.0)))[0]) == 2.0
    assert float(ops.weigh(x, Record(torch.tensor(5.0)))[0]) == 5.0
    assert len(seen) == 1
    ops.weigh(x, Record(torch.tensor(5.0), plan_key="other"))
    assert len(seen) == 2 and not asked


def test_an_argument_without_a_key_is_refused() -> None:
    with pytest.raises(DispatchError, match="cannot be part of a plan's key"):
        Ops(Workspace(), ops=table_with()).scale(torch.ones(1), [1.0])


def test_device_values_are_unwrapped_in_both_positions() -> None:
    ops = Ops(Workspace(), ops=table_with())
    value = DeviceValue(torch.tensor([1, 2]), bound=3)
    assert ops.scale(value, 3).tolist() == [3, 6]
    assert ops.scale(x=value, factor=3).tolist() == [3, 6]


def test_out_is_written_and_returned() -> None:
    ops = Ops(Workspace(), ops=table_with())
    mine = torch.empty(3)
    assert ops.scale(torch.ones(3), out=mine) is mine
    assert mine.tolist() == [2, 2, 2]
    pair = (torch.empty(2), torch.empty(1, dtype=torch.int64))
    assert ops.split(torch.ones(2), out=pair) is pair
    assert pair[1].item() == 2


@pytest.mark.parametrize(
    "wrong", [torch.empty(4), torch.empty(3, dtype=torch.float64), (torch.empty(3), torch.empty(3))]
)
def test_an_out_that_does_not_fit_is_refused(wrong: Any) -> None:
    with pytest.raises(DispatchError, match="out of 'scale' does not fit") as caught:
        Ops(Workspace(), ops=table_with()).scale(torch.ones(3), out=wrong)
    assert caught.value.asked == ("float32[3]",)


def test_an_out_for_an_op_that_has_none_is_refused() -> None:
    with pytest.raises(DispatchError, match="works in place"):
        Ops(Workspace(), ops=table_with()).bump(torch.ones(3), out=torch.empty(3))


def test_an_op_in_place_returns_nothing() -> None:
    x = torch.zeros(2)
    assert Ops(Workspace(), ops=table_with()).bump(x) is None
    assert x.tolist() == [1, 1]


def test_outputs_lie_in_the_callers_scope_and_scratch_in_the_ops() -> None:
    workspace = Workspace(checked=True)
    ops = Ops(workspace, ops=table_with())
    with workspace.scope("caller"):
        y = ops.scale(torch.ones(3))
        assert workspace.path() == "main/caller"
        assert y.tolist() == [2, 2, 2]  # leaving the op's scope poisoned its scratch, not this
    assert torch.isnan(y).all()


def test_a_route_that_raises_leaves_the_workspace_where_it_was() -> None:
    def broken(x: torch.Tensor, factor: float = 2.0, *, out: torch.Tensor, ws: Workspace) -> None:
        ws.enter("deep")
        raise RuntimeError("kernel")

    workspace = Workspace()
    table = table_with(RouteSpec("scale", "broken", lambda: broken))
    with pytest.raises(RuntimeError, match="kernel"):
        Ops(workspace, ops=table).scale(torch.ones(1))
    assert workspace.path() == "main"
