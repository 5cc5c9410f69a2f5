"""Write the GitHub workflow from the matrix: ``python -m ci.render``; ``--check`` fails if it is not up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.schema import ROOT, Row, load, of_tier

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"

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
    for tier in ("pr", "nightly"):
        running = [row for row in of_tier(rows, tier) if row.runs]
        if running:
            parts.append(_judging(tier, running))
    return "".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a YAML string


def _title(row: Row) -> str:
    torch = row.torch or "no torch"
    return f"{row.id} (backend {row.backend}, evidence {row.evidence}, Python {' '.join(row.python)}, {torch})"


def _job(row: Row) -> str:
    pythons = "\n".join(f"            {version}" for version in dict.fromkeys((*row.python, "3.11")))
    lines = [
        f"  {row.id}:",
        f"    name: {_quoted(_title(row))}",
        f"    if: {_quoted(_WHEN[row.tier].format(id=row.id))}",
        f"    runs-on: {_quoted(row.runner)}",
        "    timeout-minutes: 60",
        *(["    continue-on-error: true"] if row.gate == "informational" else []),
        "    steps:",
        "      - uses: actions/checkout@v4",
        "      - uses: actions/setup-python@v5",
        "        with:",
        "          python-version: |",
        pythons,
        "      - run: make row ROW="
        + row.id
        + " PYTHON=python3.11"
        + (f" TORCH='{row.torch}'" if row.torch else "")
        + (" TORCH_INDEX=https://download.pytorch.org/whl/cpu" if row.backend == "cpu" else ""),
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


def main(arguments: Sequence[str] | None = None, *, path: Path = WORKFLOW) -> int:
    """Write the workflow, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(prog="python -m ci.render")
    parser.add_argument("--check", action="store_true", help="exit 1 if the file differs from the matrix")
    options = parser.parse_args(arguments)
    text = workflow(load())
    if options.check:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return 0
        print(f"{path.name} does not say what ci/matrix.toml says; run: python -m ci.render", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
