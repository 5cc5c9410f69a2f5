"""``halma explain``: which route an op takes, which it does not, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.mtp import drafts_of, with_mtp
from halma.cli.output import emit_json, note_simulated, print_table
from halma.hal.decisions import Decision
from halma.hal.errors import RequestError
from halma.hal.registry import default_registry
from halma.hal.settings import GraphSwitch, settings

if TYPE_CHECKING:
    import torch

    from halma.hal.dispatch import OpTable

WORDS = (
    "\nA higher priority goes first, the reference (plain PyTorch) last.\n"
    "chosen: runs; spare: applies too; refused: does not apply, for the reason given"
)
Counted = tuple[Decision, int]
"""A decision and how often it was made; 0 where it was only asked about."""


def explain(
    op: Annotated[str | None, typer.Option(help="An op; without it all ops and their routes are listed.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the op: x=8x4096:bfloat16, weight=64x4096:fp8_block128, eps=1e-6. Repeat."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Every choice that a decode and a prefill step of this model make.")
    ] = None,
    mtp: Annotated[
        str | None, typer.Option(help="With --model: its steps with so many drafts; auto shows how many are chosen.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Without --shape: example calls of the op at this many rows.")] = 1,
    backend: Annotated[str | None, typer.Option(help="For this backend, here or not; default: the chosen one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the routes of ops: the one chosen, and each other with its reason."""
    if rows < 1:
        raise RequestError("an example needs a row", asked=f"--rows {rows}", do="--rows 1 or more")
    if shape and op is None:
        raise RequestError("--shape describes arguments of an op", asked=" ".join(shape), do="--op NAME as well")
    if model is not None and (op is not None or shape):
        raise RequestError("--model and --op are two questions", do="ask one at a time")
    if mtp is not None and model is None:
        raise RequestError("--mtp is about a model's steps", asked=f"--mtp {mtp}", do="--model NAME as well")
    registry = default_registry()
    if model is not None:
        _explain_model(model, backend, mtp, json=json)
        return
    named = None if backend is None else registry.spec(backend)
    name = registry.choose()[0].name if named is None else named.name  # a stand-in is never chosen, only named
    if named is not None and named.simulated and not json:
        note_simulated(name)
    from halma.hal.dispatch import table
    from halma.ops import families as _families  # noqa: F401  (defines every op)

    missing = registry.load_routes(backend=name)
    if op is None:
        _list_ops(table, name, missing, evidence=registry.spec(name).evidence, json=json)
        return
    table.get(op)
    calls = [described(op, table, shape)] if shape else _examples(op, rows)
    counted = [(decide(table, name, op, call), 0) for call in calls]
    show_decisions(counted, backend=name, evidence=registry.spec(name).evidence, missing=missing, json=json)
    _print_words(json)


def _explain_model(model: str, backend: str | None, mtp: str | None, *, json: bool) -> None:
    """Plan the model's steps on the backend itself and show what was decided.

    Nothing runs, but where the number of drafts is chosen by what steps cost: those are captured and timed.
    """
    import halma
    from halma.hal.decisions import decisions
    from halma.models.deepseek_v4.engine_costs import measured_costs
    from halma.models.deepseek_v4.engine_drafts import AdaptiveDrafts
    from halma.models.deepseek_v4.load import default_arithmetic, load_v4, resolve_model
    from halma.models.deepseek_v4.runner import RunnerOptions

    drafts, chosen, source = drafts_of(mtp), halma.backend(backend), resolve_model(model)
    if chosen.evidence == "simulated" and not json:
        note_simulated(chosen.name)
    auto = drafts == "auto"
    options = RunnerOptions(
        max_context=512,
        graph=settings().graph,
        eager_roles=settings().graph_switch.roles_off,
        arithmetic=default_arithmetic(chosen, None),
        environment_routes=settings().routes,
    )
    loaded = load_v4(source, chosen, with_mtp(options, drafts, source.config, longest=1))
    decisions.clear()
    if not auto:
        loaded.runner.session.switch = GraphSwitch(False)  # the facts are a run's; its steps are planned, not captured
    loaded.runner.prepare()
    if auto:
        AdaptiveDrafts(measured_costs(loaded.runner)).choose(requests=1)
    shown = [one for kind in ("drafts", "memory", "op") for one in decisions.all(kind)]
    show_decisions(shown, backend=chosen.name, evidence=chosen.evidence, json=json)
    loaded.runner.close()
    _print_words(json)


def _print_words(json: bool) -> None:
    if not json:
        print(WORDS)


def show_decisions(
    decisions: Iterable[Counted], *, backend: str, evidence: str, missing: Sequence[str] = (), json: bool = False
) -> None:
    """Print decisions with all their candidates.

    Args:
        decisions: records of the layer with counts.
        backend: the backend they are for.
        evidence: how results of it are obtained; plain text says "simulated" beside itself.
        missing: reasons of plugins whose routes could not be looked at.
        json: as one object of the schema ``halma.explain/1``.
    """
    decisions = list(decisions)
    if json:
        records = [{**decision.as_json(), "count": count} for decision, count in decisions]
        head = {"schema": "halma.explain/1", "backend": backend, "evidence": evidence}
        emit_json({**head, "missing": list(missing), "decisions": records})
        return
    for position, (decision, count) in enumerate(decisions):
        times = f"  ({count} {'time' if count == 1 else 'times'})" if count else ""
        title = f"{decision.asked or decision.subject}  {decision.kind} on {backend}{times}"
        rows = [("  " + c.name, "chosen" if c.chosen else _verdict(c.reason), c.reason) for c in decision.candidates]
        print_table(("", "", ""), rows, title="\n" * bool(position) + title)
    _print_missing(missing)


def decide(table: OpTable, backend: str, op: str, arguments: Mapping[str, Any]) -> Decision:
    """The choice for a call of ``op`` on ``backend``, as a program would make it under the settings in effect."""
    from halma.hal.dispatch import Ops
    from halma.hal.workspace import Workspace

    ops = Ops(Workspace(), backend=backend, environment=settings().routes, ops=table)
    return ops.explain(op, **arguments)


def described(op: str, table: OpTable, shapes: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``op`` without memory behind them, from texts like ``x=8x4096:bfloat16`` and ``eps=1e-6``.

    Raises:
        RequestError: a text cannot be read, or an argument is unknown, missing, or not of a kind that can be written.
    """
    parameters = {
        name: parameter
        for name, parameter in table.get(op).signature.parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    usage = f"{op}(" + ", ".join(f"{name}: {p.annotation}" for name, p in parameters.items()) + ")"
    arguments: dict[str, Any] = {}
    for text in shapes:
        name, separator, value = text.partition("=")
        if not separator or name not in parameters:
            raise RequestError(f"--shape cannot be {text!r}", found=usage, do="--shape ARGUMENT=VALUE")
        try:
            arguments[name] = _argument(str(parameters[name].annotation), value)
        except ValueError as error:
            raise RequestError(f"--shape cannot be {text!r}", asked=usage, found=str(error)) from None
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise RequestError(
            f"op {op!r} takes more than that",
            asked=" ".join(shapes),
            found=f"missing: {', '.join(missing)} of {usage}",
            do="--shape for each, or none at all: then example calls are shown",
        )
    return arguments


def _argument(annotation: str, value: str) -> Any:
    kind = annotation.removesuffix(" | None")
    if kind != annotation and value == "None":
        return None
    if kind == "torch.Tensor":
        dims, dtype = _dims(value, "float32")
        return _meta(dims, _dtype(dtype))
    if kind == "Weight":
        return _weight(*_dims(value, "float32"))
    if kind == "torch.dtype":
        return _dtype(value)
    if kind == "bool":
        if value not in ("True", "False"):
            raise ValueError("True or False")
        return value == "True"
    plain: dict[str, type] = {"int": int, "float": float, "str": str}
    if kind not in plain:
        raise ValueError(f"a {annotation} cannot be written here; leave out --shape to see example calls")
    return plain[kind](value)


def _dims(text: str, default: str) -> tuple[tuple[int, ...], str]:
    dims, _, kind = text.partition(":")
    try:
        sizes = tuple(int(size) for size in dims.split("x"))
    except ValueError:
        raise ValueError(f"{dims!r} is no shape; write 8x4096, or 8x4096:bfloat16") from None
    if min(sizes) < 0:
        raise ValueError(f"{dims!r} has a negative size")
    return sizes, kind or default


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device="meta")


def _weight(shape: tuple[int, ...], kind: str) -> Any:
    import torch

    from halma.ops.weight import FP4_BLOCK, FP4_BLOCK32, FP8_BLOCK, FP8_BLOCK128, Weight

    if len(shape) < 2:
        raise ValueError("a weight has two dimensions, a stack of experts three")
    *stack, rows, columns = shape
    if kind == FP8_BLOCK128:
        scale = (*stack, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return Weight(_meta(shape, torch.float8_e4m3fn), _meta(scale, torch.float8_e8m0fnu), kind)
    if kind == FP4_BLOCK32:
        scale = (*stack, rows, columns // FP4_BLOCK)
        return Weight(_meta((*stack, rows, columns // 2), torch.int8), _meta(scale, torch.float8_e8m0fnu), kind)
    return Weight(_meta(shape, _dtype(kind)))


def _examples(op: str, rows: int) -> list[dict[str, Any]]:
    from halma.hal.dispatch import table
    from halma.hal.testing.examples import examples_of
    from halma.ops import examples as _ours  # noqa: F401  (offers examples of our ops)

    names = list(table.get(op).signature.parameters)
    return [dict(zip(names, example.build(0, rows), strict=False)) for example in examples_of(op)]


def _list_ops(table: OpTable, backend: str, missing: Sequence[str], *, evidence: str, json: bool) -> None:
    listed = [
        {
            "op": op.name,
            "routes": [
                {
                    "name": route.name,
                    "backends": list(route.backends),
                    "priority": route.priority,
                    "origin": route.origin,
                }
                for route in op.routes
            ],
        }
        for op in sorted(table.ops.values(), key=lambda op: op.name)
    ]
    unclaimed = [f"{route.name} of {route.op}, from {route.origin}" for route in table.unclaimed()]
    if json:
        head = {"schema": "halma.ops/1", "backend": backend, "evidence": evidence}
        emit_json({**head, "missing": list(missing), "unclaimed": unclaimed, "ops": listed})
        return
    rows = [
        (
            entry["op"],
            ", ".join(r["name"] + (f" ({'/'.join(r['backends'])})" if r["backends"] else "") for r in entry["routes"]),
        )
        for entry in listed
    ]
    print_table(("op", "routes besides the reference"), rows)
    for line in unclaimed:
        print(f"no such op: route {line}")
    _print_missing(missing)


def _verdict(reason: str) -> str:
    return "spare" if reason == "applies" else "refused"


def _print_missing(missing: Sequence[str]) -> None:
    for reason in missing:
        print(f"not looked at: {reason}")
