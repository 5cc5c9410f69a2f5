"""The admission suite finds every kind of bad route, and lets a good one in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from halma.hal.capabilities import Capabilities
from halma.hal.decisions import decisions
from halma.hal.dispatch import Ops, OpTable, RouteSpec, like
from halma.hal.errors import DispatchError
from halma.hal.graph.current import set_current_recorder
from halma.hal.testing.admission import AdmissionReport, Gate, admit
from halma.hal.testing.examples import OpExample, examples, examples_of
from halma.hal.workspace import Workspace


@dataclass
class Device:
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class Backend:
    """As much of a backend as the suite looks at."""

    name: str = "cpu"
    device: Device = field(default_factory=Device)
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(row_invariant=True))


BACKEND: Any = Backend()


def table() -> OpTable:
    table = OpTable()

    @table.define("soften", out=lambda x, bias, factor: like(x))
    def soften(x: torch.Tensor, bias: torch.Tensor, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.mul(x, factor, out=out)
        out.add_(bias)
        out.tanh_()

    @table.define("pick", out=lambda x: dataclasses.replace(like(x), shape=(x.shape[0],), dtype=torch.int64))
    def pick(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.argmax(x, 1, out=out)

    @table.define("keep", out=None)
    def keep(x: torch.Tensor, slot: torch.Tensor, store: torch.Tensor, *, ws: Workspace) -> None:
        store.index_copy_(0, slot, x)

    return table


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SOFTEN = OpExample("soften", "plain", lambda seed, n: (draw(seed, n, 11), draw(seed + 7, 11), 0.5), by_row=(0,))
TIES = OpExample("pick", "ties", lambda seed, n: (draw(seed, n, 9).round().clamp_(-1, 1),), by_row=(0,), scales=())


def _keep(seed: int, rows: int) -> tuple[Any, ...]:
    return draw(seed, rows, 4), torch.arange(rows) + 1, torch.zeros(12, 4)


def _pad_keep(arguments: tuple[Any, ...], real: int, payload: float) -> None:
    arguments[0][real:] = payload
    arguments[1][real:] = 0


KEEP = OpExample("keep", "slots", _keep, state=(2,), null_row=True, padding=_pad_keep)


def tried(
    implementation: Callable[..., Any], example: OpExample = SOFTEN, *, opaque: bool = False, backend: Any = BACKEND
) -> AdmissionReport:
    route = RouteSpec(example.op, "theirs", lambda: implementation, opaque=opaque, origin="acme")
    return admit(example.op, route, backend, examples=[example], ops=table())


def failing(report: AdmissionReport) -> set[str]:
    assert not report.admitted and report.reason
    return {check.name for check in report.checks if not check.passed}


def good(x: torch.Tensor, bias: torch.Tensor, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
    scratch = ws.take(tuple(x.shape), x.dtype)
    torch.add(bias, x, alpha=factor, out=scratch)
    torch.tanh(scratch, out=out)


def test_a_good_route_is_admitted_and_every_check_compared_something() -> None:
    report = tried(good)
    assert report.admitted and report.reason == "" and not report.refused
    assert {check.name: check.runs > 0 for check in report.checks} == {
        "numerics": True,
        "arguments kept": True,
        "out variant": True,
        "allocation": True,
        "padding": True,
        "determinism": True,
        "extreme values": True,
        "row invariance": True,
    }
    assert report.as_json()["admitted"] is True


def test_wrong_numbers() -> None:
    def wrong(x: Any, bias: Any, factor: float, *, out: Any, ws: Workspace) -> None:
        good(x, bias, factor * 1.001, out=out, ws=ws)

    report = tried(wrong)
    assert "numerics" in failing(report)
    assert "plain: result 0 is off by" in report.reason


def test_ties_broken_the_other_way() -> None:
    def last(x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
        torch.argmax(x.flip(1), 1, out=out)
        out.neg_().add_(x.shape[1] - 1)

    assert "numerics" in failing(tried(last, TIES))


def test_an_element_left_unwritten() -> None:
    def lazy(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        made = ws.take(tuple(x.shape), x.dtype)
        good(x, bias, factor, out=made, ws=ws)
        out[:, :-1].copy_(made[:, :-1])

    assert {"numerics", "out variant"} <= failing(tried(lazy))


def test_memory_beside_the_output_written() -> None:
    def sprawling(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        good(x, bias, factor, out=out, ws=ws)
        end = out.storage_offset() + out.numel()
        if out.untyped_storage().nbytes() // 4 > end:
            out.as_strided((1,), (1,), end).fill_(1.0)

    assert failing(tried(sprawling)) == {"out variant"}


def test_an_argument_written() -> None:
    def careless(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        good(x, bias, factor, out=out, ws=ws)
        x.zero_()

    assert failing(tried(careless)) == {"arguments kept"}


def test_an_allocation() -> None:
    def wasteful(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        good(x, bias, factor, out=out, ws=ws)
        out.copy_(out * 1.0)

    report = tried(wasteful)
    assert failing(report) == {"allocation"}
    assert "aten.mul" in report.reason


def test_growth_after_the_seal() -> None:
    calls: list[int] = []

    def growing(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        calls.append(1)
        ws.take((1000 * len(calls),), torch.float32)
        good(x, bias, factor, out=out, ws=ws)

    assert "allocation" in failing(tried(growing))


def test_padding_that_leaks_into_real_rows() -> None:
    def leaking(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        good(x, bias, factor, out=out, ws=ws)
        total = ws.take((1, x.shape[1]), x.dtype)
        torch.sum(x, 0, keepdim=True, out=total)
        out.add_(total.mul_(0.0))

    assert {"padding"} <= failing(tried(leaking))


def test_chance() -> None:
    state = torch.Generator().manual_seed(1)

    def restless(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        good(x, bias, factor, out=out, ws=ws)
        noise = ws.take(tuple(out.shape), out.dtype)
        noise.normal_(generator=state).mul_(1e-7)
        out.add_(noise)

    assert "determinism" in failing(tried(restless))


def test_an_overflow_that_the_reference_does_not_have() -> None:
    def naive(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
        a, b = ws.take(tuple(x.shape), x.dtype), ws.take(tuple(x.shape), x.dtype)
        torch.add(bias, x, alpha=factor, out=a)
        a.mul_(2).exp_()
        torch.add(a, 1.0, out=b)
        torch.sub(a, 1.0, out=out)
        out.div_(b)

    assert failing(tried(naive)) == {"extreme values"}


def uneven(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> None:
    good(x, bias, factor, out=out, ws=ws)
    if x.shape[0] > 4:
        out.mul_(1 + 1e-6)


def test_bits_that_depend_on_the_number_of_rows() -> None:
    assert failing(tried(uneven)) == {"row invariance"}


def test_row_invariance_is_asked_only_where_the_backend_claims_it() -> None:
    assert tried(uneven, backend=Backend(capabilities=Capabilities())).admitted


def test_an_exception_is_a_reason() -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("tile of 0")

    report = tried(broken)
    assert "numerics" in failing(report)
    assert "ZeroDivisionError: tile of 0" in report.reason


# -- opaque routes --------------------------------------------------------------------------------------


def launcher(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
    return lambda: torch.tanh(bias + x * factor, out=out)


def test_a_good_launch_is_admitted_and_may_use_what_memory_it_likes() -> None:
    report = tried(launcher, opaque=True)
    assert report.admitted
    assert "replay" in {check.name for check in report.checks}
    assert "allocation" not in {check.name for check in report.checks}


def test_a_launch_that_froze_its_input() -> None:
    def frozen(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
        result = torch.tanh(bias + x * factor)
        return lambda: out.copy_(result)

    assert failing(tried(frozen, opaque=True)) == {"replay"}


def test_a_launch_that_takes_scratch_of_its_own() -> None:
    def greedy(x: Any, bias: Any, factor: float, *, out: torch.Tensor, ws: Workspace) -> Callable[[], None]:
        return lambda: good(x, bias, factor, out=out, ws=ws)

    assert failing(tried(greedy, opaque=True)) == {"replay"}


# -- ops in place ---------------------------------------------------------------------------------------


def test_an_op_in_place_is_judged_by_its_state() -> None:
    def keeps(x: Any, slot: Any, store: torch.Tensor, *, ws: Workspace) -> None:
        store.index_copy_(0, slot, x)

    assert tried(keeps, KEEP).admitted


def test_padding_may_write_to_the_null_row_only() -> None:
    def spills(x: Any, slot: Any, store: torch.Tensor, *, ws: Workspace) -> None:
        store.index_copy_(0, slot, x)
        store[11].copy_(x[-1])

    assert {"numerics", "padding"} <= failing(tried(spills, KEEP))


# -- registry and gate ----------------------------------------------------------------------------------


def test_a_route_that_applies_to_nothing_is_not_admitted() -> None:
    route = RouteSpec("soften", "theirs", lambda: good, needs=(lambda call: f"factor={call['factor']}",))
    report = admit("soften", route, BACKEND, examples=[SOFTEN], ops=table())
    assert not report.admitted
    assert report.reason == "applies to no example: plain: factor=0.5"


def test_the_reference_passes_its_own_suite() -> None:
    for example in (SOFTEN, TIES, KEEP):
        report = admit(example.op, "reference", BACKEND, examples=[example], ops=table())
        assert report.admitted, report.reason


def test_unknown_routes_and_missing_examples_are_errors() -> None:
    with pytest.raises(DispatchError, match="has no route 'theirs'"):
        admit("soften", "theirs", BACKEND, examples=[SOFTEN], ops=table())
    with pytest.raises(DispatchError, match="has no example calls"):
        examples_of("nobody knows this op")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from halma.hal.testing import examples as module

    monkeypatch.setattr(module, "_makers", {})
    examples("soften")(lambda: [SOFTEN])


@pytest.mark.usefixtures("registered")
def test_the_gate_lets_a_good_strangers_route_be_chosen_by_default() -> None:
    ops_table = table()
    ops_table.add_route(RouteSpec("soften", "theirs", lambda: good, origin="acme", priority=1))
    gate = Gate(BACKEND, ops=ops_table)
    decisions.clear()
    x = draw(0, 3, 11)
    assert Ops(Workspace(), ops=ops_table).explain("soften", x, x[0], 0.5).chosen == "reference"
    assert Ops(Workspace(), ops=ops_table, admission=gate).explain("soften", x, x[0], 0.5).chosen == "theirs"
    assert Ops(Workspace(), ops=ops_table).explain("soften", x, x[0], 0.5).chosen == "theirs"
    [(decision, count)] = decisions.all("admission")
    assert (decision.subject, decision.chosen, count) == ("soften", "admitted", 1)


@pytest.mark.usefixtures("registered")
def test_the_gate_passes_a_bad_one_over_with_the_reason() -> None:
    ops_table = table()
    ops_table.add_route(RouteSpec("soften", "theirs", lambda: uneven, origin="acme", priority=1))
    ops = Ops(Workspace(), ops=ops_table, admission=Gate(BACKEND, ops=ops_table))
    x = draw(0, 3, 11)
    decision = ops.explain("soften", x, x[0], 0.5)
    assert decision.chosen == "reference"
    assert "fails the check 'row invariance'" in decision.candidates[0].reason


@pytest.mark.usefixtures("registered")
def test_the_gate_tries_nothing_while_a_graph_is_captured() -> None:
    gate = Gate(BACKEND, ops=table())
    route = RouteSpec("soften", "theirs", lambda: pytest.fail("was tried"), origin="acme")
    set_current_recorder(Any)  # type: ignore[arg-type]
    try:
        assert "captured" in str(gate(route))
    finally:
        set_current_recorder(None)
    assert gate(dataclasses.replace(route, factory=lambda: good)) is None


@pytest.mark.usefixtures("registered")
def test_the_gate_tries_in_a_dry_run_aside_of_the_recording() -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def aside() -> Generator[None]:
        entered.append(1)
        yield

    gate = Gate(BACKEND, ops=table())
    set_current_recorder(Any, aside=aside)  # type: ignore[arg-type]
    try:
        assert gate(RouteSpec("soften", "theirs", lambda: good, origin="acme")) is None
    finally:
        set_current_recorder(None)
    assert entered
