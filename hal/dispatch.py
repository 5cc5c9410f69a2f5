"""Ops, their routes, and the choice between them.

An *op* is a name, a signature, a reference in plain PyTorch (its meaning) and a rule that gives the shape
of its outputs. A *route* is one implementation of an op: it states what it needs, and answers with a reason
where that does not hold. :class:`Ops` binds the table to a backend and a workspace; a program calls
``ops.rms_norm(x, weight, eps)`` and gets an output that lies in the workspace.

The choice is made once per (op, shapes, dtypes, formats) and kept. Order of precedence, written once:

1. an explicit argument (``Ops(..., routes={"rms_norm": "triton"})``);
2. the setting ``HALMA_ROUTE`` (``rms_norm=triton,attend=reference``);
3. the backend's measured table;
4. rule: applicable routes by falling priority, the reference last.

A route asked for by 1 or 2 that does not apply is an error, never a silent fall to another. A stranger's
route is chosen by 3 or 4 only once it is admitted (:mod:`halma.hal.testing.admission`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch

from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.device_value import DeviceValue
from halma.hal.errors import DispatchError
from halma.hal.graph.current import (
    current_recorder,
    note_failure,
    note_launch,
    open_captures,
    refuse_other_thread,
)
from halma.hal.op_table import OpSpec, OpTable, OutRule, Spec, like, op, table
from halma.hal.routes import OWN, REFERENCE, Call, Launcher, Requirement, RouteSpec
from halma.hal.workspace import Workspace

__all__ = [
    "REFERENCE",
    "Call",
    "Launcher",
    "MeasuredTable",
    "OpSpec",
    "OpTable",
    "Ops",
    "OutRule",
    "Requirement",
    "RouteSpec",
    "Spec",
    "bind",
    "like",
    "op",
    "table",
    "tensors_of",
]

Out = torch.Tensor | tuple[torch.Tensor, ...] | None

MeasuredTable = Callable[[Call], str | None]
"""A backend's measured choice for a call, or None."""

Admission = Callable[[RouteSpec], str | None]
"""Why a stranger's route may not be chosen by default, or None where it may."""


def _no_measurements(_: Call) -> str | None:
    return None


class Ops:
    """The op table bound to a backend's name and a workspace: what a program calls.

    ``ops.NAME(*args)`` opens the workspace scope NAME, runs the route and returns the output(s), which lie
    in the scope of the caller. ``out=`` gives the destination instead. Not thread-safe, like the workspace.

    Args:
        workspace: where outputs and scratch are taken.
        backend: name of the backend, for the routes' requirements.
        routes: explicit choices, op name to route name.
        environment: choices of the setting ``HALMA_ROUTE``.
        measured: the backend's table.
        ops: the op table.
        admission: asked before a stranger's route is chosen by default; default: what the table says.
        facts: what is known of the model, its execution and the device, for guards (:mod:`halma.hal.policy`).

    Raises:
        DispatchError: a choice names an op that does not exist.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        backend: str = "cpu",
        routes: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        measured: MeasuredTable = _no_measurements,
        ops: OpTable = table,
        admission: Admission | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.workspace = workspace
        self.backend = backend
        self._table = ops
        self._explicit = dict(routes or {})
        self._environment = dict(environment or {})
        self._measured = measured
        self._facts = dict(facts or {})
        self._admission = admission or ops.why_not_admitted
        for name in (*self._explicit, *self._environment):
            ops.get(name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        bound = _BoundOp(self, self._table.get(name)).__call__
        self.__dict__[name] = bound  # later look-ups never come here
        return bound

    def explain(self, name: str, *args: Any, **kwargs: Any) -> Decision:
        """The decision for a call, without running it."""
        return self._decide(self._table.get(name), args, kwargs)[1]

    def _decide(
        self, spec: OpSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[RouteSpec | None, Decision]:
        bound = spec.signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        call = Call(spec.name, bound.arguments, self.backend, self._facts)
        verdicts = self._verdicts(spec, call)
        chosen, why, notes = self._preferred(spec, call, verdicts)
        candidates = [
            Candidate(name, name == chosen, why if name == chosen else notes.get(name) or reason or "applies")
            for name, (_, reason) in verdicts.items()
        ]
        candidates.append(Candidate(REFERENCE, chosen == REFERENCE, why if chosen == REFERENCE else "applies"))
        decision = Decision("op", spec.name, chosen, tuple(candidates), asked=_describe(call))
        return verdicts[chosen][0] if chosen != REFERENCE else None, decision

    def _verdicts(self, spec: OpSpec, call: Call) -> dict[str, tuple[RouteSpec, str | None]]:
        """Every route by name with its refusal; of two backends' routes of one name, the one for this backend."""
        verdicts: dict[str, tuple[RouteSpec, str | None]] = {}
        for route in spec.routes:
            known = verdicts.get(route.name)
            if known is None or (known[0].backends and call.backend not in known[0].backends):
                verdicts[route.name] = (route, route.refusal(call))
        return verdicts

    def _preferred(
        self, spec: OpSpec, call: Call, verdicts: Mapping[str, tuple[RouteSpec, str | None]]
    ) -> tuple[str, str, dict[str, str]]:
        for source, choice in (
            ("argument", self._explicit.get(spec.name)),
            ("HALMA_ROUTE", self._environment.get(spec.name)),
        ):
            if choice is not None:
                _check_override(source, choice, call, verdicts)
                return choice, source, {}
        notes: dict[str, str] = {}
        measured = self._measured(call)
        if measured == REFERENCE:
            return REFERENCE, "measured table", notes
        by_rule = [(measured, "measured table")] if measured is not None and measured in verdicts else []
        by_rule += [(name, f"rule: priority {route.priority}") for name, (route, _) in verdicts.items()]
        for name, why in by_rule:
            route, reason = verdicts[name]
            if reason is None:
                reason = None if route.origin == OWN else self._admission(route)
                if reason is None:
                    return name, why, notes
                notes[name] = reason
        return REFERENCE, "rule: no other route applies", notes


def _check_override(source: str, choice: str, call: Call, verdicts: Mapping[str, tuple[RouteSpec, str | None]]) -> None:
    if choice == REFERENCE:
        return
    if choice not in verdicts:
        raise DispatchError(
            f"op {call.op!r} has no route {choice!r} (asked for by {source})",
            found="routes: " + ", ".join([*verdicts, REFERENCE]),
        )
    reason = verdicts[choice][1]
    if reason is not None:
        raise DispatchError(
            f"route {choice!r} of {call.op!r} does not apply (asked for by {source})",
            asked=_describe(call),
            found=reason,
            do="drop the override, or halma explain --op " + call.op,
        )


def _describe(call: Call) -> str:
    shown: list[str] = []
    for name, value in call.arguments.items():
        if isinstance(value, torch.Tensor):
            shown.append(f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif (key := getattr(value, "plan_key", None)) is not None:
            shown.append(f"{name}={key}")
        elif isinstance(value, (int, float, str, bool)):
            shown.append(f"{name}={value}")
    return f"{call.op}({', '.join(shown)})"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument: itself, or the fields of a record (a weight, a store, a table of weights)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in cast("tuple[Any, ...]", value) for tensor in tensors_of(part)]
    if is_dataclass(value):
        return [tensor for part in fields(value) for tensor in tensors_of(getattr(value, part.name))]
    return []


@dataclass(frozen=True)
class _Plan:
    run: Callable[..., Any]
    outputs: tuple[Spec, ...]
    opaque: bool
    label: str


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


class _BoundOp:
    """One op of one :class:`Ops`: the plan cache and the call."""

    def __init__(self, ops: Ops, spec: OpSpec) -> None:
        self._ops = ops
        self._spec = spec
        self._workspace = ops.workspace
        self._plans: dict[Any, _Plan] = {}

    def __call__(self, *args: Any, out: Out = None, **kwargs: Any) -> Any:
        try:
            if open_captures:
                refuse_other_thread(f"op {self._spec.name!r}")
            key: list[Any] = []
            for position, value in enumerate(args):
                kind = value.__class__
                if kind is torch.Tensor:
                    key += (value.shape, value.dtype)
                elif kind in _PLAIN:
                    key.append(value)
                elif kind is DeviceValue:
                    args = (*args[:position], _unwrap(value), *args[position + 1 :])
                    key += (args[position].shape, args[position].dtype)
                else:
                    key.append(self._key_of(value))
            for name, value in kwargs.items():
                if type(value) is DeviceValue:
                    kwargs[name] = value = _unwrap(value)
                key += (name, self._key_of(value))
            plan = self._plans.get(plan_key := tuple(key))
            if plan is None:
                plan = self._plans[plan_key] = self._plan(args, kwargs)
            workspace = self._workspace
            outputs = plan.outputs
            if out is not None:
                self._check_out(plan, out)
                kwargs["out"] = out
            elif len(outputs) == 1:
                spec = outputs[0]
                out = kwargs["out"] = workspace.take(spec.shape, spec.dtype)
            elif outputs:
                out = kwargs["out"] = tuple([workspace.take(spec.shape, spec.dtype) for spec in outputs])
            node = workspace.enter(self._spec.name)
            workspace.in_op += 1
            try:
                if plan.opaque:
                    self._launch(plan, args, kwargs)
                else:
                    plan.run(*args, ws=workspace, **kwargs)
            finally:
                workspace.leave(node)
                workspace.in_op -= 1
        except BaseException as error:
            note_failure(error)
            raise
        return out

    def _key_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (value.shape, value.dtype)
        key = getattr(value, "plan_key", None)  # weights and stores: their format and shape, not their identity
        if key is not None:
            return key
        try:
            hash(value)
        except TypeError:
            raise DispatchError(
                f"an argument of {self._spec.name!r} cannot be part of a plan's key",
                found=f"{type(value).__name__} is neither a tensor, a plain value nor a record with a plan_key",
                do="pass a tuple, or give the record a plan_key",
            ) from None
        return value

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Plan:
        spec = self._spec
        route, decision = self._ops._decide(spec, args, kwargs)  # pyright: ignore[reportPrivateUsage]
        outputs = () if spec.out is None else spec.out(*args, **kwargs)
        run = spec.reference if route is None else route.factory()
        decisions.record(decision)
        return _Plan(
            run,
            outputs if isinstance(outputs, tuple) else (outputs,),
            route is not None and route.opaque,
            f"{spec.name}:{decision.chosen}",
        )

    def _launch(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        launch = plan.run(*args, ws=self._workspace, **kwargs)
        recorder = current_recorder()
        if recorder is None:
            note_launch()
            launch()
            return
        # The recorder keeps the launch and with it every tensor that its closure reads or writes. An op
        # without outputs works in place, on which of its arguments it does not say: all count as written.
        out: Out = kwargs.get("out")
        reads = [tensor for name, v in (*enumerate(args), *kwargs.items()) if name != "out" for tensor in tensors_of(v)]
        writes = reads if out is None else list(out) if isinstance(out, tuple) else [out]
        named = zip(self._spec.signature.parameters, args, strict=False)
        baked = [(name, value) for name, value in (*named, *kwargs.items()) if value.__class__ in _PLAIN]
        recorder.record_node(plan.label, launch, reads=reads, writes=writes, parameters=baked)

    def _check_out(self, plan: _Plan, out: Out) -> None:
        given = out if isinstance(out, tuple) else (out,)
        found = [like(tensor) for tensor in given if tensor is not None]
        if found != list(plan.outputs):
            raise DispatchError(
                f"out of {self._spec.name!r} does not fit",
                asked=_listed(plan.outputs) or "nothing: it works in place on its arguments",
                found=_listed(found),
            )


def _unwrap(value: DeviceValue) -> torch.Tensor:
    return value._tensor  # pyright: ignore[reportPrivateUsage]


def _listed(specs: Sequence[Spec]) -> list[str]:
    return [f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs]


def bind(workspace: Workspace, **kwargs: Any) -> Ops:
    """Shorthand for :class:`Ops`, reads well in tests: ``ops = bind(Workspace())``."""
    return Ops(workspace, **kwargs)
