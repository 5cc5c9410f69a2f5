"""Run rows of the matrix on this machine, then judge what they left behind.

``python -m ci.local --tier pr`` runs a tier; ``python -m ci.local cpu`` runs one row. A row without a runner is named
with its reason and not run; a run in which no row ran ends with status 1. ``--here`` says that this machine has what
the named rows lack: they run, and are held to what a blocking row is held to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ci.judge import ReportError, judge, read, show
from ci.schema import ROOT, TIERS, MatrixError, Row, load, of_tier

REPORTS = ROOT / ".halma" / "reports"


def command(row: Row, reports: Path, extra: Sequence[str] = ()) -> list[str]:
    """The command line of a row; a session row goes through nox, which writes one report a Python."""
    if row.session:
        return [sys.executable, "-m", "nox", "--session", row.session, "--", "--reports", str(reports), *extra]
    arguments = [sys.executable, "-m", "pytest", *row.select]
    if not row.devices:
        # A file stays on one worker, so that what its tests share (captures, scratch environments) is made once.
        arguments += ["-n", "2", "--dist", "loadfile"]
    if row.markers:
        arguments += ["-m", row.markers]
    arguments += ["--halma-row", row.id, "--halma-backend", row.backend, "--halma-require-backend", row.backend]
    for capability in row.require:
        arguments += ["--halma-require-capability", capability]
    return [*arguments, "--halma-report", str(reports / f"{row.id}.json"), *extra]


def chosen(rows: Sequence[Row], names: Sequence[str], tier: str | None) -> tuple[Row, ...]:
    """The rows that were asked for.

    Raises:
        MatrixError: a name that no row has, or neither names nor a tier.
    """
    known = {row.id: row for row in rows}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise MatrixError(f"no row is called {', '.join(unknown)}; rows: {', '.join(known)}")
    if names:
        return tuple(known[name] for name in names)
    if tier is None:
        raise MatrixError(f"name a row ({', '.join(known)}) or a --tier")
    return of_tier(rows, tier)


def run(
    rows: Sequence[Row],
    *,
    extra: Sequence[str] = (),
    reports: Path = REPORTS,
    whole_tier: bool,
    execute: Callable[[list[str], dict[str, str]], int] | None = None,
) -> int:
    """Run ``rows`` one after the other and judge them; 0 only if every blocking row holds."""
    reports.mkdir(parents=True, exist_ok=True)
    for old in reports.glob("*.json"):
        old.unlink()  # a report of an earlier run must not stand in for one that is missing now
    execute = execute or _execute
    failed: list[str] = []
    for row in rows:
        if not row.runs:
            print(f"ci: row {row.id} is declared and not run: {row.reason}", flush=True)
            continue
        print(f"ci: row {row.id}", flush=True)
        begin = time.monotonic()
        code = execute(command(row, reports, extra), environment(row))
        print(f"ci: row {row.id} ended with status {code} after {time.monotonic() - begin:.0f} s", flush=True)
        if code != 0 and row.gate == "blocking":
            failed.append(row.id)
    if not any(row.runs for row in rows):
        print("ci: no row ran: that is a failure, not a pass", file=sys.stderr)
        return 1
    try:
        found = read(sorted(reports.glob("*.json")))
    except ReportError as error:  # a row that was killed while it wrote
        print(f"ci: {error}", file=sys.stderr)
        return 1
    verdict = judge([row for row in rows if row.gate == "blocking"], found, whole_tier=whole_tier)
    show(verdict, found)
    if failed:
        print(f"ci: failed rows: {', '.join(failed)}", file=sys.stderr)
    return 0 if verdict.ok and not failed else 1


def environment(row: Row) -> dict[str, str]:
    """What a row's tests see: settings of its own only; the caller's HALMA_* would make a row mean something else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALMA_")}
    return {**kept, **row.variables}


def _execute(arguments: list[str], variables: dict[str, str]) -> int:
    return subprocess.run(arguments, cwd=ROOT, env=variables, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.local", epilog="What follows -- goes to pytest.")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--tier", choices=TIERS)
    parser.add_argument("--here", action="store_true", help="run the named rows although they have no runner")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    try:
        rows = chosen(load(), options.rows, options.tier)
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 2
    if not rows:
        print(f"ci: tier {options.tier} has no rows: nothing was run", file=sys.stderr)
        return 2
    if options.here and options.rows:
        rows = tuple(replace(row, runner="here", gate="blocking") for row in rows)
    return run(rows, extra=given[cut + 1 :], whole_tier=not options.rows)


if __name__ == "__main__":
    sys.exit(main())
