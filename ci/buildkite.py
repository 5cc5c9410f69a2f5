"""The matrix as a pipeline of Buildkite. Queues are called like the matrix's runners.

A nightly build is a schedule's; a manual row is a build made by hand with ``ROW`` in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ci.github import make_row, title
from ci.schema import HOSTED, Row, of_tier

_HEAD = "# Written by `python -m ci.render` from ci/matrix.toml: edit that, not this.\nsteps:\n"
_WHEN = {
    "pr": 'build.source != "schedule" && build.env("ROW") == null',
    "nightly": 'build.source == "schedule"',
    "manual": 'build.env("ROW") == "{id}"',
}
_LINT = "make lint PYTHON=python3.11 TORCH_INDEX=https://download.pytorch.org/whl/cpu"
_MOST = 70
"""Characters that Buildkite takes as the reason of a skip."""


def pipeline(rows: Sequence[Row]) -> str:
    """The pipeline's text: a step a row. One without a runner is a step that is skipped and says why."""
    steps = [_step("lint", "lint", HOSTED, command=_LINT, timeout_in_minutes=20)]
    steps += [_running(row) if row.runs else _declared(row) for row in rows]
    for tier in ("pr", "nightly"):
        running = [row for row in of_tier(rows, tier) if row.runs]
        if running:
            steps.append(_judging(tier, running))
    return _HEAD + "".join(steps)


def _step(key: str, label: str, queue: str, **more: Any) -> str:
    fields = {"key": key, "label": label, "agents": {"queue": queue}, **more}
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]  # JSON is YAML
    return "  - " + "\n    ".join(lines) + "\n"


def _running(row: Row) -> str:
    soft: dict[str, Any] = {"soft_fail": True} if row.gate == "informational" else {}
    return _step(
        row.id,
        title(row),
        row.runner,
        **{"if": _WHEN[row.tier].format(id=row.id)},
        command=make_row(row),
        timeout_in_minutes=60,
        artifact_paths=".halma/reports/*.json",
        **soft,
    )


def _declared(row: Row) -> str:
    reason = row.reason if len(row.reason) <= _MOST else row.reason[: _MOST - 3] + "..."
    return _step(row.id, f"{row.id}: declared, not run: {row.reason}", HOSTED, skip=reason, command="exit 1")


def _judging(tier: str, rows: Sequence[Row]) -> str:
    commands = [
        'buildkite-agent artifact download ".halma/reports/*.json" .',
        f"python3.11 -m ci.judge --tier {tier} .halma/reports/*.json",
    ]
    return _step(
        f"judge-{tier}",
        f"what the {tier} rows showed (T1 to T5)",
        HOSTED,
        **{"if": _WHEN[tier]},
        depends_on=[{"step": row.id, "allow_failure": True} for row in rows],
        command=commands,
        timeout_in_minutes=5,
    )
