"""Guards on facts: exact, closed where something is not known, and naming the field."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halma.hal.dispatch import Ops, OpTable, RouteSpec, like
from halma.hal.policy import Guard, Headroom, OneOf, guarded, headroom_for
from halma.hal.workspace import Workspace

GUARD = Guard((("model.layers", 43), ("model.limit", 10.0), ("device.processors", OneOf((48, 56)))), "somebody")
RIGHT = {"model.layers": 43, "model.limit": 10.0, "device.processors": 56, "more": "is not looked at"}


@pytest.mark.invariant("B8", control=True)
def test_equal_facts_pass() -> None:
    assert GUARD.refusal(RIGHT) is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model.layers", 44, "model.layers is 44, it is for 43"),
        ("model.layers", 43.0, "model.layers is 43.0, it is for 43"),
        ("model.limit", 10, "model.limit is 10, it is for 10.0"),
        ("device.processors", 57, "device.processors is 57, it is for 48 or 56"),
        ("device.processors", "56", "device.processors is 56, it is for 48 or 56"),
    ],
)
def test_one_that_differs_is_named(name: str, value: object, reason: str) -> None:
    assert GUARD.refusal({**RIGHT, name: value}) == reason


@pytest.mark.invariant("B8")
@pytest.mark.parametrize("name", GUARD.names)
def test_one_that_is_not_known_refuses(name: str) -> None:
    known = {key: value for key, value in RIGHT.items() if key != name}
    assert (GUARD.refusal(known) or "").startswith(f"{name} is not known")


def test_a_boolean_is_no_number() -> None:
    assert Guard((("n", 1),)).refusal({"n": True}) == "n is True, it is for 1"


def test_two_guards_are_both_looked_at() -> None:
    both = Guard((("a", 1),), "first").and_also(Guard((("b", 2),), "second"))
    assert both.names == ("a", "b") and both.source == "first"
    assert both.refusal({"a": 1, "b": 3}) == "b is 3, it is for 2"


def test_a_route_is_chosen_by_the_facts_of_its_program() -> None:
    table = OpTable()

    @table.define("double", out=lambda x: like(x))
    def double(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.add(x, x, out=out)

    def tripled(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.mul(x, 3.0, out=out)

    for _ in range(2):
        table.add_route(RouteSpec("double", "guarded", lambda: tripled, needs=(guarded(GUARD),)))
    assert len(table.get("double").routes) == 1, "the same route once more changes nothing"

    def result(**facts: object) -> float:
        return float(Ops(Workspace(), ops=table, facts=facts).double(torch.ones(1)))

    assert (result(**RIGHT), result(**{**RIGHT, "model.layers": 1}), result()) == (3.0, 2.0, 2.0)
    refused = Ops(Workspace(), ops=table).explain("double", torch.ones(1)).candidates[0]
    assert refused.reason == "model.layers is not known, it is for 43"


def test_a_backend_that_says_nothing_of_headroom_wants_none() -> None:
    assert headroom_for(SimpleNamespace(), RIGHT, 7) == ()


@pytest.mark.invariant("B8")
def test_headroom_is_for_the_programs_of_its_guard() -> None:
    backend = SimpleNamespace(headroom=(Headroom("a", GUARD, lambda n: 10 * n), Headroom("b", Guard(()), lambda n: n)))
    kept = headroom_for(backend, RIGHT, 7)
    assert [(one.name, one.nbytes) for one in kept] == [("a", 70), ("b", 7)]
    assert [one.reason for one in kept] == ["70 bytes for steps of 7 tokens; somebody", "7 bytes for steps of 7 tokens"]
    other = headroom_for(backend, {**RIGHT, "model.layers": 1}, 7)
    assert (other[0].nbytes, other[0].reason) == (0, "model.layers is 1, it is for 43")
    assert [candidate.chosen for candidate in other[0].decision().candidates] == [False, True]
