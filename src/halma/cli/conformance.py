"""``halma conformance``: whether a backend keeps the rules of capture and memory, rule by rule."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from halma.cli.output import emit_json, print_table, progress_bar
from halma.cli.result import read_bench, refuse_unwritable, result_document, write_result
from halma.hal.errors import RequestError
from halma.hal.registry import default_registry
from halma.hal.testing.rules import Rule, written_tests
from halma.hal.testing.suite import RuleResult, SuiteResult, chosen_rules, run_suite


def conformance(
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule: G8. Repeat.")] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Run nothing; list the rules and the tests that hold them.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the result file that docs/musa_hardware.md asks for; wants all rules.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="An answer of halma bench decode --json to send along in the result file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run the suite that every backend must pass; exit 1 if a rule fails or nothing tests it."""
    rules = chosen_rules(rule or ())
    if show:
        _list(rules, json=json)
        return
    if (bench is not None) if output is None else bool(rule):
        raise RequestError(
            "a result file holds all rules, and a benchmark goes into a result file",
            asked=" ".join(("--bench without --output",) if output is None else ("--output with --rule",)),
            do=f"halma conformance --output {output or 'FILE'}",
        )
    name = default_registry().choose(backend)[0].name
    measured = None if bench is None else read_bench(bench, name, default_registry().spec(name).evidence)
    if output is not None:
        refuse_unwritable(output)
    with progress_bar(f"testing {name}", disable=json):
        result = run_suite(name, rules)
    if output is not None:
        write_result(result_document(result, measured), output)
    if json:
        emit_json({"schema": "halma.conformance/1", **result.as_json()})
    else:
        _print(result)
    if not result.ok:
        print(_explained(result), file=sys.stderr)
        raise typer.Exit(1)


def _print(result: SuiteResult) -> None:
    rows = [(one.rule.id, one.rule.title, _tests(one), _shown(one)) for one in result.rules]
    print_table(
        ("rule", "what it says", "tests", "result"), rows, title=f"{result.backend}, evidence {result.evidence}"
    )
    counted = Counter(one.verdict for one in result.rules)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counted.most_common()))


def _tests(one: RuleResult) -> str:
    if not one.tests and not one.controls:
        return "none"
    return f"{len(one.tests)} + {len(one.controls)} control: {', '.join(_files((*one.tests, *one.controls)))}"


def _files(tests: Iterable[str]) -> list[str]:
    return sorted({test.split("::")[0].removeprefix("test_").removesuffix(".py") for test in tests})


def _shown(one: RuleResult) -> str:
    verdict = one.verdict.upper() if not one.ok else one.verdict
    return f"{verdict}: {one.why}" if one.why else verdict


def _explained(result: SuiteResult) -> str:
    """What went wrong: pytest's own words where a test failed, else the rules without a test."""
    if result.broken or result.other_failures or any(one.failed for one in result.rules):
        return result.output.rstrip() + (f"\nhalma: {result.broken}" if result.broken else "")
    holes = [f"{one.rule.id} ({one.why})" for one in result.rules if not one.ok]
    return f"halma: not covered: {', '.join(holes)}" if holes else "halma: every test was skipped: nothing was shown"


def _list(rules: Sequence[Rule], *, json: bool) -> None:
    tests = written_tests()
    held = {
        one.id: ([t.id for t in tests if one.id in t.rules], [t.id for t in tests if one.id in t.controls])
        for one in rules
    }
    if json:
        listed = {
            one.id: {
                "title": one.title,
                "tests": held[one.id][0],
                "controls": held[one.id][1],
                "elsewhere": one.elsewhere or None,
            }
            for one in rules
        }
        emit_json({"schema": "halma.conformance/1", "rules": listed})
        return
    rows: list[tuple[str, str, str]] = []
    for one in rules:
        guards, controls = held[one.id]
        rows.append((one.id, one.title, ""))
        lines = [("test", name) for name in guards] + [("control", name) for name in controls]
        rows += [("", *line) for line in lines or [("none", one.elsewhere or "NOT COVERED")]]
    print_table(("rule", "", ""), rows)
