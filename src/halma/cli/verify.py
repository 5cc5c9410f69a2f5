"""``halma verify``: a golden case beside our own run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halma.cli.output import emit_json, print_table
from halma.hal.errors import RequestError


def verify(
    cases: Annotated[list[Path], typer.Argument(help="Golden cases, .safetensors files.")],
    model: Annotated[str, typer.Option(help="The tiny checkpoint of cases that bring no weights.")] = "tiny-v4",
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    graph: Annotated[str, typer.Option(help="on: capture and replay; off: eager, and compare traces too.")] = "on",
    tokens_per_step: Annotated[int, typer.Option(help="Tokens a request and step after the prompt.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run golden cases and compare by each one's own tolerance; exit 1 beyond it."""
    import halma
    from halma.models.deepseek_v4.golden import verify as verify_case
    from halma.models.deepseek_v4.golden_models import loader_for

    if graph not in ("on", "off"):
        raise RequestError("--graph takes on or off", asked=f"--graph {graph}", do="--graph on, or --graph off")
    if tokens_per_step < 1:
        raise RequestError("a step needs a token", asked=f"--tokens-per-step {tokens_per_step}", do="1 or more")
    chosen = halma.backend(backend)
    reports = [
        verify_case(path, loader_for(path, model, chosen), chosen, graph=graph == "on", tokens_per_step=tokens_per_step)
        for path in cases
    ]
    if json:
        emit_json(
            {
                "schema": "halma.verify/1",
                "backend": chosen.name,
                "evidence": chosen.evidence,
                "passed": all(report.passed for report in reports),
                "cases": [
                    {
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
                    for report in reports
                ],
            }
        )
    else:
        for report in reports:
            title = f"{report.case}  {report.arithmetic}, graph {'on' if report.graph else 'off'}, {chosen.evidence}"
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
    if not all(report.passed for report in reports):
        raise typer.Exit(1)
