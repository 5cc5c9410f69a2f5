"""The matrix as a workflow of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ci.schema import HOSTED, Row, of_tier

_HEAD = """\
# Written by `python -m ci.render` from ci/matrix.toml: edit that, not this.
name: ci
on:
  push: {branches: [main]}
  pull_request: {}
  schedule: [{cron: "17 3 * * *"}]
  workflow_dispatch: {inputs: {row: {description: "a manual row's id", required: true}}}
permissions: {contents: read}
concurrency: {group: "${{ github.workflow }}-${{ github.ref }}", cancel-in-progress: true}
jobs:
  lint:
    runs-on: ubuntu-24.04
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
      - run: make lint TORCH_INDEX=https://download.pytorch.org/whl/cpu
"""

_WHEN = {
    "pr": "github.event_name == 'push' || github.event_name == 'pull_request'",
    "nightly": "github.event_name == 'schedule'",
    "manual": "github.event_name == 'workflow_dispatch' && inputs.row == '{id}'",
}


def workflow(rows: Sequence[Row]) -> str:
    """The workflow's text. Every row is a job of its own, so its name says what it covers; a row without a
    runner is a job that never runs and says why, so that the hole shows."""
    parts = [_HEAD]
    parts.extend(_job(row) if row.runs else _declared(row) for row in rows)
    for tier in ("pr", "nightly"):  # a manual row is started alone, and judges itself
        running = [row for row in of_tier(rows, tier) if row.runs]
        if running:
            parts.append(_judging(tier, running))
    return "".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a YAML string


def python_of(row: Row) -> str:
    """The Python that runs the row; a session's Pythons are made by nox from 3.11."""
    return "3.11" if row.session else row.python[0]


def make_row(row: Row) -> str:
    """The command that runs a row on a machine that has nothing of ours yet."""
    words = ["make", "row", f"ROW={row.id}", f"PYTHON=python{python_of(row)}"]
    words += [f"TORCH='{row.torch}'"] if row.torch else []
    words += [f"EXTRAS={','.join(row.extras)}"] if row.extras else []
    words += [] if row.devices else ["TORCH_INDEX=https://download.pytorch.org/whl/cpu"]
    return " ".join(words)


def title(row: Row) -> str:
    """What it covers, so that a list of jobs says it."""
    torch = row.torch or "no torch"
    return f"{row.id} (backend {row.backend}, evidence {row.evidence}, Python {' '.join(row.python)}, {torch})"


def _runner(row: Row) -> str:
    return _quoted(row.runner) if row.runner == HOSTED else f"[self-hosted, {row.runner}]"


def _job(row: Row) -> str:
    pythons = "\n".join(f"            {version}" for version in dict.fromkeys((*row.python, python_of(row))))
    lines = [
        f"  {row.id}:",
        f"    name: {_quoted(title(row))}",
        f"    if: {_quoted(_WHEN[row.tier].format(id=row.id))}",
        f"    runs-on: {_runner(row)}",
        "    timeout-minutes: 60",
        *(["    continue-on-error: true"] if row.gate == "informational" else []),
        "    steps:",
        "      - uses: actions/checkout@v4",
        "      - uses: actions/setup-python@v5",
        "        with:",
        "          python-version: |",
        pythons,
        f"      - run: {make_row(row)}",
        "      - uses: actions/upload-artifact@v4",
        "        if: always()",
        f"        with: {{name: report-{row.id}, path: .halma/reports/, include-hidden-files: true}}",
    ]
    return "\n".join(lines) + "\n"


def _declared(row: Row) -> str:
    return (
        f"  {row.id}:\n"
        f"    name: {_quoted(f'{row.id}: declared, not run: {row.reason}')}\n"
        "    if: false\n"
        "    runs-on: ubuntu-24.04\n"
        "    steps: [{run: exit 1}]\n"
    )


def _judging(tier: str, rows: Sequence[Row]) -> str:
    return (
        f"  judge-{tier}:\n"
        f"    name: what the {tier} rows showed (T1 to T5)\n"
        f"    needs: [{', '.join(row.id for row in rows)}]\n"
        f"    if: {_quoted(f'always() && ({_WHEN[tier]})')}\n"
        "    runs-on: ubuntu-24.04\n"
        "    timeout-minutes: 5\n"
        "    steps:\n"
        "      - uses: actions/checkout@v4\n"
        "      - uses: actions/setup-python@v5\n"
        '        with: {python-version: "3.11"}\n'
        "      - uses: actions/download-artifact@v4\n"
        "        with: {path: reports, pattern: report-*, merge-multiple: true}\n"
        f"      - run: python -m ci.judge --tier {tier} reports/*.json\n"
    )
