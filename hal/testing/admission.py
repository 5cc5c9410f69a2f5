"""The admission suite: what a route must show before it is chosen by default.

``admit(op, route, backend)`` runs the route on the op's example calls beside the reference. A stranger's
route that fails keeps its name for those who ask for it explicitly; the rule passes it over with the reason
found here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halma.hal.backend import Backend
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.dispatch import Call, OpSpec, OpTable, RouteSpec, table
from halma.hal.errors import DispatchError
from halma.hal.graph.current import one_time_work
from halma.hal.routes import REFERENCE
from halma.hal.testing.examples import OpExample, examples_of
from halma.hal.testing.trial import CHECKS, Failed, Trial


@dataclass(frozen=True)
class AdmissionCheck:
    """One check over all examples: ``passed``, or the first reason why not. ``runs`` counts what was compared."""

    name: str
    passed: bool
    reason: str
    runs: int


@dataclass(frozen=True)
class AdmissionReport:
    """What the suite found for one route on one backend.

    Args:
        refused: examples that the route does not apply to, with its reason; they count neither way.
    """

    op: str
    route: str
    backend: str
    origin: str
    checks: tuple[AdmissionCheck, ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def admitted(self) -> bool:
        """Whether it ran at all and every check that applies holds."""
        return any(check.runs for check in self.checks) and all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """Why it is not admitted, as one clause; empty where it is."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            return f"fails the check {failed[0].name!r}: {failed[0].reason}"
        if not self.admitted:
            return "applies to no example: " + "; ".join(f"{name}: {why}" for name, why in self.refused)
        return ""

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {**dataclasses.asdict(self), "admitted": self.admitted, "reason": self.reason}


def admit(
    op: str,
    route: str | RouteSpec,
    backend: Backend,
    *,
    examples: Sequence[OpExample] | None = None,
    ops: OpTable = table,
) -> AdmissionReport:
    """Try ``route`` of ``op`` on ``backend``; see :data:`halma.hal.testing.trial.CHECKS` for what is tried.

    Nothing is changed: neither the table nor which route is chosen. An exception in the route is a failed
    check. Takes from a tenth of a second to seconds, and allocates.

    Args:
        route: its name (``reference`` too), or a route that need not be registered.
        examples: instead of those registered for the op.

    Raises:
        DispatchError: no such op or route, or no examples.
    """
    spec = ops.get(op)
    chosen = _route_named(spec, route, backend.name) if isinstance(route, str) else route
    applicable: list[OpExample] = []
    refused: list[tuple[str, str]] = []
    for example in examples if examples is not None else examples_of(op):
        arguments = spec.signature.bind_partial(*example.build(0, example.rows[0]))
        arguments.apply_defaults()
        reason = chosen.refusal(Call(op, arguments.arguments, backend.name))
        if reason is None:
            applicable.append(example)
        else:
            refused.append((example.name, reason))
    trial = Trial(spec, chosen, backend)
    checks = tuple(_run(name, check, trial, applicable) for name, check in CHECKS.items() if trial.applies(name))
    return AdmissionReport(op, chosen.name, backend.name, chosen.origin, checks, tuple(refused))


def _run(
    name: str, check: Callable[[Trial, OpExample], int], trial: Trial, examples: Sequence[OpExample]
) -> AdmissionCheck:
    runs = 0
    for example in examples:
        try:
            runs += check(trial, example)
        except Failed as failure:
            return AdmissionCheck(name, False, f"{example.name}: {failure}", runs + 1)
        except Exception as error:  # whatever a stranger's code raises is a reason, not our defect
            return AdmissionCheck(name, False, f"{example.name}: {type(error).__name__}: {error}", runs + 1)
    if name == "poison" and examples and not runs:  # it applies to this op, so it must have been tried
        return AdmissionCheck(name, False, "no example that it applies to has padding to poison", 0)
    return AdmissionCheck(name, True, "", runs)


def _route_named(spec: OpSpec, name: str, backend: str) -> RouteSpec:
    if name == REFERENCE:  # tried against itself: its own promises, numerics apart
        return RouteSpec(spec.name, "plain", lambda: spec.reference)
    named = [route for route in spec.routes if route.name == name]
    fitting = [route for route in named if not route.backends or backend in route.backends]
    if not named:
        raise DispatchError(
            f"op {spec.name!r} has no route {name!r}",
            found="routes: " + (", ".join(route.name for route in spec.routes) or "only the reference"),
        )
    return (fitting or named)[0]


class Gate:
    """Admits strangers' routes when they would first be chosen: ``Ops(..., admission=Gate(backend))``.

    The verdict is kept for the life of the gate, told to the op table, and recorded as a decision.
    """

    def __init__(self, backend: Backend, *, ops: OpTable = table) -> None:
        self._backend = backend
        self._ops = ops
        self._verdicts: dict[tuple[str, str, str], str | None] = {}

    def __call__(self, route: RouteSpec) -> str | None:
        """Why ``route`` may not be chosen by default, or None where it may."""
        if self._ops.why_not_admitted(route) is None:
            return None
        key = (route.op, route.name, route.origin)
        if key not in self._verdicts:
            with one_time_work() as allowed:  # plans are made in dry runs, which record
                if not allowed:
                    return "cannot be tried for admission while a graph is captured"
                self._verdicts[key] = self._try(route)
        return self._verdicts[key]

    def _try(self, route: RouteSpec) -> str | None:
        try:
            report = admit(route.op, route, self._backend, ops=self._ops)
        except DispatchError as error:
            reason = error.what
        else:
            reason = report.reason
        if not reason:
            self._ops.admit(route)
        shown = Candidate(f"{route.name} of {route.origin}", not reason, reason or "passed every check")
        decisions.record(Decision("admission", route.op, "refused" if reason else "admitted", (shown,)))
        return reason or None
