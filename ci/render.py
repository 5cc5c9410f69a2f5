"""Write what follows from the matrix: ``python -m ci.render``; ``--check`` fails if a file is not up to date.

The workflow of GitHub Actions (:mod:`ci.github`), Buildkite's pipeline (:mod:`ci.buildkite`), and the list of test
files that rows run (:mod:`ci.selected`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ci import buildkite, github, selected
from ci.schema import ROOT, MatrixError, Row, load

WRITERS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    ".github/workflows/ci.yml": github.workflow,
    ".buildkite/pipeline.yml": buildkite.pipeline,
    "ci/selected.txt": selected.text,
}


def drift(rows: Sequence[Row], root: Path = ROOT) -> list[str]:
    """Every file that does not say what the matrix says, and how."""
    problems: list[str] = []
    for name, write in WRITERS.items():
        path, new = root / name, write(rows)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == new:
            continue
        problems.append(f"{name} does not say what ci/matrix.toml says; run: python -m ci.render")
        if write is selected.text:
            problems += [f"  {line}" for line in selected.differences(old, new)]
    return problems


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Write the files below ``root``, or with ``--check`` compare them."""
    parser = argparse.ArgumentParser(prog="python -m ci.render")
    parser.add_argument("--check", action="store_true", help="exit 1 if a file differs from the matrix")
    options = parser.parse_args(arguments)
    try:
        rows = load()
        problems = drift(rows, root)
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 1
    if options.check:
        for problem in problems:
            print(problem, file=sys.stderr)
        return 1 if problems else 0
    for name, write in WRITERS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
