"""``halma explain``: routes and reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from halma.cli.explain import decide, described, show_decisions
from halma.hal.decisions import Candidate, Decision
from halma.hal.dispatch import OpTable, RouteSpec, Spec
from halma.hal.errors import RequestError
from halma.hal.workspace import Workspace
from halma.ops.weight import Weight
from tests.cpu.cli.conftest import Halma


@pytest.fixture
def table() -> OpTable:
    table = OpTable()

    @table.define("scale", out=lambda x, factor, weight=None, flag=False: Spec(tuple(x.shape), x.dtype))
    def scale(
        x: torch.Tensor,
        factor: float,
        weight: Weight | None = None,
        flag: bool = False,
        *,
        out: torch.Tensor,
        ws: Workspace,
    ) -> None:
        torch.mul(x, factor, out=out)

    def wide(call: Any) -> str | None:
        return None if call["x"].shape[0] >= 8 else f"M={call['x'].shape[0]} is below 8 (its tile)"

    table.add_route(RouteSpec("scale", "tiled", lambda: scale.reference, needs=(wide,), priority=2))
    table.add_route(RouteSpec("scale", "elsewhere", lambda: scale.reference, backends=("other",), priority=1))
    return table


def test_shapes_become_arguments_without_memory(table: OpTable) -> None:
    arguments = described("scale", table, ["x=8x4096:bfloat16", "factor=1e-3", "flag=True"])
    assert (tuple(arguments["x"].shape), arguments["x"].dtype, arguments["x"].device.type) == (
        (8, 4096),
        torch.bfloat16,
        "meta",
    )
    assert (arguments["factor"], arguments["flag"]) == (0.001, True)
    assert described("scale", table, ["x=3", "factor=1", "weight=None"])["weight"] is None


@pytest.mark.parametrize(
    ("text", "key", "shape"),
    [
        ("64x96", "plain:float32", (64, 96)),
        ("64x96:bfloat16", "plain:bfloat16", (64, 96)),
        ("200x300:fp8_block128", "fp8_block128:float8_e4m3fn", (200, 300)),
        ("4x64x96:fp4_block32", "fp4_block32:int8", (4, 64, 96)),
    ],
)
def test_weights_are_written_with_their_format(table: OpTable, text: str, key: str, shape: tuple[int, ...]) -> None:
    weight = described("scale", table, ["x=1", "factor=1", f"weight={text}"])["weight"]
    assert weight.plan_key.startswith(key)
    assert weight.shape == shape


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (["y=3"], "--shape cannot be 'y=3'"),
        (["x"], "--shape cannot be 'x'"),
        (["x=3q", "factor=1"], "'3q' is no shape"),
        (["x=-3", "factor=1"], "negative"),
        (["x=3:float7", "factor=1"], "no dtype 'float7'"),
        (["x=3", "factor=fast"], "fast"),
        (["x=3", "factor=1", "flag=1"], "True or False"),
        (["x=3", "factor=1", "weight=64"], "two dimensions"),
        (["x=3"], "missing: factor"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_signature(table: OpTable, shapes: list[str], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        described("scale", table, shapes)
    assert reason in str(caught.value)
    assert "scale(x: torch.Tensor, factor: float" in str(caught.value)


@pytest.mark.parametrize(("rows", "chosen"), [(8, "tiled"), (1, "reference")])
def test_the_decision_is_the_one_that_a_program_makes(
    table: OpTable, rows: int, chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = decide(table, "cpu", "scale", described("scale", table, [f"x={rows}x4", "factor=2"]))
    assert decision.chosen == chosen
    show_decisions([(decision, 0)], backend="cpu", evidence="cpu")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"scale(x=float32[{rows}, 4], factor=2.0, flag=False) op on cpu"
    assert "elsewhere refused is for other, the backend is cpu" in lines
    if chosen == "reference":
        assert "tiled refused M=1 is below 8 (its tile)" in lines
    assert len(lines) == 4


def test_settings_are_in_effect(table: OpTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_ROUTE", "scale=reference")
    decision = decide(table, "cpu", "scale", described("scale", table, ["x=8x4", "factor=2"]))
    assert (decision.chosen, decision.reason) == ("reference", "HALMA_ROUTE")


def test_any_list_of_decisions_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    graph = Decision("graph", "T=1", "eager", (Candidate("eager", True, "capture is switched off"),))
    show_decisions([(graph, 3)], backend="cpu", evidence="cpu", missing=["pkg 1.0: no compiler"])
    out = capsys.readouterr().out
    assert "T=1  graph on cpu  (3 times)" in out
    assert "not looked at: pkg 1.0: no compiler" in out
    show_decisions([(graph, 3)], backend="other", evidence="simulated", json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["evidence"]) == ("halma.explain/1", "simulated")
    assert document["decisions"][0]["count"] == 3
    assert document["decisions"][0]["candidates"][0]["reason"] == "capture is switched off"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rows", "0"], "--rows 0"),
        (["--shape", "x=1"], "--op NAME as well"),
        ([], "no backend was named"),
        (["--backend", "cpi"], 'did you mean "cpu"?'),
    ],
)
def test_requests_that_make_no_sense(halma: Halma, arguments: list[str], reason: str) -> None:
    done = halma("explain", *arguments)
    assert done.code == 2
    assert reason in done.err


def test_our_ops_are_listed_and_explained_for_a_backend(halma: Halma) -> None:
    done = halma("explain", "--backend", "cpu")
    assert done.code == 0
    (listed,) = [" ".join(line.split()) for line in done.out.splitlines() if line.startswith("expert_ffn")]
    assert listed.startswith("expert_ffn ") and "rows (cpu)" in listed  # and what other backends have brought
    document = json.loads(halma("explain", "--backend", "cpu", "--op", "expert_ffn", "--rows", "2", "--json").out)
    assert document["backend"] == "cpu"
    assert {d["subject"] for d in document["decisions"]} == {"expert_ffn"}
    # Other tests of this process may have offered the CPU the kernels' routes too.
    assert {c["name"] for d in document["decisions"] for c in d["candidates"]} >= {"rows", "reference"}
    refused = halma("explain", "--backend", "cpu", "--op", "expert_fnn")
    assert (refused.code, refused.out) == (2, "")
