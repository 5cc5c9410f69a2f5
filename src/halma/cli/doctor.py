"""``halma doctor``: a report of the environment that works where things are broken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from halma.cli import environment
from halma.cli.environment import guard
from halma.cli.output import emit_json, print_table
from halma.hal.errors import HalmaError
from halma.hal.settings import describe, refuse_unknown, settings


def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Report Python, torch, devices, backends, plugins and settings; what cannot be found out says why."""
    report = gather()
    if json:
        emit_json({"schema": "halma.doctor/1", **report})
        return
    for position, (section, answers) in enumerate(report.items()):
        if position:
            print()
        lines = environment.flatten(answers if isinstance(answers, dict) else {"": answers})
        print_table(("", ""), [(f"  {what}", answer) for what, answer in lines], title=section)


def gather() -> dict[str, Any]:
    """The report, section by section. Never raises."""
    with ThreadPoolExecutor(2) as pool:
        torch = pool.submit(guard, environment.torch_report)
        sections: dict[str, Callable[[], Any]] = {
            "python": environment.python_report,
            "machine": environment.machine_report,
            "packages": environment.packages_report,
            "tools": environment.tools_report,
            "variables": environment.variables_report,
            "settings": _settings,
            "plugins": _plugins,
            "backends": _backends,
        }
        report = {name: guard(question) for name, question in sections.items()}
        report["torch"] = torch.result()
    return report


def _settings() -> dict[str, Any]:
    rows: dict[str, Any] = {
        row.variable: f"{row.default} (default)" if row.value is None else row.value for row in describe()
    }
    for check in (settings, refuse_unknown):
        try:
            check()
        except HalmaError as error:
            rows.setdefault("wrong", []).append("; ".join((error.what, *error.found)))
    return rows


def _plugins() -> dict[str, Any]:
    from halma.hal.registry import default_registry

    return {
        f"{plugin.group}:{plugin.name}": {
            "from": f"{plugin.origin} ({plugin.value})",
            "hooks": ", ".join(hooks),
            "not loaded": reason,
        }
        for plugin, hooks, reason in default_registry().plugins()
    }


def _backends() -> dict[str, Any]:
    from halma.cli.backends import as_json
    from halma.hal.registry import default_registry

    report: dict[str, Any] = {}
    for status in default_registry().statuses():
        facts = as_json(status)
        facts["plugins"] = [f"{plugin.origin} ({plugin.value})" for plugin in status.plugins]
        report[status.name] = facts
        if status.usable:
            name = status.name
            facts["started"] = guard(lambda name=name: environment.backend_report(name))
    return report
