"""``halma verify``: a golden case beside our own run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halma.cli.output import emit_json, print_table
from halma.cli.team import Team, assembled
from halma.hal.errors import RequestError

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.golden import CaseReport


def verify(
    cases: Annotated[list[Path], typer.Argument(help="Golden cases, .safetensors files.")],
    model: Annotated[str, typer.Option(help="The tiny checkpoint of cases that bring no weights.")] = "tiny-v4",
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    graph: Annotated[str, typer.Option(help="on: capture and replay; off: eager, and compare traces too.")] = "on",
    tokens_per_step: Annotated[int, typer.Option(help="Tokens a request and step after the prompt.")] = 1,
    tp: Annotated[
        int, typer.Option(help="Ranks that share the model: torchrun --nproc-per-node N -m halma verify --tp N ...")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run golden cases and compare by each one's own tolerance; exit 1 beyond it. Of ranks, each compares all."""
    if graph not in ("on", "off"):
        raise RequestError("--graph takes on or off", asked=f"--graph {graph}", do="--graph on, or --graph off")
    if tokens_per_step < 1:
        raise RequestError("a step needs a token", asked=f"--tokens-per-step {tokens_per_step}", do="1 or more")
    with assembled(tp, "verify") as team:
        chosen = team.together("the backend", lambda: team.backend(backend))
        reports = _reports(team, chosen, cases, model, graph == "on", tokens_per_step)
        beyond = team.ranks.exchange("the verdicts", [report.case for report in reports if not report.passed])
    if team.speaks:
        _show(chosen, reports, beyond, json=json)
    if any(beyond):
        raise typer.Exit(1)


def _reports(
    team: Team, backend: Backend, cases: Sequence[Path], model: str, graph: bool, tokens_per_step: int
) -> list[CaseReport]:
    """One a case, on every rank. What ranks cannot run is refused before the first."""
    from halma.models.deepseek_v4.golden import alone
    from halma.models.deepseek_v4.golden import verify as verify_case
    from halma.models.deepseek_v4.golden_models import check_case, loader_for

    def run(path: Path) -> CaseReport:
        load = loader_for(path, model, backend, rank=team.rank, world=team.size)
        divide = alone if team.size == 1 else lambda *given: team.divided(backend, *given)
        return verify_case(path, load, backend, graph=graph, tokens_per_step=tokens_per_step, divide=divide)

    if team.size > 1:
        team.together("the cases", lambda: [check_case(path, model, team.size) for path in cases])
    return [team.together(f"case {path}", lambda path=path: run(path)) for path in cases]


def _show(backend: Backend, reports: Sequence[CaseReport], beyond: Sequence[Sequence[str]], *, json: bool) -> None:
    """Rank 0's comparison; and which ranks did not hold, which need not be rank 0."""
    ranks = [{"rank": rank, "failed": list(names)} for rank, names in enumerate(beyond)]
    if json:
        emit_json(
            {
                "schema": "halma.verify/1",
                "backend": backend.name,
                "evidence": backend.evidence,
                "passed": not any(beyond),
                "ranks": ranks,
                "cases": [_document(report) for report in reports],
            }
        )
        return
    for report in reports:
        title = f"{report.case}  {report.arithmetic}, graph {'on' if report.graph else 'off'}, {backend.evidence}"
        rows = [
            (
                check.name,
                f"{check.value:.3g}",
                f"{'>=' if check.at_least else '<='} {check.limit:g}",
                "pass" if check.passed else "FAIL",
                check.detail,
            )
            for check in report.checks
        ]
        print_table(("check", "found", "limit", "", ""), rows, title=title)
    if len(beyond) > 1:
        shown = [(f"rank {one['rank']}", ", ".join(one["failed"]) or "pass") for one in ranks]
        print_table(("", "beyond its tolerance"), shown, title="every rank compared all of it")


def _document(report: CaseReport) -> dict[str, object]:
    return {
        "case": report.case,
        "arithmetic": report.arithmetic,
        "graph": report.graph,
        "tokens_per_step": report.tokens_per_step,
        "passed": report.passed,
        "checks": [
            {
                "name": check.name,
                "value": check.value,
                "limit": check.limit,
                "passed": check.passed,
                "detail": check.detail,
            }
            for check in report.checks
        ],
    }
