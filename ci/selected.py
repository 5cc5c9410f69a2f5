"""Which test files the rows run: ``ci/selected.txt``, written by ``python -m ci.render`` and compared by ``--check``.

A row that selects a folder does not notice that a file in it went away; this list does, and it shows in a review. A
test file that no row runs is refused: the row that was its only runner was deleted, or it never had one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.schema import ROOT, MatrixError, Row

SELECTED = ROOT / "ci" / "selected.txt"
PLACES = ("tests", "src/halma/hal/testing/conformance")
"""Where test files are."""
_HEAD = "# Written by `python -m ci.render`: each test file, and the rows of ci/matrix.toml that select it.\n"


def files_of(row: Row, root: Path = ROOT) -> tuple[str, ...]:
    """The test files that a row runs. Without torch only those that say so are collected (tests/conftest.py), and
    the files of rank processes want two devices (tests/gpu/conftest.py)."""
    found: set[Path] = set()
    for selected in row.select:
        place = root / selected
        found.update([place] if place.is_file() else place.rglob("test_*.py"))
    return tuple(sorted(path.relative_to(root).as_posix() for path in found if _collected(row, path)))


def _collected(row: Row, path: Path) -> bool:
    in_gpu = "gpu" in path.parts
    if not row.torch and "pytest.mark.torchfree" not in path.read_text(encoding="utf-8"):
        return False
    if in_gpu and path.name.startswith("test_cuda_") and row.backend != "cuda":
        return False
    if in_gpu and path.name == "test_rank_processes.py" and row.devices < 2:
        return False
    return not (in_gpu and row.backend == "cpu")


def text(rows: Iterable[Row], root: Path = ROOT) -> str:
    """The list.

    Raises:
        MatrixError: test files that no row runs, or a row that runs none.
    """
    runs: dict[str, list[str]] = {path.relative_to(root).as_posix(): [] for path in every_file(root)}
    problems: list[str] = []
    for row in rows:
        files = files_of(row, root)
        if not files:
            problems.append(f"{row.id}: its selection holds no test file that it could run")
        for file in files:
            runs[file].append(row.id)
    problems += [f"{file}: no row runs it" for file, ids in runs.items() if not ids]
    if problems:
        raise MatrixError("\n".join(problems))
    return _HEAD + "".join(f"{file}: {' '.join(ids)}\n" for file, ids in sorted(runs.items()))


def every_file(root: Path = ROOT) -> Sequence[Path]:
    """Every test file of the project."""
    found = [path for place in PLACES for path in sorted((root / place).rglob("test_*.py"))]
    return [path for path in found if "third_party" not in path.parts]


def differences(old: str, new: str) -> list[str]:
    """What went away and what came, as one would say it."""
    before, now = ({line.split(": ")[0]: line for line in one.splitlines()} for one in (old, new))
    gone = [f"{name} is gone" for name in before if name not in now]
    came = [f"{name} is new" for name in now if name not in before]
    moved = [f"other rows run {name}" for name in now if name in before and before[name] != now[name]]
    return gone + came + moved
